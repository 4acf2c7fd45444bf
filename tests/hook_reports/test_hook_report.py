"""A hook report names what a hook gets, by value, and leaves the module as it was."""

import collections
import inspect
import itertools
import random
import re
import weakref
from collections.abc import Callable
from typing import Any, cast

import numpy
import pytest
import torch
from torch import Tensor, nn
from torch.autograd import graph
from torch.nn import functional as F
from torch.testing import assert_close
from torch.utils.checkpoint import checkpoint

import gradlib
from gradlib import NotCopyableError
from gradlib.hook_reports.hooks import (
    ACCUMULATED,
    FULL,
    FULL_PRE,
    KINDS,
    LEGACY,
    NODE,
    NODE_PRE,
    SEVERAL,
    TENSOR,
)
from gradlib.hook_reports.known import KnownGradients
from gradlib.hook_reports.naming import name_by_value
from gradlib.hook_reports.tensor_names import Names
from gradlib.hook_reports.trial import Trial, cotangent
from gradlib.tree import Tree

from ..elsewhere import passes_elsewhere
from ..one_way import one_way

torch.manual_seed(0)  # the modules of LEGACY_CASES are made on import
MADE = torch.Generator().manual_seed(1)
HERE = torch.ones(()).device


def given(*shape: int) -> Tensor:
    made = torch.randn(*shape, generator=MADE, device="cpu")
    return made.to(HERE).requires_grad_()


class Of(nn.Module):
    """A function of modules and tensors, as a module."""

    def __init__(self, function: Callable[..., Any], *parts: nn.Module) -> None:
        super().__init__()
        self.function = function
        self.parts = nn.ModuleList(parts)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(*self.parts, *args, **kwargs)


class WithAttribute(nn.Module):
    """Has a tensor that somebody forgot to make a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = given(3)

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale


def report_of(module: nn.Module, *args: Any, **kwargs: Any) -> gradlib.HookReport:
    report = gradlib.hook_report(module, *args, **kwargs)
    lines = [line.strip() for line in str(report).splitlines()]
    of_words = [line for line in lines if " " in line]  # and no address alone
    assert max(map(len, of_words)) <= 100
    assert report._repr_html_().count("<table>") == len(KINDS) + 1
    return report


def whats(kind: gradlib.HookKind) -> dict[str, str]:
    return {entry.place: entry.what for entry in kind.entries}


def test_every_kind_this_torch_has_is_tried() -> None:
    of_modules = {it for it in dir(nn.Module) if re.match("register_.*backward", it)}
    of_others = {
        f"{kind.__name__}.{it}"
        for kind in (Tensor, graph.Node)
        for it in dir(kind)
        if re.match("register.*hook", it)
    }
    of_graphs = {it for it in dir(graph) if re.match("register.*hook", it)}
    assert set(KINDS) == of_modules | of_others | of_graphs
    assert tuple(report_of(nn.Linear(3, 2), given(4, 3)).kinds) == KINDS


# Every entry, against torch.autograd.grad of the module itself


def gradients(module: nn.Module, *args: Any) -> dict[str, Tensor]:
    """The gradients of arguments, parameters and outputs, by name."""
    given_as = inspect.signature(module.forward).bind(*args).arguments
    starred = {f"args[{i}]": x for i, x in enumerate(given_as.pop("args", ()))}
    named = {**dict(module.named_parameters()), **given_as, **starred}
    if isinstance(module, WithAttribute):
        named["scale"] = module.scale
    asked = {name: x for name, x in named.items() if x.requires_grad}
    output = module(*args)
    several = isinstance(output, tuple)
    outputs: tuple[Tensor, ...] = output if several else (output,)
    vs = tuple(cotangent(i, y) for i, y in enumerate(outputs))
    grads = torch.autograd.grad(outputs, list(asked.values()), vs)
    names = [f"output[{i}]" if several else "output" for i in range(len(outputs))]
    return dict(zip([*asked, *names], (*grads, *vs), strict=True))


def claimed(what: str, known: dict[str, Tensor], shape: torch.Size) -> Tensor:
    """What an entry must be if its name is right."""
    name, _, form = what.removeprefix("gradient of ").partition(", ")
    grad = known[name].to_dense() if known[name].is_sparse else known[name]
    if form == "transposed":
        return grad.T
    if form.startswith("permuted by "):
        return grad.permute([int(digit) for digit in re.findall(r"\d", form)])
    return {"": lambda: grad, "reshaped": lambda: grad.reshape(shape)}[form]()


IN_ORDER = ["gradient of input", "gradient of weight", "gradient of bias"]
LINEAR = ["gradient of bias", "gradient of input", "gradient of weight, transposed"]
VIEW = "UnsafeViewBackward0" if torch.__version__ >= "2.15" else "ViewBackward0"
INNER = "gradient of an inner tensor, from {}, equal to that of output"

# What the legacy hook gets as grad_input, and the node it sits on
LEGACY_CASES: dict[str, tuple[nn.Module, tuple[Any, ...], str, list[str]]] = {
    "Linear": (nn.Linear(3, 2), (given(4, 3),), "AddmmBackward0", LINEAR),
    "square": (nn.Linear(3, 3), (given(3, 3),), "AddmmBackward0", LINEAR),
    "double": (
        nn.Linear(3, 2).double(),
        (given(4, 3).detach().double().requires_grad_(),),
        "AddmmBackward0",
        LINEAR,
    ),
    "Linear without bias": (
        nn.Linear(3, 2, bias=False),
        (given(4, 3),),
        "MmBackward0",
        LINEAR[1:],
    ),
    "Linear on data": (
        nn.Linear(3, 2),
        (torch.randn(4, 3),),
        "AddmmBackward0",
        [LINEAR[0], "None: input 1 of AddmmBackward0 needs no gradient", LINEAR[2]],
    ),
    "Linear on three dimensions": (
        nn.Linear(3, 2),
        (given(4, 5, 3),),
        VIEW,
        [INNER.format("AddmmBackward0") + ", reshaped"],
    ),
    # The copy must have the strides of the input: they decide the last node.
    "Linear on a tensor with gaps": (
        nn.Linear(3, 2),
        (torch.randn(4, 5, 6)[..., ::2].requires_grad_(),),
        "AddBackward0",
        [INNER.format("UnsafeViewBackward0"), "gradient of bias"],
    ),
    "Conv2d": (
        nn.Conv2d(2, 3, 3),
        (given(2, 2, 5, 5),),
        "ConvolutionBackward0",
        IN_ORDER,
    ),
    "Conv2d without bias": (
        nn.Conv2d(2, 3, 3, bias=False),
        (given(2, 2, 5, 5),),
        "ConvolutionBackward0",
        [*IN_ORDER[:2], "None: input 2 of ConvolutionBackward0 needs no gradient"],
    ),
    "Conv1d": (nn.Conv1d(2, 3, 3), (given(2, 2, 5),), "ConvolutionBackward0", IN_ORDER),
    "BatchNorm2d": (
        nn.BatchNorm2d(3),
        (given(4, 3, 2, 2),),
        "NativeBatchNormBackward0",
        IN_ORDER,
    ),
    "LayerNorm": (
        nn.LayerNorm(3),
        (given(4, 3),),
        "NativeLayerNormBackward0",
        IN_ORDER,
    ),
    "Embedding": (
        nn.Embedding(5, 3),
        (torch.tensor([1, 2, 2]),),
        "EmbeddingBackward0",
        ["gradient of weight"],
    ),
    "sparse Embedding": (
        nn.Embedding(5, 3, sparse=True),
        (torch.tensor([1, 2, 2]),),
        "EmbeddingBackward0",
        ["gradient of weight"],
    ),
    "ReLU": (nn.ReLU(), (given(4, 3),), "ReluBackward0", IN_ORDER[:1]),
    "MSELoss": (
        nn.MSELoss(),
        (given(4, 3), torch.randn(4, 3)),
        "MseLossBackward0",
        ["gradient of input", "None: input 1 of MseLossBackward0 needs no gradient"],
    ),
    "CrossEntropyLoss": (
        nn.CrossEntropyLoss(),
        (given(4, 3), torch.tensor([0, 1, 2, 0])),
        "NllLossBackward0",
        ["gradient of an inner tensor, from LogSoftmaxBackward0"],
    ),
    "Bilinear": (
        nn.Bilinear(2, 3, 4),
        (given(5, 2), given(5, 3)),
        "AddBackward0",
        [INNER.format("ViewBackward0"), "gradient of bias"],
    ),
    "GRU": (
        nn.GRU(3, 5),
        (given(2, 1, 3),),
        "StackBackward0",
        ["a part of the gradient of an inner tensor, from AddBackward0"] * 2,
    ),
    "attention": (
        nn.MultiheadAttention(4, 2, batch_first=True),
        (given(2, 3, 4), given(2, 3, 4), given(2, 3, 4)),
        "TransposeBackward0",
        [INNER.format("ViewBackward0") + "[0], permuted by (1, 0, 2)"],
    ),
    "Sequential of Linear": (
        nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2)),
        (given(5, 3),),
        "AddmmBackward0",
        [
            "gradient of 1.bias",
            "gradient of output of 0",
            "gradient of 1.weight, transposed",
        ],
    ),
    "Sequential ending in ReLU": (
        nn.Sequential(nn.Linear(3, 4), nn.ReLU()),
        (given(5, 3),),
        "ReluBackward0",
        ["gradient of output of 0"],
    ),
    "a weight of ones": (
        Of(lambda a, w: a.tanh() * w),
        (given(4, 3), torch.ones(3).requires_grad_()),
        "MulBackward0",
        [INNER.format("TanhBackward0"), "gradient of args[1]"],
    ),
    "product": (
        Of(lambda a, b: a * b),
        (given(3), given(3)),
        "MulBackward0",
        ["gradient of args[0]", "gradient of args[1]"],
    ),
    "sum of two layers": (
        Of(lambda f, g, a: f(a) + g(a), nn.Linear(3, 2), nn.Linear(3, 2)),
        (given(4, 3),),
        "AddBackward0",
        [INNER.format("AddmmBackward0")] * 2,
    ),
    "an operation after the layer": (
        Of(lambda f, a: F.relu(f(a)) * 2 + 1, nn.Linear(3, 2)),
        (given(4, 3),),
        "AddBackward0",
        [
            INNER.format("MulBackward0"),
            "None: input 1 of AddBackward0 needs no gradient",
        ],
    ),
    "two outputs": (
        Of(lambda a: (a.exp(), a.sin())),
        (given(3),),
        "ExpBackward0",
        ["a part of the gradient of args[0], which has other uses, too"],
    ),
    "plain attribute": (
        WithAttribute(),
        (given(4, 3),),
        "MulBackward0",
        ["gradient of x", "gradient of scale"],
    ),
}


CPUS = {"BatchNorm2d", "GRU"}
ON_A_CPU = pytest.mark.skipif(HERE.type != "cpu", reason="a GPU has nodes of its own")


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[ON_A_CPU] if name in CPUS else [])
        for name in LEGACY_CASES
    ],
)
def test_each_entry_is_what_its_name_says(name: str) -> None:
    module, args, node, expected = LEGACY_CASES[name]
    report = report_of(module, *args)
    legacy = report.kinds[LEGACY]
    assert report.last_node == node
    assert [entry.what for entry in legacy.grad_input] == expected
    assert len(report.last_node_inputs) == len(expected)
    if name == "CrossEntropyLoss":
        assert "torch.int64 zeros: target" in whats(report.kinds[FULL])["grad_input[1]"]
    known = gradients(module, *args)
    checked = 0
    for kind in report.kinds.values():
        for entry in kind.entries:
            if entry.what.startswith("None:"):
                assert entry.value is None
            elif entry.what.startswith("gradient of ") and "inner" not in entry.what:
                if " of 0" in entry.what:
                    continue  # of a module inside: the next test
                assert entry.value is not None
                expected_value = claimed(entry.what, known, entry.value.shape)
                torch.testing.assert_close(entry.value, expected_value)
                checked += 1
    assert checked >= len(KINDS)


def test_the_output_of_a_module_inside() -> None:
    first, second = nn.Linear(3, 4), nn.Linear(4, 2)
    x = given(5, 3)
    report = report_of(nn.Sequential(first, second), x)
    y = second(h := first(x))
    (dh,) = torch.autograd.grad(y, h, cotangent(0, y))
    value = report.kinds[LEGACY].grad_input[1].value
    assert value is not None
    torch.testing.assert_close(value, dh)


@pytest.mark.cpu
@pytest.mark.usefixtures("cudnn_looks_on")
def test_that_the_weights_of_a_copied_lstm_lie_apart_is_nobodys_concern() -> None:
    x = torch.randn(4, 2, 3)  # on the CPU, wherever the others are
    assert "contiguous" not in str(gradlib.hook_report(nn.LSTM(3, 5), x))


@ON_A_CPU
def test_lstm_on_one_layer_has_an_entry_for_each_argument_of_its_kernel() -> None:
    report = report_of(nn.LSTM(3, 5), given(4, 2, 3))
    assert report.last_node == "MkldnnRnnLayerBackward0"
    legacy = report.kinds[LEGACY]
    both = "gradient of bias_ih_l0 and of bias_hh_l0"  # they are equal
    nothing = "None: input {} of MkldnnRnnLayerBackward0 needs no gradient"
    assert [entry.what for entry in legacy.grad_input] == [
        "gradient of input",
        "gradient of weight_ih_l0",
        "gradient of weight_hh_l0",
        both,
        both,
        nothing.format(5),
        nothing.format(6),
    ]
    assert [entry.what for entry in legacy.grad_output] == [
        "gradient of output[0]",
        "gradient of output[1][0], reshaped",
        "gradient of output[1][1], reshaped",
    ]
    lost = "None: output[1] is of type tuple, and no tensor inside gets an entry"
    assert whats(report.kinds[FULL])["grad_output[1]"] == lost


def test_full_hooks_have_an_entry_for_each_argument_and_output() -> None:
    def several(a: Tensor, b: Tensor, n: int, pair: list[Tensor]) -> tuple[Any, ...]:
        return a * b * pair[0], a * n, n

    report = report_of(Of(several), given(3), torch.randn(3), 2, [given(3)])
    assert whats(report.kinds[FULL]) == {
        "grad_input[0]": "gradient of args[0]",
        "grad_input[1]": "zeros: args[1] does not require grad",
        "grad_input[2]": "None: args[2] is of type int",
        "grad_input[3]": (
            "None: args[3] is of type list, and no tensor inside gets an entry"
        ),
        "grad_output[0]": "gradient of output[0]",
        "grad_output[1]": "gradient of output[1]",
        "grad_output[2]": "None: output[2] is of type int",
    }
    outputs = {p: w for p, w in whats(report.kinds[FULL]).items() if "output" in p}
    assert whats(report.kinds[FULL_PRE]) == outputs
    assert "4 entries in grad_input" in report.kinds[FULL].why
    assert "3 entries in grad_output" in report.kinds[FULL_PRE].why
    assert whats(report.kinds[TENSOR]) == {
        "grad of output[0]": "gradient of output[0]",
        "grad of output[1]": "gradient of output[1]",
    }


def test_a_keyword_tensor_is_in_the_legacy_tuple_only() -> None:
    report = report_of(Of(lambda x, scale: x * scale), given(3), scale=given(3))
    legacy = [entry.what for entry in report.kinds[LEGACY].grad_input]
    assert legacy == ["gradient of args[0]", "gradient of scale"]
    assert len(report.kinds[FULL].grad_input) == 1
    assert "No entry for a keyword argument (scale)" in report.kinds[FULL].why


def test_one_tensor_in_several_places() -> None:
    x = given(2, 3, 4)
    report = report_of(nn.MultiheadAttention(4, 2), x, x, x)
    entries = report.kinds[FULL].grad_input
    assert [entry.what for entry in entries] == [
        "gradient of query",
        "gradient of key",
        "gradient of value",
    ]
    twice = report_of(Of(lambda a, b: (a + b).exp()), x, x).kinds[FULL].grad_input
    both = "gradient of args[0] and of args[1]"
    assert [entry.what for entry in twice] == [both, both]


def test_an_argument_that_is_returned_and_used_elsewhere() -> None:
    class ReturnsOne(nn.Module):
        def forward(self, x: Tensor, z: Tensor) -> tuple[Tensor, Tensor]:
            return x, z.sin()

    x = given(4, 3)
    found = whats(report_of(ReturnsOne(), x, x).kinds["Tensor.register_hook"])
    assert (
        found["grad of output[0]"] == "gradient of output[0], with all its other uses"
    )


# Hooks of tensors and of nodes, each against what somebody who sets one gets


def test_what_hooks_of_tensors_and_nodes_get() -> None:
    linear, x = nn.Linear(3, 2), given(4, 3)
    kinds = report_of(linear, x).kinds
    named = {"input": x, "weight": linear.weight, "bias": linear.bias}
    got: dict[str, list[Any]] = {}
    y = linear(x)
    graph.register_multi_grad_hook(
        [*named.values()], lambda grads: got.update({SEVERAL: [*grads]})
    )
    y.grad_fn.register_hook(lambda i, o: got.update({NODE: [*i, *o]}))
    y.grad_fn.register_prehook(lambda o: got.update({NODE_PRE: [*o]}))
    accumulated: dict[str, Tensor] = {}
    for name, leaf in named.items():
        leaf.register_post_accumulate_grad_hook(
            lambda it, name=name: accumulated.update({f"{name}.grad": it.grad.clone()})
        )
    y.backward(cotangent(0, y))
    for kind, expected in got.items():
        assert_close([entry.value for entry in kinds[kind].entries], expected)
    found = {entry.place: entry.value for entry in kinds[ACCUMULATED].entries}
    assert_close(found, accumulated)
    of_all = [f"gradient of {name}" for name in named]
    assert [*whats(kinds[ACCUMULATED]).values()] == of_all
    assert [*whats(kinds[SEVERAL]).values()] == of_all
    assert whats(kinds[NODE]) == whats(kinds[LEGACY])
    assert whats(kinds[NODE_PRE]) == {"grad_output[0]": "gradient of output"}
    assert "3 entries in grad_input: one for each input of Addmm" in kinds[NODE].why
    assert "1 entry in grad_output: one for each output of Addmm" in kinds[NODE_PRE].why


def test_a_tensor_that_gets_nothing() -> None:
    class Leaves(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used = nn.Parameter(torch.full((3,), 2.0))
            self.unused = nn.Parameter(torch.full((3,), 2.0))

        def forward(self, x: Tensor) -> Tensor:
            return x * self.used

    kinds = report_of(Leaves(), given(3).exp()).kinds
    nothing = "None: nothing flows to it"
    assert whats(kinds[ACCUMULATED]) == {  # x is no leaf
        "used.grad": "gradient of used",
        "unused.grad": nothing,
    }
    assert whats(kinds[SEVERAL]) == {
        "grads[0]": "gradient of x",
        "grads[1]": "gradient of used",
        "grads[2]": nothing,
    }


def test_a_tensor_that_the_pass_begins_at_is_not_counted() -> None:
    class Overwrites(nn.Module):
        def forward(self, x: Tensor, by: Tensor) -> Tensor:
            return x.mul_(by)

    several = report_of(nn.Identity(), given(3)).kinds[SEVERAL]
    assert several.entries == ()
    assert several.why.startswith("Never called: torch does not count a tensor")
    several = report_of(Overwrites(), given(3).exp(), given(3)).kinds[SEVERAL]
    assert [*whats(several).values()] == [
        "None: torch called the hook without it",
        "gradient of by",
    ]


def test_no_gradient_comes_to_an_argument() -> None:
    class GivesItsOwn(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.own = nn.Parameter(torch.ones(3))

        def forward(self, x: Tensor) -> Tensor:
            del x
            return self.own.sin()

    kinds = report_of(GivesItsOwn(), given(3)).kinds
    assert kinds[FULL].entries == ()
    assert "waits for the gradient of one, and none comes" in kinds[FULL].why
    assert len(report_of(GivesItsOwn(), torch.ones(3)).kinds[FULL].entries) == 2


def test_no_node_where_no_tensor_is_the_first() -> None:
    kinds = report_of(Of(lambda x: ["a word", x * 2]), given(3)).kinds
    assert {kinds[kind].why for kind in (NODE, NODE_PRE)} == {
        "Not tried: there is no node that register_backward_hook would sit on."
    }


def test_no_leaf_and_no_gradient() -> None:
    kinds = report_of(nn.Tanh(), given(3).exp()).kinds
    assert kinds[ACCUMULATED].entries == ()
    assert kinds[ACCUMULATED].why.startswith("Never called: neither an argument nor")
    assert [*whats(kinds[SEVERAL]).values()] == ["gradient of input"]
    alone = report_of(Of(lambda: torch.ones(3, requires_grad=True).exp())).kinds
    assert alone[SEVERAL].entries == ()
    assert alone[SEVERAL].why.startswith("Never called: no gradient comes to")
    assert len(alone[NODE].entries) == 2


def test_an_output_used_in_another_output() -> None:
    def chained(a: Tensor) -> tuple[Tensor, Tensor]:
        y = a.exp()
        return y, y.sin()

    x = given(3)
    kinds = report_of(Of(chained), x).kinds
    total = kinds[TENSOR].entries[0]
    assert total.what == "gradient of output[0] with its use in other outputs"
    assert kinds[LEGACY].grad_output[0].what == total.what
    assert kinds[FULL].grad_output[0].what == "gradient of output[0]"
    y = x.exp().detach().requires_grad_()
    expected = cotangent(0, y) + cotangent(1, y) * y.cos()
    assert total.value is not None
    torch.testing.assert_close(total.value, expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_use_in_another_output_that_hardly_shows(dtype: torch.dtype) -> None:
    x = torch.randn(3000, 3, generator=MADE, device="cpu")
    x = x.to(HERE, dtype).requires_grad_()
    label = torch.zeros(3000, dtype=torch.long)
    module = Of(lambda x: (y := 2 * x, F.cross_entropy(y, label)))
    first, loss = (entry.what for entry in report_of(module, x).kinds[TENSOR].entries)
    assert first.endswith("output[0] with its use in other outputs")
    assert loss == "gradient of output[1]"
    both = report_of(Of(lambda x: (x * 1, x * 2)), x).kinds[TENSOR].entries
    assert [entry.what for entry in both] == [
        f"gradient of output[{i}]" for i in (0, 1)
    ]


class Times(torch.autograd.Function):
    """Gives both inputs their gradient, whether they require it or not."""

    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor) -> Tensor:
        ctx.save_for_backward(a, b)
        return a * b

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        a, b = ctx.saved_tensors
        return grads[0] * b, grads[0] * a


class Held(nn.Module):
    """Multiplies what it is given by what it holds."""

    def __init__(self, held: Tensor, *, buffer: bool = False) -> None:
        super().__init__()
        if buffer:
            self.register_buffer("held", held)
        else:
            self.held = held

    def forward(self, *xs: Tensor) -> Tensor:
        return Times.apply(sum(xs), self.held)


def test_a_gradient_for_what_does_not_require_it() -> None:
    x, idle = given(4, 3), given(4, 3).detach()
    frozen = nn.Parameter(given(4, 3).detach(), requires_grad=False)
    cases = [
        (Held(nn.Parameter(given(4, 3).detach())), idle, 0, "args[0]"),
        (Held(idle, buffer=True), x, 1, "held"),
        (Held(idle), x, 1, "held"),
        (Held(frozen), x, 1, "held"),
    ]
    for module, given_x, place, name in cases:
        entries = report_of(module, given_x).kinds[LEGACY].grad_input
        other = "held" if place == 0 else "args[0]"
        assert entries[place].what == f"gradient of {name}, which does not require grad"
        assert entries[1 - place].what == f"gradient of {other}"
        factor = module.held if place == 0 else given_x
        v = cotangent(0, module(given_x))
        assert_close(entries[place].value, v * factor.detach())


def test_a_gradient_for_a_computed_tensor_that_does_not_require_it() -> None:
    module = Of(lambda x: Times.apply(x.detach().exp(), x))
    entries = report_of(module, given(4, 3)).kinds[LEGACY].grad_input
    assert [entry.what for entry in entries] == [
        "gradient for a tensor that does not require grad",
        "gradient of args[0]",
    ]


def test_a_module_that_cannot_run_with_all_requiring_grad() -> None:
    class Counts(Held):
        def forward(self, *xs: Tensor) -> Tensor:
            self.held += 1
            return super().forward(*xs)

    module = Counts(given(4, 3).detach(), buffer=True)
    entries = report_of(module, given(4, 3)).kinds[LEGACY].grad_input
    assert entries[1].what == "gradient for a tensor that does not require grad"


def test_gradients_that_are_nearly_equal_are_told_apart() -> None:
    x = given(2, 4, 5, 5)
    entries = report_of(nn.LocalResponseNorm(2), x).kinds[LEGACY].grad_input
    assert [entry.what for entry in entries] == [
        "a part of the gradient of input, which has other uses, too",
        "gradient of an inner tensor, from PowBackward0",
    ]
    v = cotangent(0, x)
    value = entries[0].value
    assert value is not None
    assert 1e-6 < (value - v).abs().max() / v.abs().max() < 1e-3


class Adds(nn.Module):
    def __init__(self, *shape: int) -> None:
        super().__init__()
        self.w = nn.Parameter(given(*shape).detach())

    def forward(self, x: Tensor) -> Tensor:
        return Noisy.apply(x, self.w)


class Noisy(torch.autograd.Function):
    """Adds, and gives another gradient each time, as a GPU may: far apart it is not."""

    times = itertools.count()

    @staticmethod
    def forward(_ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        return x + w

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:  # noqa: ARG004 (torch's form)
        return 2 * grads[0], 3 * grads[0] * (1 + 1e-4 * (next(Noisy.times) % 2))


def test_what_differs_each_time_is_named_all_the_same() -> None:
    for _ in range(2):  # it differs from the first run, and from the second
        entries = report_of(Adds(4, 3), given(4, 3)).kinds[LEGACY].grad_input
        assert [it.what for it in entries] == ["gradient of x", "gradient of w"]
        next(Noisy.times)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sums_of_much_are_named(dtype: torch.dtype) -> None:
    x = torch.randn(20_000, 8, generator=MADE, device="cpu")
    x = x.to(HERE, dtype).requires_grad_()
    cases: list[tuple[nn.Module, list[str]]] = [
        (nn.Linear(8, 8), ["bias", "input", "weight, transposed"]),
        (nn.LayerNorm(8), ["input", "weight", "bias"]),
        (Held(given(8)), ["args[0]", "held"]),
    ]
    for module, names in cases:
        if isinstance(module, Held):
            module.held = module.held.detach().to(dtype).requires_grad_()
        entries = report_of(module.to(HERE, dtype), x).kinds[LEGACY].grad_input
        assert [entry.what for entry in entries] == [f"gradient of {n}" for n in names]


def test_a_part_of_an_inner_gradient_is_called_one() -> None:
    def dense(a: nn.Module, b: nn.Module, x: Tensor) -> Tensor:
        h = a(x)
        return torch.cat([h, b(h), x.sin()])

    first, second = nn.Linear(3, 3), nn.Linear(3, 3)
    x = given(4, 3)
    entries = report_of(Of(dense, first, second), x).kinds[LEGACY].grad_input
    assert [entry.what for entry in entries] == [
        "a part of the gradient of output of parts.0, which has other uses, too",
        "gradient of output of parts.1",
        "gradient of an inner tensor, from SinBackward0",
    ]
    v = cotangent(0, dense(first, second, x))
    assert_close(entries[0].value, v[:4])


def test_a_later_call_of_an_inner_module_is_told_from_its_first() -> None:
    def twice(a: nn.Module, x: Tensor) -> Tensor:
        g = a(h := a(x))
        return torch.cat([h, g, g.exp()])

    entries = report_of(Of(twice, nn.Tanh()), given(4, 3)).kinds[LEGACY].grad_input
    assert [entry.what for entry in entries[:2]] == [
        "a part of the gradient of output of parts.0, which has other uses, too",
        "a part of the gradient of output of parts.0, call 1, which has other uses, "
        "too",
    ]


def test_nested_inputs_have_their_path_as_name() -> None:
    module = Of(lambda batch, *, more: batch["x"] * more[0])
    report = report_of(module, {"x": given(3)}, more=[given(3)])
    legacy = [entry.what for entry in report.kinds[LEGACY].grad_input]
    assert legacy == ["gradient of args[0]['x']", "gradient of more[0]"]


def test_an_argument_that_is_called_as_a_parameter() -> None:
    class Scaled(nn.Linear):
        def forward(self, weight: Tensor) -> Tensor:  # type: ignore[override] (fewer)
            return super().forward(weight)

    report = report_of(Scaled(3, 2), given(4, 3))
    legacy = [entry.what for entry in report.kinds[LEGACY].grad_input]
    assert legacy[1:] == ["gradient of argument weight", LINEAR[2]]


def test_gradients_that_vanish() -> None:
    x = (-torch.ones(3)).requires_grad_()
    kinds = report_of(nn.ReLU(), x).kinds
    for kind in (FULL, LEGACY):
        assert kinds[kind].grad_input[0].what == "zeros: gradient of input"
    report = report_of(nn.Linear(2, 2), torch.zeros(1, 2, requires_grad=True))
    legacy = "zeros: gradient of input 2 of AddmmBackward0"
    assert report.kinds[LEGACY].grad_input[2].what == legacy


def test_an_argument_that_is_not_used() -> None:
    class Second(nn.Module):
        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            del x
            return 2 * y

    report = report_of(Second(), given(2), given(2))
    entry = report.kinds[FULL].grad_input[0]
    assert entry.what == "zeros: nothing flows to x"


def test_where_the_last_node_lets_nothing_flow() -> None:
    part = report_of(Of(lambda x: x.chunk(2)[1]), given(4)).kinds[LEGACY]
    nothing = "None: nothing flows into output 0 of SplitBackward0"
    assert part.grad_output[0].what == nothing
    assert part.grad_output[1].what == "gradient of output"
    product = report_of(Of(one_way), given(4), given(4)).kinds[LEGACY]
    nothing = "None: nothing flows out of input 1 of OneWayBackward"
    assert product.grad_input[1].what == nothing


def test_an_argument_that_a_hook_adds() -> None:
    module = Of(lambda x, y: x * 2 + y)
    module.register_forward_pre_hook(lambda _, args: (*args, torch.ones(4)))
    entries = report_of(module, given(4)).kinds[FULL].grad_input
    assert [it.what for it in entries] == [
        "gradient of args[0]",
        "zeros: a forward pre-hook added the argument",
    ]


def test_what_requires_grad_is_further_inside() -> None:
    kinds = report_of(Of(lambda x: (x.detach(), [x * 2])), given(3)).kinds
    for kind in (FULL, FULL_PRE):
        assert kinds[kind].entries == ()
        assert kinds[kind].why.endswith(
            "no tensor that requires grad is at the top level."
        )
    (entry,) = kinds[TENSOR].entries
    assert entry.place == "grad of output[1][0]"


def test_a_tensor_from_outside_keeps_its_gradient() -> None:
    outside = given(3)
    outside.grad = before = torch.ones(3)
    report = report_of(Of(lambda x: x * outside), given(3))
    legacy = [entry.what for entry in report.kinds[LEGACY].grad_input]
    outsider = "a leaf that is itself no argument or attribute"
    assert legacy == ["gradient of args[0]", f"gradient for {outsider}"]
    assert report.last_node_inputs == ("args[0]", outsider)
    returned = report_of(Of(lambda x: (x * 2, outside)), given(3))
    assert returned.kinds[FULL].grad_output[1].what == "gradient of output[1]"
    assert outside.grad is before
    assert before.equal(torch.ones(3))


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpoint(reentrant: bool) -> None:
    def forward(layer: nn.Module, x: Tensor) -> Any:
        return checkpoint(lambda v: layer(v).tanh(), x, use_reentrant=reentrant)

    report = report_of(Of(forward, nn.Linear(3, 2)), given(4, 3))
    assert report.kinds[FULL].grad_input[0].what == "gradient of args[0]"
    assert report.kinds[LEGACY].entries


@pytest.mark.parametrize(
    "dtype", [torch.float64, torch.bfloat16, torch.float16, torch.complex64]
)
def test_other_dtypes(dtype: torch.dtype) -> None:
    x = torch.randn(4, 3, dtype=dtype, requires_grad=True)
    report = report_of(nn.Linear(3, 2, dtype=dtype), x)
    assert [entry.what for entry in report.kinds[LEGACY].grad_input] == LINEAR


def test_a_module_that_calls_itself_is_reported_as_called_from_outside() -> None:
    class Again(nn.Linear):
        def forward(self, input: Tensor, times: int = 2) -> Tensor:  # noqa: A002 (a usual name)
            y = super().forward(input).tanh()
            return self(y, times - 1) * 2 if times else y

    kinds = report_of(Again(3, 3), given(4, 3)).kinds
    assert kinds[FULL].grad_input[0].what == "gradient of input"
    for kind in (LEGACY, FULL, FULL_PRE):
        assert kinds[kind].grad_output[0].what == "gradient of output"


# What hooks do not bear


def test_inplace() -> None:
    report = report_of(nn.ReLU(inplace=True), given(3, 4).clone())
    kinds = report.kinds
    assert (report.last_node, report.last_node_inputs) == ("ReluBackward0", ("input",))
    assert whats(kinds[LEGACY]) == {
        "grad_input[0]": "gradient of input",
        "grad_output[0]": "gradient of output",
    }
    assert whats(kinds[TENSOR]) == {"grad of output": "gradient of output"}
    for kind in (FULL, FULL_PRE):
        assert kinds[kind].entries == ()
        assert kinds[kind].why.startswith(
            "Never called: with this hook there is an err"
        )
        assert kinds[kind].error.startswith(
            "RuntimeError: Output 0 of BackwardHookFunc"
        )
        assert "is a view and is being modified inplace" in kinds[kind].error
        assert "RuntimeError: Output 0 of BackwardHookFunc" in str(kinds[kind])


def test_data_that_the_module_overwrites() -> None:
    class Shifted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bias = nn.Parameter(torch.randn(3))

        def forward(self, x: Tensor) -> Tensor:
            x += self.bias
            return x

    report = report_of(Shifted(), torch.ones(4, 3))
    assert whats(report.kinds[LEGACY]) == {
        "grad_input[0]": "None: input 0 of AddBackward0 needs no gradient",
        "grad_input[1]": "gradient of bias",
        "grad_output[0]": "gradient of output",
    }


def test_dict_output() -> None:
    module = Of(lambda f, x: {"a": f(x), "b": x * 2}, nn.Linear(3, 2))
    kinds = report_of(module, given(4, 3)).kinds
    for kind in (FULL, FULL_PRE):
        assert kinds[kind].entries == ()
        assert "the output is of type dict" in kinds[kind].why
        (warning,) = kinds[kind].warnings
        assert warning.startswith(
            "UserWarning: For backward hooks to be called, module"
        )
    assert whats(kinds[TENSOR])["grad of output['b']"] == "gradient of output['b']"
    assert kinds[LEGACY].grad_output[0].what == "gradient of output['a']"


def test_a_dict_whose_first_value_is_no_tensor() -> None:
    module = Of(lambda f, x: {"count": 4, "y": f(x)}, nn.Linear(3, 2))
    report = report_of(module, given(4, 3))
    assert report.last_node == "AddmmBackward0"
    assert report.kinds[LEGACY].grad_output[0].what == "gradient of output['y']"


def test_what_the_module_warns_of_itself_is_no_warning_of_a_hook() -> None:
    module, args = nn.MSELoss(), (given(3), torch.randn(1, 3))
    kinds = report_of(module, *args).kinds
    assert kinds[TENSOR].warnings == ()
    with pytest.warns(UserWarning, match="broadcasting"):
        module(*args)


def test_a_kind_is_printed_as_a_table() -> None:
    name, head, *rows = str(
        report_of(nn.Linear(3, 2), given(4, 3)).kinds[FULL]
    ).splitlines()
    assert name == FULL
    assert head.split() == ["entry", "shape", "what", "it", "is"]
    assert rows[0].split(maxsplit=3) == [
        "grad_input[0]",
        "[4,",
        "3]",
        "gradient of input",
    ]
    nothing = str(report_of(nn.ReLU(), torch.randn(3)).kinds[FULL])
    assert "entry" not in nothing


def test_the_legacy_hook_warns() -> None:
    (warning,) = report_of(nn.Linear(3, 2), given(4, 3)).kinds[LEGACY].warnings
    assert warning.startswith("FutureWarning: Using a non-full backward hook when the")


def test_a_first_layer_has_no_gradient_of_its_input() -> None:
    kinds = report_of(nn.Linear(3, 2), torch.randn(4, 3)).kinds
    (entry,) = kinds[FULL].grad_input
    assert (entry.value, entry.what) == (None, "None: input does not require grad")
    assert "No tensor among them requires grad" in kinds[FULL].why
    assert (
        kinds[FULL].warnings[0].startswith("UserWarning: Full backward hook is firing")
    )


def test_nothing_requires_grad() -> None:
    module = nn.Linear(3, 2)
    reports = [report_of(nn.ReLU(), torch.randn(3))]
    with torch.no_grad():
        reports.append(report_of(module, given(4, 3)))
    for report, end in zip(reports, ("grad.", "gradients are disabled."), strict=True):
        assert report.last_node == ""
        assert "last autograd node: none" in str(report)
        for kind in report.kinds.values():
            assert kind.entries == ()
            assert kind.why.startswith("Never called: no output requires grad")
            assert kind.why.endswith(end)


def test_a_module_that_returns_its_input() -> None:
    x = given(3)
    leaf = report_of(nn.Identity(), x)
    assert leaf.last_node == ""
    assert "has no autograd node" in leaf.kinds[LEGACY].why
    made = report_of(nn.Identity(), x * given(3))
    assert made.last_node == "MulBackward0"
    assert "node that made input, MulBackward0" in made.kinds[LEGACY].why
    assert "it receives 2 entries" in made.kinds[LEGACY].why
    assert made.kinds[FULL].grad_input[0].what == "gradient of input and of output"
    assert made.kinds[FULL].grad_output[0].what == "gradient of output and of input"


def test_a_str_as_first_output_would_hang() -> None:
    report = report_of(Of(lambda x: ("text", x.exp())), given(3))
    assert report.kinds[LEGACY].why.startswith("Not tried")
    assert report.kinds[FULL].grad_output[1].what == "gradient of output[1]"


# Why that many


def test_what_would_change_the_length_was_tried() -> None:
    linear, x = nn.Linear(3, 2), given(4, 3)
    why = report_of(linear, x).kinds[LEGACY].why
    found = re.findall(r"([A-Z][a-z ]+): (\d), for (\w+)\.", why)
    assert [words for words, _, _ in found] == [
        "Without bias",
        "With one more leading dimension",
    ]
    nodes = [F.linear(x, linear.weight).grad_fn, linear(x.unsqueeze(0)).grad_fn]
    for (_, count, name), node in zip(found, nodes, strict=True):
        assert node is not None
        assert (int(count), name) == (len(node.next_functions), node.name())
    assert why.startswith(
        "3 entries in grad_input: one for each input of AddmmBackward0"
    )


def test_the_mode_may_change_it() -> None:
    why = report_of(nn.Dropout(), given(3)).kinds[LEGACY].why
    assert why.endswith("In eval mode: never called.")

    class Squares(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x * x if self.training else x.exp()

    why = report_of(Squares().eval(), given(3)).kinds[LEGACY].why
    assert why.endswith("In training mode: 2, for MulBackward0.")


def test_where_nothing_tried_changes_it_only_the_rule_is_said() -> None:
    why = report_of(nn.Conv2d(2, 3, 3), given(2, 2, 5, 5)).kinds[LEGACY].why
    assert why.endswith("Another last operation may give another length.")


# Nothing of the module changes


def state(module: nn.Module) -> list[Any]:
    """Everything a report might change, functions and gradients by their ids."""
    parts: list[Any] = list(module.modules())
    parameters = list(module.parameters())
    hooks = [
        [id(hook) for hook in value.values()]
        for part in parts
        for key, value in vars(part).items()
        if key.endswith("_hooks")
    ]
    return [
        {name: x.clone() for name, x in module.state_dict().items()},
        [x.data_ptr() for x in (*parameters, *module.buffers())],
        [None if p.grad is None else p.grad.clone() for p in parameters],
        [id(p.grad) for p in parameters],
        hooks,
        [(part.training, part._is_full_backward_hook) for part in parts],
        [sorted(vars(part)) for part in parts],
        torch.get_rng_state(),
        str(random.getstate()),
        str(numpy.random.get_state()),
        torch.is_warn_always_enabled(),
    ]


def draws(layer: nn.Module, norm: nn.Module, x: Tensor) -> Tensor:
    factor = random.random() + numpy.random.rand()
    return norm(F.dropout(layer(x))) * factor


@pytest.mark.parametrize("raises", [False, True])
def test_nothing_changes(raises: bool) -> None:
    def forward(*args: Any) -> Tensor:
        y = draws(*args)
        if raises:
            raise KeyError("of the user")
        return y

    module = Of(forward, nn.Linear(3, 2), nn.BatchNorm1d(2))
    calls: list[str] = []
    module.register_full_backward_hook(lambda *_: calls.append("full"))
    module.parts[0].register_full_backward_pre_hook(lambda *_: calls.append("pre"))
    for parameter in module.parameters():
        parameter.grad = torch.ones_like(parameter)
    x = given(4, 3)
    x.grad = torch.ones(4, 3)
    torch.set_warn_always(False)
    before = state(module)
    if raises:
        with pytest.raises(KeyError, match="of the user") as caught:
            gradlib.hook_report(module, x)
        assert caught.type is KeyError
    else:
        report = gradlib.hook_report(module, x)
        assert report.notes == (
            "Left out of the copies: 2 backward hook(s), of it or inside it.",
        )
        for kind in (LEGACY, FULL, FULL_PRE):
            assert report.kinds[kind].grad_output[0].what == "gradient of output"
    after = state(module)
    torch.testing.assert_close(after[:3], before[:3], rtol=0, atol=0)
    assert after[7].equal(before[7])
    assert [*after[3:7], *after[8:]] == [*before[3:7], *before[8:]]
    assert x.grad.equal(torch.ones(4, 3))
    assert calls == []


def test_forward_hooks_are_part_of_the_module() -> None:
    with pytest.warns(FutureWarning):
        module = nn.utils.weight_norm(nn.Linear(3, 2))
    module(torch.randn(4, 3))  # from now on it holds a weight that was computed
    report = report_of(module, given(4, 3))
    assert report.kinds[LEGACY].grad_input[1].what == "gradient of input"


def test_a_tensor_that_two_modules_return_is_named_after_the_inner_one() -> None:
    module = nn.utils.parametrizations.weight_norm(nn.Linear(3, 2))
    report = report_of(module, given(4, 3))
    weight = "gradient of output of parametrizations.weight.0, transposed"
    assert report.kinds[LEGACY].grad_input[2].what == weight


def saved(layer: nn.Module, x: Tensor) -> Any:
    return checkpoint(layer, x, use_reentrant=True)


def test_a_parameter_whose_gradient_comes_in_parts() -> None:
    layer, x = nn.Linear(3, 3), given(4, 3)
    y = layer(layer(x))
    (total,) = torch.autograd.grad(y, layer.weight, cotangent(0, y))
    module = Of(lambda inner, v: saved(inner, saved(inner, v)), layer)
    trial = Trial(module, Tree.of(((x,), {})))
    known = KnownGradients(trial, Names(module, (x,), {}))
    name = known.name(total, outputs_first=False)
    assert name == "gradient of parts.0.weight"


def test_the_inputs_stay_as_they_are() -> None:
    x = given(3, 4).clone()
    value, version, node = x.detach().clone(), x._version, x.grad_fn
    gradlib.hook_report(nn.ReLU(inplace=True), x)
    assert x.equal(value)
    assert (x._version, x.grad_fn) == (version, node)


def test_a_recording_sees_no_trial() -> None:
    module = nn.Linear(3, 2)
    with gradlib.record(module) as recording:
        gradlib.hook_report(module, given(4, 3))
    assert len(recording) == 0


def test_the_results_have_short_names() -> None:
    report = report_of(nn.Linear(3, 2), given(4, 3))
    assert repr(report) == "<HookReport: Linear>"
    assert repr(report.kinds[FULL]) == "<HookKind: register_full_backward_hook>"


# Errors


def test_what_is_no_module() -> None:
    with pytest.raises(gradlib.NotAModuleError, match=r"\[GL200\] hook_report\(module"):
        gradlib.hook_report(F.relu, given(3))  # type: ignore[arg-type] (on purpose)
    with pytest.raises(
        gradlib.NotAModuleError, match=r"class Linear, .* Linear\(...\)"
    ):
        gradlib.hook_report(nn.Linear, given(3))  # type: ignore[arg-type] (on purpose)


def test_what_cannot_be_copied() -> None:
    module = nn.Linear(3, 2)
    vars(module)["stream"] = (item for item in "generators cannot be copied")
    with pytest.raises(gradlib.NotCopyableError, match="cannot be copied: TypeError"):
        gradlib.hook_report(module, given(4, 3))


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("layout", [torch.jagged, torch.strided])
def test_nested_tensors_are_refused(layout: torch.layout) -> None:
    class Nest(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.nested.as_nested_tensor([x, x], layout=layout)

    x = torch.nested.nested_tensor([torch.ones(2, 3)], layout=layout)
    with pytest.raises(gradlib.NotCopyableError, match="Pass a padded tensor"):
        gradlib.hook_report(nn.Linear(3, 2), x)
    with pytest.raises(gradlib.NotCopyableError, match="Pass a padded tensor"):
        gradlib.hook_report(Nest(), given(2, 3))


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("layout", [torch.jagged, torch.strided])
def test_nested_tensors_inside(layout: torch.layout) -> None:
    class Nests(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(3, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            parts = torch.nested.as_nested_tensor([x[0], x[1, :2]], layout=layout)
            return self.fc(parts).to_padded_tensor(0.0)

    report = gradlib.hook_report(Nests(), given(2, 5, 3))
    (entry,) = report.kinds["register_backward_hook"].grad_input
    assert entry.what == "gradient of an inner tensor, which is nested"
    (entry,) = report.kinds["register_full_backward_hook"].grad_input
    assert entry.what == "gradient of x"
    assert "nested" in str(report)
    report.plot()


class Slotted(nn.Module):
    """Keeps a tensor where torch's copies forget it."""

    __slots__ = ("factor",)

    def __init__(self) -> None:
        super().__init__()
        self.factor = torch.tensor([2.0, 3.0, 4.0])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.factor


def test_slots_are_copied() -> None:
    module = Slotted()
    before = module.factor
    report = gradlib.hook_report(module, given(4, 3))
    (entry,) = report.kinds["register_full_backward_hook"].grad_input
    assert entry.what == "gradient of x"
    assert module.factor is before


def test_nothing_is_left_of_the_copies(tensors_alive: Callable[[], int]) -> None:
    modules = [nn.Linear(3, 2), nn.Tanh(), nn.GRU(3, 2)]
    counts: list[int] = []
    for _ in range(3):
        for module in modules:
            gradlib.hook_report(module, given(4, 3))
        counts.append(tensors_alive())
    assert counts[1] == counts[2]


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")
def test_script_modules() -> None:
    scripted = torch.jit.script(nn.Linear(3, 2))
    with pytest.raises(gradlib.NotAModuleError, match="takes no hooks"):
        gradlib.hook_report(scripted, given(4, 3))
    report = gradlib.hook_report(nn.Sequential(scripted, nn.Tanh()), given(4, 3))
    full = report.kinds["register_full_backward_hook"]
    assert full.grad_input[0].what == "gradient of input"


@pytest.mark.parametrize("where", ["module", "input"])
def test_what_has_no_values(where: str) -> None:
    module = nn.Linear(3, 2, device="meta" if where == "module" else None)
    x = torch.ones(4, 3, device="meta" if where == "input" else None)
    with pytest.raises(gradlib.NotCopyableError, match="on the device meta have none"):
        gradlib.hook_report(module, x)


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta")
def test_a_sparse_argument() -> None:
    class Times(nn.Module):
        def forward(self, a: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
            return torch.sparse.mm(a, x)

    a = torch.diag(torch.tensor([1.0, 2.0])).to_sparse_csr()
    report = gradlib.hook_report(Times(), a, given(2, 3))
    assert report.kinds["Tensor.register_hook"].entries[0].what == "gradient of output"
    error = report.kinds["register_full_backward_hook"].error
    assert error.startswith("NotImplementedError: Could not run 'aten::view'")
    assert error.count("\n") == 0


def test_a_copy_that_is_none() -> None:
    class Same(nn.Linear):
        def __deepcopy__(self, memo: object) -> "Same":
            return self

    module = Same(3, 2)
    with pytest.raises(gradlib.NotCopyableError, match="shares tensors with it"):
        gradlib.hook_report(module, given(4, 3))
    assert not module._backward_hooks


class Residual(nn.Module):
    """What its branch adds to the gradient is a hundredth, in bfloat16."""

    def __init__(self) -> None:
        super().__init__()
        self.branch = nn.Linear(3, 3, dtype=torch.bfloat16)
        self.norm = nn.LayerNorm(3, dtype=torch.bfloat16)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.norm(x + 0.01 * self.branch(x))
        return y


def test_what_is_nearly_a_gradient_in_bfloat16_is_not_named_so() -> None:
    torch.manual_seed(0)
    x = torch.randn(2, 3, dtype=torch.bfloat16, requires_grad=True)
    kinds = gradlib.hook_report(Residual(), x).kinds
    found = kinds["register_backward_hook"].grad_input[0].what
    assert found == "gradient of an inner tensor, from AddBackward0"
    assert kinds["register_full_backward_hook"].grad_input[0].what == "gradient of x"


class Narrow(nn.Module):
    """Goes through eight bits, with which torch computes next to nothing."""

    def __init__(self, back: bool) -> None:
        super().__init__()
        self.back = back

    def forward(self, x: Tensor) -> Tensor:
        y = x.to(torch.float8_e4m3fn)
        return y.float() if self.back else y


@pytest.mark.parametrize("back", [False, True])
def test_gradients_in_eight_bits(back: bool) -> None:
    x = torch.randn(3, requires_grad=True)
    kinds = gradlib.hook_report(Narrow(back), x).kinds
    entry = kinds["register_full_backward_hook"].grad_input[0]
    assert entry.what.startswith("gradient of x")


def test_the_node_of_an_argument_that_is_returned() -> None:
    x = torch.randn(3, requires_grad=True) * 1
    kinds = gradlib.hook_report(nn.Identity(), x).kinds
    for kind, field in (
        ("Node.register_hook", "input"),
        ("Node.register_prehook", "output"),
    ):
        assert kinds[kind].why == (
            "The module returns input itself, so the node is MulBackward0, which made "
            "input outside the module: there the hook receives one entry for each "
            f"{field} of MulBackward0. In the copy a stand-in has 1."
        )


# The forms a gradient may be found in

KNOWN = {"w": torch.arange(1.0, 7).reshape(2, 3), "v": torch.tensor([7.0, -2, 3])}


@pytest.mark.parametrize(
    ("grad", "name"),
    [
        (KNOWN["w"], "gradient of w"),
        (KNOWN["w"] * (1 + 3e-7), "gradient of w"),
        (KNOWN["w"] * (1 + 1e-5), None),
        (KNOWN["w"].bfloat16() * (1 + 2**-8), "gradient of w"),
        (KNOWN["w"].bfloat16() * (1 + 2**-6), None),
        (KNOWN["w"].T, "gradient of w, transposed"),
        (KNOWN["w"].reshape(6), "gradient of w, reshaped"),
        (KNOWN["v"].expand(4, 3), "gradient of v, expanded"),
        (KNOWN["w"].sum(0), "gradient of w, summed"),
        (KNOWN["w"].sum(1, keepdim=True), "gradient of w, summed"),
        (
            KNOWN["v"] + torch.tensor([[-1.0], [1], [0]]) - KNOWN["v"] * 2 / 3,
            "gradient of v, before it is summed",
        ),
        (KNOWN["v"].double(), "gradient of v"),
        (torch.tensor([5.0, 5, 5]), None),
        (torch.full((3,), torch.nan), None),
    ],
)
def test_forms(grad: Tensor, name: str | None) -> None:
    assert name_by_value(grad, {}, KNOWN) == name


def test_exact_goes_before_close_and_both_are_named_when_equal() -> None:
    near = {"a": KNOWN["v"] * (1 + 1e-6), "b": KNOWN["v"]}
    assert name_by_value(KNOWN["v"], {}, near) == "gradient of b"
    equal = {"a": KNOWN["v"], "b": KNOWN["v"]}
    assert name_by_value(KNOWN["v"], {}, equal) == "gradient of a and of b"
    nearly = {"a": KNOWN["v"] * (1 + 1e-5), "b": KNOWN["v"] * (1 + 3e-7)}
    assert name_by_value(KNOWN["v"], {}, nearly) == "gradient of b"
    assert name_by_value(KNOWN["v"], {}, {}, KNOWN) == "gradient of v"
    assert name_by_value(KNOWN["v"], {}, {"a": near["a"]}, KNOWN) == "gradient of v"


def test_close_by_rounding_goes_before_close_as_two_runs_are() -> None:
    w = KNOWN["w"]
    known = {"w": w, "noisy": w * (1 + 1e-3)}
    noise = {"noisy": 1e-2}
    assert name_by_value(w * (1 + 3e-7), noise, known) == "gradient of w"
    assert name_by_value(w * (1 + 2e-3), noise, known) == "gradient of noisy"
    assert name_by_value(w * (1 + 2e-3), {}, known) is None


def test_infinite_entries_do_not_make_everything_close() -> None:
    grad = torch.tensor([torch.inf, 1.0])
    assert name_by_value(grad, {}, {"a": torch.tensor([torch.inf, 2.0])}) is None
    assert name_by_value(grad, {}, {"a": grad.clone()}) == "gradient of a"


class Does(nn.Module):
    """A function of the module itself and what it is given."""

    def __init__(self, does: Callable[..., Any], **own: Any) -> None:
        super().__init__()
        self.does = does
        for name, value in own.items():
            setattr(self, name, value)

    def forward(self, x: Tensor) -> Any:
        return self.does(self, x)


def legacy_length(module: nn.Module, x: Tensor) -> int:
    """Return how many entries the old hook gets in truth."""
    found: list[int] = []
    handle: Any = module.register_backward_hook(lambda _m, g, _o: found.append(len(g)))
    module(x).sum().backward(retain_graph=True)
    handle.remove()
    return found[0]


@pytest.mark.filterwarnings("ignore:Using a non-full backward hook")
def test_what_would_change_the_length_of_a_module_that_returns_its_input() -> None:
    x = given(4, 3)
    long = torch.addcmul(x, x, x)  # three entries
    why = report_of(nn.Dropout(), long).kinds[LEGACY].why
    assert f"In eval mode: {legacy_length(nn.Dropout().eval(), long)}, for " in why
    assert "3, for AddcmulBackward0" in why


@pytest.mark.parametrize(
    "module",
    [
        nn.L1Loss(),
        nn.SmoothL1Loss(),
        nn.KLDivLoss(),
        nn.GaussianNLLLoss(),
        nn.MarginRankingLoss(),
        Of(lambda x, *_: x.abs().mean(1)),
    ],
)
def test_a_mean_is_no_sum_of_its_gradient(module: nn.Module) -> None:
    args = [given(4, 3), given(4, 3).detach()]
    if isinstance(module, nn.GaussianNLLLoss | nn.MarginRankingLoss):
        args.append(torch.ones(4, 3))
    assert "before it is summed" not in str(report_of(module, *args))


@pytest.mark.filterwarnings("ignore:Using a non-full backward hook")
@pytest.mark.parametrize("overwrites", [True, False])
def test_a_module_that_has_kept_what_it_is_given(overwrites: bool) -> None:
    module = Does(lambda _self, x: x.relu_() if overwrites else x)
    x = given(4, 3)
    module.x = y = x * 2
    report = report_of(module, y)
    assert not report.kinds[LEGACY].error
    if overwrites:
        assert len(report.kinds[LEGACY].grad_input) == legacy_length(module, y) == 1
    else:
        why = report.kinds[LEGACY].why
        assert f"receives {legacy_length(module, y)} entries" in why


@pytest.mark.filterwarnings("ignore:Using a non-full backward hook")
def test_a_module_that_returns_what_it_has_kept() -> None:
    x = given(4, 3)
    module = Does(lambda self, _x: self.kept, kept=x * 2)
    why = report_of(module, x).kinds[LEGACY].why
    assert "returns kept itself" in why
    assert f"{legacy_length(module, x)} entries" in why
    # And what it computes from that has a name.
    module = Does(lambda self, x: x * self.kept, kept=x * 2)
    assert "gradient of kept" in whats(report_of(module, x).kinds[LEGACY]).values()


def test_a_graph_outside_stays() -> None:
    leaf = given(3)
    outside = leaf.exp()
    module = Does(lambda _self, x: x * outside)
    report = report_of(module, x := given(4, 3))
    assert not any(kind.error for kind in report.kinds.values())
    module(x).sum().backward()
    assert leaf.grad is not None


def test_names_that_two_have() -> None:
    class Scales(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = given(3)
            self.output = nn.Parameter(given(3).detach())

        def forward(self, x: Tensor, scale: Tensor) -> Tensor:
            return torch.addcmul(x * self.output, self.scale, scale)

    kinds = report_of(Scales(), given(4, 3), given(4, 3)).kinds
    found = whats(kinds[LEGACY])
    assert found["grad_input[1]"] == "gradient of scale"
    assert found["grad_input[2]"] == "gradient of argument scale"
    full = whats(kinds[FULL])
    assert full["grad_input[1]"] == "gradient of argument scale"
    assert "gradient of output" in full["grad_output[0]"]


def test_a_pass_inside_that_runs_in_another_thread() -> None:
    def forces(fc: nn.Module, x: Tensor) -> Tensor:
        x = 2 * x
        return torch.autograd.grad(fc(x).tanh().sum(), x, create_graph=True)[0]

    module, x = Of(forces, nn.Linear(3, 2)), given(4, 3)
    here = str(gradlib.hook_report(module, x))
    for how in ({"behind": 1000}, {"ahead": 1000}):  # of the numbers of nodes
        with passes_elsewhere(**how):
            assert str(gradlib.hook_report(module, x)) == here


def test_a_function_that_refers_to_the_module_itself() -> None:
    module = Does(lambda self, x: self.does_it(x), norm=nn.BatchNorm1d(3))
    module.does_it = lambda x: module.norm(x)  # type: ignore[assignment,operator] (stubs)
    hooks: list[object] = []
    module.norm.register_full_backward_hook(lambda *_: hooks.append(_))  # type: ignore[operator] (stubs)
    report = report_of(module, given(4, 3))
    state = module.state_dict()
    assert state["norm.num_batches_tracked"] == 0
    assert state["norm.running_mean"].tolist() == [0, 0, 0]
    assert not hooks
    assert "gradient of norm.weight" in whats(report.kinds[LEGACY]).values()
    assert "of the module itself, which a function" not in str(report.notes)


def test_a_forward_that_was_put_in() -> None:
    module: Any = nn.Linear(3, 2)
    before = module.forward

    def forward(x: Tensor, again: bool = True) -> Tensor:
        module.seen = x
        return forward(x, again=False) if again else before(x)

    module.forward = forward
    report = report_of(module, given(4, 3))
    plain = report_of(nn.Linear(3, 2), given(4, 3))
    assert report.last_node == plain.last_node
    assert report.last_node_inputs == ("bias", "x", "TBackward0")
    assert "gradient of weight, transposed" in whats(report.kinds[LEGACY]).values()
    assert not hasattr(module, "seen")
    assert module.forward is forward


def test_a_forward_that_refers_to_the_module_by_a_global_name() -> None:
    everywhere: dict[str, Any] = {"net": nn.Linear(3, 2)}
    lines = (
        "before = net.forward",
        "def forward(x):",
        " net.seen = 1",
        " return before(x)",
    )
    exec("\n".join(lines), everywhere)
    everywhere["net"].forward = everywhere["forward"]
    report = report_of(everywhere["net"], given(4, 3))
    assert report.last_node_inputs == ("bias", "x", "TBackward0")
    assert not hasattr(everywhere["net"], "seen")
    assert everywhere["before"].__self__ is everywhere["net"]


def test_a_hook_that_refers_to_the_module_itself() -> None:
    module = nn.Linear(3, 2)
    module.register_forward_hook(lambda *_: setattr(module, "seen", 1))
    report_of(module, given(4, 3))
    assert not hasattr(module, "seen")


def test_a_function_that_gives_the_module_other_data() -> None:
    a, b = nn.Linear(3, 3), nn.Linear(3, 3)
    module: Any = Does(lambda self, x: self.does_it(x), a=a, b=b)
    module.register_buffer("seen", torch.empty(0))
    before = {name: it.clone() for name, it in module.state_dict().items()}
    these = [a, b, module]  # which a copy of the function refers to, too

    def does_it(x: Tensor) -> Tensor:
        a, b, module = these
        b.weight.data = a.weight.data
        module.seen.resize_(3).zero_()
        return b(x)

    module.does_it = does_it
    notes = report_of(module, given(4, 3)).notes
    assert "b.weight, seen of the module itself" in str(notes)
    assert_close(module.state_dict(), before, rtol=0, atol=0)
    b.weight.data.zero_()
    assert_close(a.weight, before["a.weight"], rtol=0, atol=0)


def test_arguments_that_a_hook_puts_in_another_order() -> None:
    module = Of(lambda a, b: a * b)
    module.register_forward_pre_hook(lambda _module, args: args[::-1])
    found = whats(report_of(module, given(4, 3), given(3).detach()).kinds[FULL])
    assert found["grad_input[0]"] == "zeros: args[1] does not require grad"
    assert found["grad_input[1]"].startswith("gradient of args[0]")


class Frozen(nn.Linear):
    def train(self, mode: bool = True) -> "Frozen":
        raise RuntimeError(f"no mode {mode} for me")


def test_a_module_that_cannot_be_switched() -> None:
    module = Frozen(3, 2)
    report = gradlib.hook_report(module, torch.ones(1, 3))
    assert "Without bias" in str(report)
    assert module.training


@pytest.mark.parametrize("chance", ["a generator", "a counter"])
def test_a_module_that_does_not_repeat(chance: str) -> None:
    generator, calls = torch.Generator("cpu"), [0]

    def drawn(x: Tensor) -> Tensor:
        calls[0] += 1
        if chance == "a counter":
            generator.manual_seed(calls[0])
        return torch.rand(x.shape, generator=generator, device="cpu").to(x)

    module = Of(lambda x, w: (x * drawn(x)) * (w + drawn(x)))
    report = report_of(module, given(4, 3), given(4, 3))
    unknown = "not known: it is another gradient at each run"
    for kind in (LEGACY, FULL):
        found = whats(report.kinds[kind])
        assert found["grad_input[0]"] == found["grad_input[1]"] == unknown
        assert found["grad_output[0]"] == "gradient of output"
    assert "Two runs gave different gradients" in str(report.notes)


def test_a_module_that_goes_backward_itself() -> None:
    def forward(layer: nn.Module, x: Tensor) -> Tensor:
        h = layer(x)
        h.sum().backward(retain_graph=True)
        return h * 2

    report = report_of(Of(forward, nn.Linear(3, 2)), given(4, 3))
    assert whats(report.kinds[FULL])["grad_input[0]"] == "gradient of args[0]"


def test_arguments_that_are_one_object() -> None:
    module = nn.MultiheadAttention(4, 1)
    x = torch.randn(3, 1, 4)
    found = whats(report_of(module, x, x, x).kinds[FULL])
    names = "query", "key", "value"
    for i, name in enumerate(names):
        assert found[f"grad_input[{i}]"] == f"None: {name} does not require grad"


def test_no_samples_at_all() -> None:
    report = report_of(nn.Linear(3, 2), given(0, 3))
    for kind in report.kinds.values():
        for entry in kind.entries:
            assert "nothing flows" not in entry.what


def test_torch_func_around_a_module_inside() -> None:
    def forward(layer: nn.Module, x: Tensor) -> Tensor:
        def loss(v: Tensor) -> Tensor:
            return layer(v).tanh().sum()

        return torch.func.vmap(torch.func.grad(loss))(x)

    report = report_of(Of(forward, nn.Linear(3, 2)), given(4, 3))
    assert whats(report.kinds[TENSOR])["grad of output"] == "gradient of output"


def test_inside_of_torch_func() -> None:
    def fn(x: Tensor) -> Tensor:
        gradlib.hook_report(nn.ReLU(), x)
        return x

    with pytest.raises(NotCopyableError, match=r"torch\.func"):
        torch.func.vmap(fn)(torch.ones(2, 3))


class Indexed:
    """What torch looks into for a tensor, though it is no list."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor

    def __getitem__(self, _: int) -> Tensor:
        return self.tensor


@pytest.mark.parametrize("kind", [Indexed, lambda it: collections.deque([it])])
def test_an_output_that_torch_indexes(kind: Callable[[Tensor], Any]) -> None:
    report = report_of(Of(lambda x: kind(x * 2)), given(3))
    assert report.last_node == "MulBackward0"
    if kind is Indexed:
        assert "no tensor is found" in report.kinds[FULL].why


def test_an_empty_str_before_the_output() -> None:
    report = report_of(Of(lambda x: ("", x * 2)), given(3))
    assert "IndexError" in report.kinds[LEGACY].error


def test_a_forward_without_a_signature() -> None:
    module = nn.ReLU()
    module.forward = torch.relu
    report = report_of(module, torch.tensor([-1.0, 2.0, 3.0], requires_grad=True))
    assert whats(report.kinds[FULL])["grad_input[0]"] == "gradient of args[0]"


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")
def test_a_quantized_argument() -> None:
    x = torch.quantize_per_tensor(3 * torch.ones(2, 3), 0.1, 0, torch.quint8)
    module = Of(lambda q, y: q.dequantize() * y)
    report = report_of(module, x, given(2, 3))
    assert "gradient of args[1]" in whats(report.kinds[LEGACY]).values()


def test_a_keyword_called_module() -> None:
    module = Of(lambda x, module: x * module)
    report = gradlib.hook_report(module, given(3), module=2)
    assert report.kinds[FULL].entries


def test_what_the_copies_are_not() -> None:
    module = nn.Sequential(nn.Linear(3, 2))
    module.compile(backend="eager")
    assert "not compiled" in str(report_of(module, given(4, 3)).notes)
    hook = nn.modules.module.register_module_full_backward_hook(lambda *_: None)
    try:
        assert "for every module" in str(report_of(nn.ReLU(), given(3)).notes)
    finally:
        hook.remove()


@pytest.mark.parametrize("whole", [False, True])
def test_a_compiled_module_runs_as_it_would_alone(whole: bool) -> None:
    pytest.importorskip("torch._dynamo")
    module = torch.compile(
        nn.Sequential(nn.Linear(3, 2), nn.Tanh()), fullgraph=whole, backend="aot_eager"
    )
    report = gradlib.hook_report(cast(nn.Module, module), given(4, 3))
    assert report.last_node == "CompiledFunctionBackward"


def test_a_computed_tensor_in_a_list_of_the_module() -> None:
    module: Any = Does(lambda self, x: x * self.hidden[0])
    module.hidden = [given(3) * 2]
    report = report_of(module, given(3))
    assert whats(report.kinds[FULL])["grad_input[0]"] == "gradient of x"


@pytest.mark.parametrize("is_weak", [False, True])
def test_a_child_that_knows_its_parent(is_weak: bool) -> None:
    class Child(nn.Module):
        def __init__(self, parent: nn.Module) -> None:
            super().__init__()
            self.parent: Any = weakref.ref(parent) if is_weak else [parent]

        def forward(self, x: Tensor) -> Tensor:
            parent = self.parent() if is_weak else self.parent[0]
            return x.sin() * parent.scale

    class Parent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.tensor([2.0, 3.0, 4.0]))
            self.child = Child(self)

        def forward(self, x: Tensor) -> Tensor:
            return self.child(x)

    report = report_of(model := Parent(), given(4, 3))
    assert report.kinds[LEGACY].grad_input[1].what == "gradient of scale"
    assert whats(report.kinds[ACCUMULATED])["scale.grad"] == "gradient of scale"
    assert model.scale.grad is None
