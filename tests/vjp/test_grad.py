"""`gradlib.grad` equals torch.autograd.grad on good calls, and explains bad ones."""

import contextlib
import inspect
import io
import itertools
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

import gradlib
from gradlib.errors import page_about
from gradlib.vjp.arguments import read_arguments
from gradlib.vjp.cases import CASES, Case
from gradlib.vjp.connection import unconnected

from .releases import older_than_dicts, where_shown

Grad = Callable[..., Any]


def same(ours: Any, theirs: Any) -> bool:
    """Return whether two results are equal in every bit, and in structure."""
    if isinstance(theirs, Tensor):
        bits = torch.equal(ours.isnan(), theirs.isnan()) and torch.equal(
            ours.nan_to_num(), theirs.nan_to_num()
        )
        forms = ("dtype", "shape", "device", "layout", "requires_grad")
        alike = all(getattr(ours, it) == getattr(theirs, it) for it in forms)
        has_node = (ours.grad_fn is None) == (theirs.grad_fn is None)
        return bits and alike and has_node and ours.stride() == theirs.stride()
    if isinstance(theirs, dict):
        pairs = list(zip(ours.values(), theirs.values(), strict=True))
        return list(ours) == list(theirs) and all(itertools.starmap(same, pairs))
    if isinstance(theirs, tuple):
        pairs = zip(ours, theirs, strict=True)
        return type(ours) is tuple and all(itertools.starmap(same, pairs))
    return ours is theirs is None


def both(call: Callable[[Grad], Any]) -> tuple[Any, Any]:
    """Make a call by gradlib and by torch, from the same random state."""
    results: list[Any] = []
    for grad in (gradlib.grad, torch.autograd.grad):
        torch.manual_seed(0)
        results.append(call(grad))
    return results[0], results[1]


def network(dtype: torch.dtype) -> nn.Module:
    layers = (nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 4))
    return nn.Sequential(*layers).to(dtype)


def test_it_takes_every_argument_that_torch_takes() -> None:
    theirs = inspect.signature(torch.autograd.grad).parameters
    ours = inspect.signature(gradlib.grad).parameters
    assert [*ours] == [*theirs]
    assert all(ours[it].default == theirs[it].default for it in ours)


def test_torch_warns_of_only_inputs_here_too() -> None:
    x = torch.ones(3, requires_grad=True)
    with pytest.warns(FutureWarning, match="only_inputs argument is deprecated"):
        gradlib.grad(x.sum(), x, only_inputs=False)


DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]
OPTIONS: list[dict[str, Any]] = [
    {},
    {"retain_graph": True},
    {"create_graph": True},
    {"create_graph": True, "retain_graph": False},
    {"create_graph": True, "retain_graph": True, "only_inputs": True},  # old programs
    {"allow_unused": True},
    {"allow_unused": False},
    {"materialize_grads": True},
    {"materialize_grads": True, "create_graph": True},
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("vector_dtype", DTYPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_one_output_of_any_floats(
    dtype: torch.dtype, vector_dtype: torch.dtype, options: dict[str, Any]
) -> None:
    def call(grad: Grad) -> Any:
        model = network(dtype)
        y = model(torch.randn(6, 3, dtype=dtype))
        v = torch.randn_like(y).to(vector_dtype)
        return grad(y, list(model.parameters()), v, **options)

    assert same(*both(call))


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("batch", [None, 1, 5])
@pytest.mark.parametrize("as_dict", [False, True])
def test_several_outputs_and_inputs(
    options: dict[str, Any], batch: int | None, as_dict: bool
) -> None:
    def call(grad: Grad) -> Any:
        x, w, unused = (torch.randn(4, requires_grad=True) for _ in range(3))
        y = [torch.outer(x, w), (x * w).sum(), x[:3] ** 2]
        lead = () if batch is None else (batch,)
        v: list[Any] = [torch.randn(lead + it.shape) for it in y]
        if batch is None:
            v[1] = None  # one number
        inputs = {"x": x, "w": w, 3: unused}
        if not (options.get("allow_unused") or options.get("materialize_grads")):
            del inputs[3]
        given: Any = inputs if as_dict else tuple(inputs.values())
        opens_none = grad is torch.autograd.grad and older_than_dicts()
        if as_dict and opens_none:
            given = tuple(inputs.values())
        found = grad(y, given, v, is_grads_batched=batch is not None, **options)
        if as_dict and opens_none:
            return dict(zip(inputs, found, strict=True))
        return found

    assert same(*both(call))


FORMS: dict[str, Callable[[Tensor], Any]] = {
    "number": lambda x: ((x**2).sum(), x),
    "one entry": lambda x: ((x**2).sum()[None], x),
    "one entry in a matrix": lambda x: ((x**2).sum()[None, None], x, None),
    "leaf": lambda x: (x, x, torch.ones(3)),
    "leaf and more": lambda x: ([x, x**2], [x], [torch.ones(3)] * 2),
    "itself": lambda x: ((y := x**2), y, torch.ones(3)),
    "inner tensor": lambda x: (((h := x.exp()) ** 2).sum(), [h, x]),
    "inner view": lambda x: (((h := x[:2]) ** 2).sum(), h),
    "part of a split": lambda x: (((h := x.split(1))[1] ** 2).sum(), h[1]),
    "one input twice": lambda x: ((x**2).sum(), [x, x]),
    "one output twice": lambda x: ([(y := (x**2).sum()), y], x),
    "generators": lambda x: (iter([(x**2).sum()]), iter([x]), iter([None])),
    "sets": lambda x: ({(x**2).sum()}, {x}),
    "parameters": lambda x: ((p := nn.ParameterList([x, x]))[0].sum() * p[1][0], p),
    "edge as input": lambda x: ((x**2).sum(), get_gradient_edge(x)),
    "edge of an inner tensor": lambda x: (((h := x.exp()) ** 2).sum(), edge(h)),
    "empty output": lambda x: (x[:0], x, torch.ones(0)),
    "vector in a list": lambda x: (x**2, x, [torch.ones(3)]),
    "weights that require grad": lambda x: (x**2, x, x * 2),
    "expanded weights": lambda x: (x**2, x, torch.ones(()).expand(3)),
    "complex output": lambda x: (x * 1j, x, torch.ones(3, dtype=torch.complex128)),
    "no outputs": lambda _: ([], torch.ones(3, requires_grad=True)),
}


def edge(tensor: Tensor) -> GradientEdge:
    return get_gradient_edge(tensor)


@pytest.mark.parametrize("form", list(FORMS)[:-1])
def test_the_inputs_of_good_calls_are_found_at_once(form: str) -> None:
    y, x, *_ = FORMS[form](torch.randn(3, requires_grad=True))
    arguments = read_arguments(y, x)
    assert unconnected(arguments.outputs.values, arguments.inputs.values) == []


def test_each_node_is_passed_once_on_the_way_to_an_input_that_is_not_there() -> None:
    """The number of paths doubles at each step: a walk along each would never end."""
    x = h = torch.ones(2, requires_grad=True)
    for _ in range(80):
        h = h * 0.5 + h * 0.5
    with pytest.raises(gradlib.UnusedInputError):
        gradlib.grad(h.sum(), [x, torch.ones(2, requires_grad=True)])


@pytest.mark.parametrize("form", FORMS.values(), ids=list(FORMS))
@pytest.mark.parametrize("create_graph", [False, True])
def test_forms_of_arguments(form: Callable[[Tensor], Any], create_graph: bool) -> None:
    def call(grad: Grad) -> Any:
        x = torch.randn(3, requires_grad=True)
        unused = form is FORMS["no outputs"]
        return grad(*form(x), create_graph=create_graph, allow_unused=unused)

    assert same(*both(call))


@pytest.mark.parametrize("batch", [(), (2,)])
def test_edges_as_outputs(batch: tuple[int, ...]) -> None:
    def call(grad: Grad) -> Any:
        x = torch.randn(3, requires_grad=True)
        v = torch.randn(*batch, 3, 3)
        return grad(edge(torch.outer(x, x)), x, v, is_grads_batched=bool(batch))

    assert same(*both(call))


def test_the_shape_of_an_edge_is_checked() -> None:
    x = torch.ones(3, requires_grad=True)
    with pytest.raises(
        gradlib.GradOutputsShapeError, match=r"outputs\[0\] has \[3, 3\]"
    ):
        gradlib.grad(edge(torch.outer(x, x)), x, torch.ones(3))
    _, second = x.split([1, 2])
    with pytest.raises(gradlib.GradOutputsShapeError, match=r"outputs\[0\] has \[2\]"):
        gradlib.grad(edge(second), x, torch.ones(1))


def test_a_subclass_of_tensors_stays_one() -> None:
    class Mine(Tensor):
        pass

    def call(grad: Grad) -> Any:
        x = torch.randn(3).as_subclass(Mine).requires_grad_()
        return grad((x**2).sum(), x)

    ours, theirs = both(call)
    assert type(ours[0]) is type(theirs[0]) is Mine
    assert torch.equal(ours[0], theirs[0])


def test_a_class_that_answers_for_torch_is_let_through() -> None:
    class Lazy:
        @classmethod
        def __torch_function__(
            cls, function: Any, _: Any, given: Any = (), options: Any = None
        ) -> Any:
            return function, given, options

    def asked(outputs: Any, inputs: Any, v: Any, grad: Grad) -> Any:
        return grad(outputs, inputs, v)

    lazy: Any = Lazy()
    x = torch.ones(3, requires_grad=True)
    for outputs, inputs in ((lazy, lazy), (y := x.exp(), lazy), (lazy, x)):
        for v in (None, y.detach(), (y.detach(),)):
            called = partial(asked, outputs, inputs, v)
            ours, theirs = both(called)
            assert ours == theirs
            assert ours[0] is torch.autograd.grad


def test_nested_tensors_are_compared_by_torch() -> None:
    def call(grad: Grad) -> Any:
        parts = [torch.randn(2, 3), torch.randn(4, 3)]
        x = torch.nested.nested_tensor(parts, layout=torch.jagged, requires_grad=True)
        return grad((y := x * 2), x, torch.ones_like(y))[0].values()

    assert same(*both(call))


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("kind", ["sparse", "nested", "jagged"])
def test_an_unused_leaf_without_views(kind: str) -> None:
    x, parts = torch.ones(3, requires_grad=True), [torch.ones(2), torch.ones(3)]
    y = x.square().sum()
    leaf: Any = torch.eye(2).to_sparse().requires_grad_()
    if kind != "sparse":
        layout = torch.jagged if kind == "jagged" else torch.strided
        leaf = torch.nested.nested_tensor(parts, layout=layout, requires_grad=True)
    words = r"inputs\[1\] \(`leaf`\) is not part of the graph of outputs"
    with pytest.raises(gradlib.UnusedInputError, match=words):
        gradlib.grad(y, [x, leaf])
    assert words.replace("\\", "") in str(gradlib.explain_vjp(y, [x, leaf]))


def test_of_several_computed_tensors_the_one_that_an_input_was_made_from() -> None:
    x = torch.arange(4.0, requires_grad=True)
    _, elsewhere = (x * 1).split(2)
    first, second = (x * 2).split(2)
    loss, part = elsewhere.sum() + first.sum() + second.sum(), second[:1]
    with pytest.raises(gradlib.UnusedInputError, match="from `second`, which is"):
        gradlib.grad(loss, part)


def test_a_name_that_only_the_caller_has_is_not_in_the_code() -> None:
    def differentiate(loss: Tensor, part: Tensor) -> None:
        gradlib.grad(loss, part)

    whole = 2 * torch.arange(4.0, requires_grad=True)
    with pytest.raises(gradlib.UnusedInputError, match="from `whole`") as caught:
        differentiate(whole.sum(), whole[:1])
    assert "    loss = f(part)\n    gradlib.grad(loss, part)\n" in str(caught.value)


def test_an_unused_leaf_in_inference_mode() -> None:
    x, leaf = torch.ones(3, requires_grad=True), torch.ones(3, requires_grad=True)
    y = x.square().sum()
    with torch.inference_mode():
        with pytest.raises(gradlib.UnusedInputError, match="not part of the graph"):
            gradlib.grad(y, leaf)
        assert gradlib.grad(y, x)[0].tolist() == [2, 2, 2]


def test_a_class_is_no_tensor() -> None:
    x: Any = torch.ones(3, requires_grad=True)
    kind: Any = Tensor
    for outputs, inputs in ((kind, x), (x.sum(), kind), ([kind], x)):
        with pytest.raises(
            gradlib.NotDifferentiableArgumentError, match="is the class Tensor, not"
        ):
            gradlib.grad(outputs, inputs)


def test_under_vmap() -> None:
    def rows(grad: Grad) -> Any:
        x = torch.randn(3, requires_grad=True)
        y = torch.outer(x, x)
        return torch.vmap(lambda v: grad(y, x, v, retain_graph=True)[0])(
            torch.randn(5, 3, 3)
        )

    assert same(*both(rows))


def test_a_number_on_another_device_is_moved_by_torch() -> None:
    def call(grad: Grad) -> Any:
        x = torch.ones((), device="meta", requires_grad=True)
        return grad(x, x, torch.tensor(1.0))

    ours, theirs = both(call)
    assert ours[0].device == theirs[0].device == torch.device("meta")


def test_a_wrong_call_leaves_the_graph_to_the_right_one() -> None:
    x = torch.ones(3, requires_grad=True)
    unused = torch.ones(3, requires_grad=True)
    y = x.exp()
    wrong: list[Any] = [
        (y, x),
        (y, x, torch.ones(2)),
        (y, unused, torch.ones(3)),
        (y, x[:1], torch.ones(3)),
        ([y, y.detach()], x, [torch.ones(3)] * 2),
        (y, x, torch.ones(3, device="meta")),
    ]
    for arguments in wrong:
        with pytest.raises(gradlib.GradlibError):
            gradlib.grad(*arguments)
    assert torch.equal(gradlib.grad(y, x, torch.ones(3))[0], y)


def test_torch_uses_up_the_graph_where_an_input_is_unused() -> None:
    # Why the inputs are looked for before the call.
    x, unused = (torch.ones(3, requires_grad=True) for _ in range(2))
    y = x.exp().sum()
    with pytest.raises(RuntimeError, match="appear"):
        torch.autograd.grad(y, [x, unused])
    with pytest.raises(RuntimeError, match="second time"):
        torch.autograd.grad(y, x)


def test_a_freed_graph_is_translated() -> None:
    x = torch.ones(3, requires_grad=True)
    my_loss = x.exp().sum()
    gradlib.grad(my_loss, x)
    with pytest.raises(
        gradlib.FreedGraphError, match=r"^\[GL111\].*`my_loss`"
    ) as caught:
        gradlib.grad(my_loss, x)
    assert "second time" in str(caught.value.__cause__)


@where_shown
def test_a_change_in_place_is_translated_and_named() -> None:
    x = torch.ones(3, requires_grad=True)
    hidden = x.exp()
    other = x * 2
    other += 1
    loss = (hidden**2).sum()
    hidden += 1
    with pytest.raises(gradlib.ChangedInPlaceError, match=r"\] `hidden`") as caught:
        gradlib.grad(loss, x)
    assert "`hidden` was changed in place" in str(caught.value)
    assert "inplace operation" in str(caught.value.__cause__)
    assert other is not hidden


@torch.no_grad()
def add_one(tensor: Tensor) -> None:
    tensor += 1


class Times(torch.autograd.Function):
    """A product that saves its factors and its result."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor) -> Tensor:
        product = x * y
        ctx.save_for_backward(x, y, product)
        return product

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        x, y, _ = ctx.saved_tensors
        return gradients[0] * y, gradients[0] * x


def exponential(x: Tensor, _: Tensor) -> Tensor:
    changed = x.exp()
    loss = (changed * changed).sum()
    changed += 1
    return loss


def with_innocents(x: Tensor, w: Tensor) -> Tensor:
    return exponential((x * 2).relu_() * w, w)


INNOCENT: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "not in the graph": exponential,
    "saved at the same version, like a result": with_innocents,
    "by a function of the user's": lambda x, w: Times.apply(
        *(exponential(x, w)[None].expand(3), w)
    ).sum(),
}


@where_shown
@pytest.mark.parametrize("name", INNOCENT)
def test_what_was_changed_innocently_is_not_named(name: str) -> None:
    x, w = torch.ones(3, requires_grad=True), torch.zeros(3)
    add_one(w)
    loss = INNOCENT[name](x, w)
    words = "A tensor that the backward pass needs was changed in place."
    assert gradlib.explain_vjp(loss, x).meaning.startswith(words)


@where_shown
def test_what_was_changed_is_named_by_its_memory() -> None:
    x = torch.ones(2, 3, requires_grad=True)
    hidden, other = torch.zeros(2, 3), torch.zeros(3)
    loss = Times.apply(x[0], hidden[0]).sum()
    add_one(hidden)
    add_one(other)
    meaning = gradlib.explain_vjp(loss, x).meaning
    assert meaning.startswith("`hidden` was changed in place")
    layer = nn.Linear(3, 3)
    loss = layer(layer(x)).sum()
    add_one(layer.weight)
    meaning = gradlib.explain_vjp(loss, layer.bias).meaning
    assert meaning.startswith("`layer.weight` was changed in place")


def test_a_tensor_is_named_by_what_holds_it() -> None:
    x, layer = torch.ones(3, requires_grad=True), nn.Linear(3, 3)
    by_name = {"w": torch.ones(3, requires_grad=True)}
    listed = [x.detach(), torch.ones(3, requires_grad=True)]
    for tensor, name in (
        (by_name["w"], r'by_name\["w"\]'),
        (listed[1], r"listed\[1\]"),
        (layer.bias, r"layer\.bias"),
    ):
        with pytest.raises(
            gradlib.UnusedInputError, match=rf"inputs\[1\] \(`{name}`\)"
        ):
            gradlib.grad(x.sum(), [x, *[tensor]])


class Cut(torch.autograd.Function):
    """A function whose backward returns None."""

    @staticmethod
    def forward(_: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        del ctx, gradients


def test_an_input_that_no_gradient_reaches_is_translated() -> None:
    x = torch.ones(3, requires_grad=True)
    cut = Cut.apply(x)
    with pytest.raises(gradlib.UnusedInputError, match=r"`x`.* no gradient reached it"):
        gradlib.grad(cut.sum(), x)


def test_errors_of_others_pass_unchanged() -> None:
    x = torch.ones(3, requires_grad=True)
    mine = RuntimeError("mine")

    def fail(_: Tensor) -> None:
        raise mine

    h = x.exp()
    h.register_hook(fail)
    with pytest.raises(RuntimeError) as caught:
        gradlib.grad(h.sum(), x)
    assert caught.value is mine


def test_an_error_of_a_call_inside_a_hook_is_not_this_calls() -> None:
    x = torch.ones(3, requires_grad=True)
    used_up = x.exp().sum()
    torch.autograd.grad(used_up, x)
    h = x.exp()
    h.register_hook(lambda _: torch.autograd.grad(used_up, x)[0])
    with pytest.raises(RuntimeError, match="second time") as caught:
        gradlib.grad(h.sum(), x)
    assert type(caught.value) is RuntimeError


def test_what_torch_refuses_itself_it_refuses() -> None:
    x = torch.ones(3, requires_grad=True)
    with pytest.raises(ValueError, match="materialize_grads"):
        gradlib.grad(x.sum(), x, allow_unused=False, materialize_grads=True)


def test_handlers_of_torchs_own_errors_work() -> None:
    for code in CASES:
        assert issubclass(CASES[code].error, RuntimeError)
    for code in ("GL104", "GL114"):  # the error that torch raises
        assert issubclass(CASES[code].error, TypeError)


def test_the_message_begins_with_the_tensors_name() -> None:
    model = nn.ModuleDict({"a": nn.Linear(3, 3), "b": nn.Linear(3, 3)})
    loss = model["a"](torch.ones(3)).sum()
    with pytest.raises(gradlib.UnusedInputError) as caught:
        gradlib.grad(loss, dict(model.named_parameters()))
    assert 'inputs["b.weight"] (`model.b.weight`)' in str(caught.value)


def run(program: str) -> str:
    """Run a program of a case, and return what it prints."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        exec(program, {})
    return out.getvalue()


def by_gradlib(program: str) -> str:
    return program.replace("torch.autograd.grad(", "gradlib.grad(").replace(
        "import torch\n", "import torch\n\nimport gradlib\n", 1
    )


each_case = pytest.mark.parametrize("case", CASES.values(), ids=list(CASES))


@each_case
def test_the_wrong_program_raises(case: Case) -> None:
    with pytest.raises(case.error) as caught:
        run(by_gradlib(case.wrong))
    assert caught.value.code == case.code
    assert page_about(case.code) in str(caught.value)


@each_case
def test_the_right_program_runs(case: Case) -> None:
    printed = run(case.right)
    assert printed
    assert run(by_gradlib(case.right)) == printed


@each_case
def test_programs_are_formatted_and_short(case: Case) -> None:
    for program in (case.wrong, case.right):
        assert program.startswith("import torch\n\n")
        assert program.endswith("\n")
        assert max(map(len, program.splitlines())) <= 80


def test_cases_and_codes_are_the_same() -> None:
    assert list(CASES) == [f"GL{number}" for number in range(101, 116)]


# Outputs and inputs by name, from x of shape (3,); and vectors: good and bad mixed.
OUTPUTS: dict[str, Callable[[Tensor], Any]] = {
    "number": lambda x: (x**2).sum(),
    "vector": lambda x: x**2,
    "in a list": lambda x: [x**2],
    "two": lambda x: [x**2, torch.outer(x, x)],
    "vector and number": lambda x: (x.exp(), x.sum()),
    "leaf": lambda x: x,
    "complex": lambda x: x * 1j,
    "one is detached": lambda x: (x**2, x.detach()),
    "none": lambda _: None,
    "empty": lambda _: [],
}
INPUTS: dict[str, Callable[[Tensor], Any]] = {
    "x": lambda x: x,
    "list": lambda x: [x],
    "slice": lambda x: x[:1],
    "unused": lambda x: [x, torch.ones(2, requires_grad=True)],
    "without grad": lambda x: [x, torch.ones(2)],
    "edge": get_gradient_edge,
    "unused edge": lambda _: get_gradient_edge(torch.ones(2, requires_grad=True)),
    "number": lambda _: [1.0],
    "empty": lambda _: [],
}
VECTORS: dict[str, Any] = {
    "None": None,
    "ones": torch.ones(3),
    "double": torch.ones(3, dtype=torch.float64),
    "integers": torch.ones(3, dtype=torch.int64),
    "complex": torch.ones(3, dtype=torch.complex64),
    "number": torch.tensor(2.0),
    "row": torch.ones(1, 3),
    "matrix": torch.ones(3, 3),
    "cube": torch.ones(3, 3, 3),
    "two": [torch.ones(3), torch.ones(3, 3)],
    "two batches": [torch.ones(2, 3), torch.ones(2, 3, 3)],
    "second is None": [torch.ones(3), None],
    "three": [torch.ones(3)] * 3,
    "none": [],
    "float": 1.0,
    "floats": [1.0, 1.0, 1.0],
    "meta": torch.ones(3, device="meta"),
}
FLAGS: list[dict[str, bool]] = [
    {},
    {"is_grads_batched": True},
    {"allow_unused": True},
    {"materialize_grads": True},
]


def test_no_outputs_in_a_batch() -> None:
    """Here torch itself raises an IndexError."""
    flags = {"is_grads_batched": True, "allow_unused": True}
    x = torch.ones(3, requires_grad=True)
    for vectors in (None, []):
        said = r"\[GL114\] outputs is empty"
        with pytest.raises(gradlib.NotDifferentiableArgumentError, match=said):
            gradlib.grad([], x, vectors, **flags)
    assert gradlib.grad([], x, [], allow_unused=True) == (None,)


BY_MISTAKE = {"GL103", "GL105"}  # torch takes what these say, in part


@pytest.mark.parametrize("flags", FLAGS, ids=str)
@pytest.mark.parametrize("outputs", OUTPUTS)
def test_it_raises_where_torch_does_and_both_are_explained_alike(
    outputs: str, flags: dict[str, bool]
) -> None:
    for inputs, vector in itertools.product(INPUTS, VECTORS):
        results: list[Any] = []
        for grad in (gradlib.grad, torch.autograd.grad):
            x = torch.tensor([1.0, 2.0, 3.0], requires_grad=True)
            given = (OUTPUTS[outputs](x), INPUTS[inputs](x), VECTORS[vector])
            try:
                with gradlib.explain_errors():
                    results.append(grad(*given, **flags))
            except Exception as error:
                results.append(error)
        ours, theirs = results
        case = f"{outputs=} {inputs=} {vector=}: {ours!r}, torch: {theirs!r}"
        if isinstance(theirs, Exception):
            assert isinstance(ours, gradlib.GradlibError), case
            assert isinstance(ours, RuntimeError), case
            (note,) = getattr(theirs, "__notes__", [""])
            if ours.code not in BY_MISTAKE:  # then torch says what else is wrong
                assert note.startswith(f"\n[{ours.code}]"), case + note
        elif isinstance(ours, gradlib.GradlibError):
            assert ours.code in BY_MISTAKE, case
        else:
            assert same(ours, theirs), case


BY_NAME = [
    "retain_graph",
    "create_graph",
    "allow_unused",
    "is_grads_batched",
    "materialize_grads",
]


@pytest.mark.parametrize("option", BY_NAME)
@pytest.mark.parametrize("reduce", [torch.sum, torch.square])
def test_a_tensor_is_no_option(option: str, reduce: Callable[..., Tensor]) -> None:
    x = torch.ones(3, requires_grad=True)
    weights: Any = torch.ones(3)
    with pytest.raises(gradlib.GradOutputsTypeError) as caught:
        gradlib.grad(reduce(x), x, **{option: weights})
    said = str(caught.value)
    assert said.startswith(f"[GL104] {option} is a tensor.")
    assert "\n    gradlib.grad(" in said


def test_the_code_gives_the_tensor_of_an_option_as_weights() -> None:
    x = torch.ones(3, requires_grad=True)
    y, weights = x**2, torch.ones(3)
    wrong: Any = weights
    calls: list[tuple[Callable[[], object], str]] = [
        (lambda: gradlib.grad(y, x, retain_graph=wrong), "gradlib.grad(y, x, wrong)"),
        (
            lambda: gradlib.grad(y, x, weights, create_graph=wrong),
            "gradlib.grad(y, x, weights)",
        ),
        (lambda: y.backward(None, retain_graph=wrong), "y.backward(wrong)"),
        (lambda: y.sum().backward(retain_graph=wrong), "backward(wrong)"),
    ]
    for fail, code in calls:
        with (
            pytest.raises((RuntimeError, TypeError)) as caught,
            gradlib.explain_errors(),
        ):
            fail()
        assert code in "".join(getattr(caught.value, "__notes__", [str(caught.value)]))


def test_a_tensor_that_torch_takes_for_an_option_is_one() -> None:
    x = torch.ones(3, requires_grad=True)
    loss = (x**2).sum()
    yes: Any = torch.tensor(True)
    for _ in range(2):
        (gradient,) = gradlib.grad(loss, x, retain_graph=yes)
        assert torch.equal(gradient, 2 * x)
