"""Each entry that a hook of a module gets is what its name says."""

import inspect
import re
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import graph
from torch.nn import functional as F

import gradlib
from gradlib.hook_reports.hooks import FULL, FULL_PRE, KINDS, LEGACY, TENSOR
from gradlib.hook_reports.trial import cotangent

from .reported import HERE, LINEAR, Of, given, report_of, whats

torch.manual_seed(0)  # the modules of LEGACY_CASES are made on import


class WithAttribute(nn.Module):
    """Has a tensor that somebody forgot to make a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = given(3)

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale


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
        ["gradient of output of parts.0", "gradient of output of parts.1"],
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
                if "output of " in entry.what:
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
    nothing = "None: input {} of MkldnnRnnLayerBackward0 needs no gradient"
    assert [entry.what for entry in legacy.grad_input] == [
        "gradient of input",
        "gradient of weight_ih_l0",
        "gradient of weight_hh_l0",
        "gradient of bias_ih_l0",
        "gradient of bias_hh_l0",
        nothing.format(5),
        nothing.format(6),
    ]
    assert [entry.what for entry in legacy.grad_output] == [
        "gradient of output[0]",
        "gradient of output[1][0], reshaped",
        "gradient of output[1][1], reshaped",
    ]
    state = torch.zeros(1, 4, 4), torch.zeros(1, 4, 4)
    found = whats(report_of(nn.LSTM(3, 4), given(5, 4, 3), state).kinds[FULL])
    lost = "None: hx is of type tuple, and no tensor inside gets an entry"
    assert found["grad_input[1]"] == lost
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
    both = ["gradient of args[0]", "gradient of args[1]"]
    assert [entry.what for entry in twice] == both


def test_an_argument_that_is_returned_and_used_elsewhere() -> None:
    class ReturnsOne(nn.Module):
        def forward(self, x: Tensor, z: Tensor) -> tuple[Tensor, Tensor]:
            return x, z.sin()

    x = given(4, 3)
    found = whats(report_of(ReturnsOne(), x, x).kinds["Tensor.register_hook"])
    assert (
        found["grad of output[0]"] == "gradient of output[0], with all its other uses"
    )
