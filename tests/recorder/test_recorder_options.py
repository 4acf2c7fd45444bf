"""What `record` keeps, of which modules, in what form and where."""

import copy
import gc
import itertools
import math
import re
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close
from torch.utils.checkpoint import checkpoint

import gradlib
from gradlib.recording.backward_pass import Pass
from gradlib.recording.call import Call

from ..conftest import collect
from .first_nets import loss_of


class Net(nn.Module):
    """Two layers with a name each."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 4)
        self.second = nn.Linear(4, 2)

    def forward(self, x: Tensor, *, factor: Tensor | None = None) -> Tensor:
        h = torch.tanh(self.first(x))
        return self.second(h if factor is None else h * factor)


class Nested(nn.Module):
    """Modules at three depths."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(3, 3), nn.Sequential(nn.Linear(3, 3))])
        self.head = nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return self.head(x)


class Shared(nn.Module):
    """A shared weight, a residual input, and a parameter of its own used thrice."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(3, 3)
        self.scale = nn.Parameter(torch.tensor(1.5))

    def forward(self, x: Tensor) -> Tensor:
        h = self.scale * x + self.fc(self.scale * x)
        return self.scale * (h + self.fc(h))


class Checkpointed(nn.Module):
    """Two checkpoints of one block, which uses its weight twice."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.first, self.block = nn.Linear(3, 3), Shared()
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for _ in range(2):
            x = checkpoint(self.block, x, use_reentrant=self.reentrant)
        return x


def squares(tensor: Tensor) -> float:
    """Reduce a tensor to a number that is not additive."""
    return tensor.square().sum().item()


GRADIENTS = (
    "grad_input",
    "grad_kwargs",
    "grad_input_total",
    "grad_kwargs_total",
    "grad_output",
    "param_grads",
    "param_grads_total",
)
TRAVELS_WITH = {
    "args": "args",
    "kwargs": "args",
    "output": "output",
    "grad_input": "grad_input",
    "grad_kwargs": "grad_input",
    "grad_input_total": "grad_input",
    "grad_kwargs_total": "grad_input",
    "grad_output": "grad_output",
    "param_grads": "param_grads",
    "param_grads_total": "param_grads",
}
FIELDS = tuple(dict.fromkeys(TRAVELS_WITH.values()))


def of_pass(pass_: Pass) -> dict[str, Any]:
    """Return every gradient of a pass."""
    return {name: getattr(pass_, name) for name in GRADIENTS}


def of_call(call: Call) -> dict[str, Any]:
    """Return everything that is kept of a call and its passes."""
    values = {"args": call.args, "kwargs": call.kwargs, "output": call.output}
    return values | {str(i): of_pass(pass_) for i, pass_ in enumerate(call.passes)}


def mapped(function: Any, structure: Any) -> Any:
    """Apply a function to every tensor of tuples and dicts."""
    if isinstance(structure, Tensor):
        return function(structure)
    if isinstance(structure, dict):
        return {key: mapped(function, value) for key, value in structure.items()}
    if isinstance(structure, tuple):
        return tuple(mapped(function, value) for value in structure)
    return structure


def recorded(model: nn.Module, x: Tensor, passes: int = 1, **options: Any) -> Any:
    """Record a copy of the model with some options."""
    model = copy.deepcopy(model)
    with gradlib.record(model, **options) as recording:
        output = model(x)
        for i in range(passes):
            (loss_of(output) * (i + 1)).backward(retain_graph=True)
    return recording


# modules=


@pytest.mark.parametrize(
    ("choice", "expected"),
    [
        ("head", ["head"]),
        (["head", "layers.0"], ["layers.0", "head"]),
        ("layers.*", ["layers.0", "layers.1", "layers.1.0"]),
        (["*0"], ["layers.0", "layers.1.0"]),
        ("*", ["", "layers.0", "layers.1", "layers.1.0", "head"]),
        ("", [""]),
        (lambda _name, module: isinstance(module, nn.Linear),
         ["layers.0", "layers.1.0", "head"]),
        (lambda name, _module: name == "layers.1", ["layers.1"]),
        (lambda _name, _module: False, []),
        ([], []),
    ],
)  # fmt: skip
def test_which_modules(choice: Any, expected: list[str]) -> None:
    model = Nested()
    x = torch.randn(2, 3, requires_grad=True)
    every = recorded(model, x)
    some = recorded(model, x, modules=choice)
    assert [call.name for call in some] == expected
    for call in some:
        assert_close(of_call(call), of_call(every[call.name]))
    str(some)
    left_out = {call.name for call in every} - set(expected)
    for name in left_out:
        assert name not in some
        with pytest.raises(gradlib.NoSuchCallError, match="left it out"):
            _ = some[name]


def test_no_hook_on_modules_left_out() -> None:
    model = Nested()
    with gradlib.record(model, modules="head"):
        assert not model.layers[0]._forward_hooks
        assert model._forward_hooks  # the model itself tells where a forward begins
        assert model.head._forward_hooks


def test_a_choice_that_raises_leaves_no_hook() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 2))

    def choice(name: str, module: nn.Module) -> bool:
        if name == "2":
            raise ValueError(f"What of {module}?")
        return True

    with pytest.raises(ValueError, match="What of Linear"):
        gradlib.record(model, modules=choice).__enter__()
    gc.collect()
    assert not any(it._forward_hooks or it._forward_pre_hooks for it in model.modules())
    assert not any(it._backward_hooks for it in model.parameters())


@pytest.mark.parametrize("choice", ["haed", ["head", "layer.*"]])
def test_a_wrong_name(choice: Any) -> None:
    with pytest.raises(gradlib.NoSuchModuleError) as caught:
        gradlib.record(Nested(), modules=choice)
    assert caught.value.code == "GL205"
    assert isinstance(caught.value, LookupError)
    assert ("haed" if choice == "haed" else "layer.*") in str(caught.value)
    assert "head" in str(caught.value) or "layers" in str(caught.value)


def test_one_of_the_names_of_a_shared_module() -> None:
    model = nn.Sequential(shared := nn.Linear(3, 3), nn.Tanh(), shared)
    x = torch.randn(2, 3)
    for choice in ("0", "2"):
        recording = recorded(model, x, modules=choice)
        assert [call.name for call in recording] == ["0", "0"]
        assert len(recording.calls("2")) == 2


def test_forwards_are_those_of_the_model_when_it_is_left_out() -> None:
    model = Nested()
    with gradlib.record(model, modules=["layers.0", "head"]) as recording:
        for _ in range(2):
            model(torch.randn(2, 3))
    assert [call.forward for call in recording] == [0, 0, 1, 1]
    assert recording.forwards[1]["head"].index == 1


def test_children_of_a_parent_left_out() -> None:
    model: Any = Nested()
    x = torch.randn(2, 3)
    with gradlib.record(model, modules=["layers.1.0", "head"]) as recording:
        loss_of(model(x)).backward()
    weight = model.layers[1][0].weight
    assert_close(recording["layers.1.0"].param_grads["weight"], weight.grad)
    assert_close(recording["head"].param_grads["bias"], model.head.bias.grad)


def test_a_weight_shared_with_a_module_left_out() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(3, 3), nn.Linear(3, 3)
            self.b.weight = self.a.weight

        def forward(self, x: Tensor) -> Tensor:
            return self.b(torch.tanh(self.a(x)))

    model = Model()
    x = torch.randn(2, 3)
    every = recorded(model, x)
    alone = recorded(model, x, modules="a")["a"]
    assert_close(of_call(alone), of_call(every["a"]))
    both = every["a"].param_grads["weight"] + every["b"].param_grads["weight"]
    assert_close(alone.param_grads_total["weight"], both)


# keep=


@pytest.mark.parametrize(
    "keep",
    [
        subset
        for size in range(len(FIELDS) + 1)
        for subset in itertools.combinations(FIELDS, size)
    ],
    ids=lambda keep: "+".join(keep) or "nothing",
)
def test_which_fields(keep: tuple[str, ...]) -> None:
    torch.manual_seed(0)
    model = Net()
    x = torch.randn(2, 3, requires_grad=True)
    factor = torch.randn(4, requires_grad=True)
    wanted: dict[str, gradlib.Recording] = {}
    for name, options in {"all": {}, "some": {"keep": keep}}.items():
        twin = copy.deepcopy(model)
        with gradlib.record(twin, **options) as recording:
            loss_of(twin(x, factor=factor)).backward()
        wanted[name] = recording
    for full, call in zip(wanted["all"], wanted["some"], strict=True):
        for field, travels_with in TRAVELS_WITH.items():
            if travels_with in keep:
                assert_close(getattr(call, field), getattr(full, field))
                continue
            asked: list[Any] = list(call.passes)
            if field not in GRADIENTS:
                asked = [call]
            for each in asked:
                with pytest.raises(
                    gradlib.NotKeptError, match=f'"{travels_with}"'
                ) as caught:
                    getattr(each, field)
                assert caught.value.code == "GL206"
                said = str(caught.value)
                assert re.search(rf"\b{field}\b", said)  # what was asked for
                assert said.endswith(f'Record again, with "{travels_with}" in keep.')
        str(call)
        call._repr_html_()
        assert isinstance(call.note, str)
    gradients = set(keep) - {"args", "output"}
    if not gradients:
        assert "no field with gradients was kept" in wanted["some"]["first"].note
    elif gradients != {"param_grads"}:
        assert wanted["some"]["first"].note == wanted["all"]["first"].note
    table = str(wanted["some"])
    for field in ("output", "grad_output", "grad_input", "param_grads"):
        assert (field in table.splitlines()[1].split()) == (field in keep)


def test_a_field_that_was_not_kept_raises_without_a_pass() -> None:
    model = Net()
    with gradlib.record(model, keep=("output", "grad_output")) as recording:
        model(torch.randn(2, 3))
    for field in ("grad_input", "param_grads"):
        with pytest.raises(gradlib.NotKeptError):
            getattr(recording["first"], field)


def test_the_message_where_nothing_was_kept() -> None:
    recording = recorded(Net(), torch.randn(2, 3), keep=())
    with pytest.raises(gradlib.NotKeptError, match=r"keep=\(\)"):
        _ = recording["first"].args


def test_one_field_as_a_string() -> None:
    recording = recorded(Net(), torch.randn(2, 3), keep="grad_output")
    assert recording["first"].grad_output[0].shape == (2, 4)
    with pytest.raises(gradlib.NotKeptError):
        _ = recording["first"].output


def test_a_field_that_there_is_not() -> None:
    with pytest.raises(gradlib.UnknownFieldError, match="grad_inputs") as caught:
        gradlib.record(Net(), keep=("args", "grad_inputs"))
    assert caught.value.code == "GL204"
    assert isinstance(caught.value, ValueError)


def test_inputs_that_are_not_asked_for_are_not_kept() -> None:
    model = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2))
    shapes = []

    def shape(tensor: Tensor) -> Tensor:
        shapes.append(list(tensor.shape))
        return torch.zeros(())

    with gradlib.record(model, keep="output", reduce=shape):
        model(torch.randn(4, 3))
    assert shapes == [[4, 5], [4, 5], [4, 2]]
    with gradlib.record(model, modules="2", keep="output") as recording:
        model(torch.randn(4, 3))
    (trace,) = recording._traces
    assert trace.inputs.leaves == [None]
    assert list(recording["2"].output.shape) == [4, 2]


@pytest.mark.cpu  # whose memory NumPy shares
def test_an_input_that_is_returned_is_kept_as_the_output() -> None:
    x = torch.ones(4, 3)
    array = x.numpy()
    model = nn.Sequential(nn.Identity(), nn.Tanh(), nn.ReLU(inplace=True))
    with gradlib.record(model, keep="output") as recording:
        output = model(x)
        array[:] = 5
    assert recording["0"].output.equal(torch.ones(4, 3))
    assert recording["1"].output.equal(output)
    assert recording[""].output.equal(output)


def test_nothing_kept_of_the_values_costs_no_copy() -> None:
    model = Net()
    with gradlib.record(model, keep=("param_grads",)) as recording:
        output = model(torch.randn(2, 3))
        loss_of(output).backward()
    trace = recording._traces[0]
    assert not any(isinstance(leaf, Tensor) for leaf in trace.inputs.leaves)
    assert trace.output is not None
    assert not any(isinstance(leaf, Tensor) for leaf in trace.output.leaves)


# reduce=


@pytest.mark.parametrize("passes", [1, 2])
@pytest.mark.parametrize(
    "model",
    [
        Net(),
        Nested(),
        Shared(),
        Checkpointed(reentrant=False),
        Checkpointed(reentrant=True),
    ],
    ids=["net", "nested", "shared", "checkpoint", "reentrant"],
)
def test_what_is_reduced_is_the_whole(model: nn.Module, passes: int) -> None:
    x = torch.randn(2, 3, requires_grad=True)
    full = recorded(model, x, passes)
    reduced = recorded(model, x, passes, reduce=squares)
    assert [call.name for call in full] == [call.name for call in reduced]
    for ours, theirs in zip(reduced, full, strict=True):
        assert_close(of_call(ours), mapped(squares, of_call(theirs)))
    str(reduced)
    str(reduced["first" if hasattr(model, "first") else ""])


def test_reduced_to_tensors_where_a_checkpoint_computes_again() -> None:
    model = Checkpointed(reentrant=False)
    x = torch.randn(2, 3, requires_grad=True)
    full = recorded(model, x)
    reduced = recorded(model, x, reduce=torch.linalg.vector_norm)
    assert [call.name for call in reduced] == [call.name for call in full]
    for ours, theirs in zip(reduced, full, strict=True):
        assert_close(of_call(ours), mapped(torch.linalg.vector_norm, of_call(theirs)))


def test_reduced_two_forwards_whose_backwards_are_one() -> None:
    model = Shared()
    x = torch.randn(2, 3, requires_grad=True)
    full: list[Call] = []
    reduced: list[Call] = []
    for into, reduce in ((full, None), (reduced, squares)):
        twin = copy.deepcopy(model)
        with gradlib.record(twin, reduce=reduce) as recording:
            (loss_of(twin(x)) + loss_of(twin(2 * x))).backward()
        into += recording
    for ours, theirs in zip(reduced, full, strict=True):
        assert_close(of_call(ours), mapped(squares, of_call(theirs)))


def test_reduced_in_a_pass_that_needs_part_of_the_graph_only() -> None:
    model = Shared()
    x = torch.randn(2, 3, requires_grad=True)
    for asked in ("x", "fc.weight", "scale"):
        found = []
        for reduce in (None, squares):
            twin = copy.deepcopy(model)
            target = x if asked == "x" else twin.get_parameter(asked)
            with gradlib.record(twin, reduce=reduce) as recording:
                torch.autograd.grad(loss_of(twin(x)), target)
            found.append([of_call(call) for call in recording])
        assert_close(found[1], mapped_each(squares, found[0]))


def mapped_each(function: Any, structures: list[Any]) -> list[Any]:
    """Apply a function to every tensor of each structure."""
    return [mapped(function, structure) for structure in structures]


def test_reduced_to_statistics() -> None:
    model = Net()
    x = torch.randn(2, 3, requires_grad=True)
    full = recorded(model, x)
    reduced = recorded(model, x, reduce=gradlib.tensor_stats)
    for name in ("first", "second"):
        grad, stats = full[name].grad_input[0], reduced[name].grad_input[0]
        assert isinstance(stats, gradlib.TensorStats)
        assert stats.shape == grad.shape
        assert stats.norm == pytest.approx(grad.norm().item())
        assert stats.largest == pytest.approx(grad.abs().max().item())
    # The table says of both the same.
    assert str(reduced) == str(full)
    assert str(reduced["first"]) == str(full["first"])


@pytest.mark.parametrize(
    ("number", "shown"),
    [(3, "3"), (-2.5, "-2.5"), (1 + 2j, "1+2j"), (np.float32(0.25), "0.25")],
)
def test_numbers_of_every_kind_are_shown(number: Any, shown: str) -> None:
    recording = recorded(Net(), torch.randn(2, 3), reduce=lambda _: number)
    assert shown in str(recording).splitlines()[2].split()
    assert recording["first"].grad_output == (number,)


def test_what_reduce_is_given() -> None:
    given: list[Tensor] = []

    def reduce(tensor: Tensor) -> None:
        given.append(tensor)

    recorded(Net(), torch.randn(2, 3, requires_grad=True), reduce=reduce)
    assert given
    assert not any(tensor.requires_grad for tensor in given)


def test_reduce_may_write_into_what_it_is_given() -> None:
    model, plain = Net(), None
    plain = copy.deepcopy(model)
    x = torch.randn(2, 3, requires_grad=True)
    expected = torch.autograd.grad(loss_of(plain(x)), [x, *plain.parameters()])
    with gradlib.record(model, reduce=lambda tensor: tensor.mul_(0).sum()) as recording:
        found = torch.autograd.grad(loss_of(model(x)), [x, *model.parameters()])
    assert_close(found, expected, rtol=0, atol=0)
    assert recording["first"].grad_output[0] == 0


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_a_reduce_that_raises(where: str) -> None:
    model = Net()
    x = torch.randn(2, 3)

    def reduce(_: Tensor) -> None:
        if (where == "backward") == (torch._C._current_graph_task_id() != -1):
            raise ZeroDivisionError

    recorder = gradlib.record(model, reduce=reduce)

    def block() -> None:
        with recorder:
            loss_of(model(x)).backward()

    with pytest.raises(ZeroDivisionError):
        block()
    for module in model.modules():
        assert not module._forward_hooks
        assert not module._forward_pre_hooks
    assert not any(parameter._backward_hooks for parameter in model.parameters())
    loss_of(model(x)).backward()


def big_tensors_alive() -> int:
    """Count the tensors that hold many entries."""
    collect()
    found = 0
    for item in gc.get_objects():
        if type(item) in (Tensor, nn.Parameter) and item.numel() >= 5000:
            found += 1
    return found


@pytest.mark.parametrize(
    "options",
    [
        {"reduce": gradlib.tensor_stats},
        {"reduce": squares},
        {"reduce": gradlib.tensor_stats, "device": "cpu"},
    ],
)
@pytest.mark.parametrize("twice", [False, True])
def test_reducing_keeps_no_big_tensor(options: dict[str, Any], twice: bool) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.small = nn.Linear(2, 2)
            self.end = nn.Tanh()

        def forward(self, x: Tensor) -> Tensor:
            h = self.small(x)
            if twice:
                h = h + self.small(h)
            return self.end(h)

    model = Model()
    x = torch.randn(5000, 2)
    before = big_tensors_alive()
    storages: list[weakref.ref[Any]] = []

    def reduce(tensor: Tensor) -> Any:
        storages.append(weakref.ref(tensor))
        return options["reduce"](tensor)

    with gradlib.record(
        model, reduce=reduce, device=options.get("device")
    ) as recording:
        output = model(x)
        output.sum().backward(retain_graph=True)
        output.sum().backward()
        del output
        assert len(storages) > 10
        gc.collect()
        assert [alive for alive in storages if alive() is not None] == []
        assert big_tensors_alive() == before
    str(recording)


def test_reducing_keeps_no_part_that_waited_for_others_in_vain() -> None:
    class Two(nn.Module):
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return x.sin(), x.cos()

    x = torch.ones(5000, requires_grad=True)
    before = big_tensors_alive()
    with gradlib.record(model := Two(), reduce=gradlib.tensor_stats) as recording:
        first, _ = model(x * 1)
        torch.autograd.grad(first.sum(), x)
        del first, _
    assert recording[""].grad_input[0].mean == pytest.approx(math.cos(1))
    assert big_tensors_alive() == before


# device=


@pytest.mark.cpu
def test_kept_on_the_cpu() -> None:
    model = Net()
    x = torch.randn(2, 3, requires_grad=True)
    expected = x.detach().clone()
    with gradlib.record(model, device="cpu") as recording:
        loss_of(model(x)).backward()
        with torch.no_grad():
            x.zero_()
            for parameter in model.parameters():
                parameter.zero_()
                assert parameter.grad is not None
                parameter.grad.zero_()
    assert_close(recording["first"].args, (expected,))
    assert recording["first"].param_grads_total["weight"].any()
    assert recording["first"].param_grads["weight"].any()


@pytest.mark.parametrize(
    ("model", "reduce"),
    [
        (Net(), None),
        (Net(), torch.sum),
        (Shared(), torch.sum),
        (Shared(), None),
        *((Checkpointed(reentrant), torch.sum) for reentrant in (False, True)),
    ],
)
def test_the_device_is_honoured(model: nn.Module, reduce: Any) -> None:
    x = torch.randn(2, 3, requires_grad=True)
    recording = recorded(model, x, device="meta", reduce=reduce)
    for call in recording:
        kept: list[Tensor] = []
        mapped(kept.append, of_call(call))
        assert kept
        assert all(tensor.is_meta for tensor in kept)
    str(recording)


# All together


@pytest.mark.cpu
@pytest.mark.parametrize(
    "reentrant",
    [
        False,
        True,
    ],
)
def test_options_together(reentrant: bool) -> None:
    model = Checkpointed(reentrant)
    x = torch.randn(2, 3, requires_grad=True)
    full = recorded(model, x)
    found = recorded(
        model,
        x,
        modules=["block", "block.*"],
        keep=("grad_output", "param_grads"),
        reduce=torch.linalg.vector_norm,
        device="cpu",
    )
    assert [call.name for call in found] == [
        call.name for call in full if call.name.startswith("block")
    ]
    for ours in found:
        theirs = full[ours.name, ours.index]
        for field in ("grad_output", "param_grads", "param_grads_total"):
            expected = mapped(torch.linalg.vector_norm, getattr(theirs, field))
            assert_close(getattr(ours, field), expected)
    str(found)


def test_gradients_without_args_of_a_call_computed_again() -> None:
    model = Checkpointed(reentrant=True)
    x = torch.randn(2, 3, requires_grad=True)
    full = recorded(model, x)
    found = recorded(model, x, keep=("param_grads",))
    for ours, theirs in zip(found, full, strict=True):
        assert_close(ours.param_grads, theirs.param_grads)


@pytest.mark.parametrize(
    "options",
    [
        {"keep": ()},
        {"keep": ("output",)},
        {"modules": "first"},
        {"reduce": gradlib.tensor_stats},
        {"device": "cpu"},
        {"reduce": squares, "keep": ("grad_input",)},
    ],
    ids=["nothing", "output", "modules", "statistics", "device", "reduced"],
)
def test_results_are_the_same_bits(options: dict[str, Any]) -> None:
    model = Checkpointed(reentrant=False)
    plain = copy.deepcopy(model)
    x = torch.randn(2, 3, requires_grad=True)
    expected = torch.autograd.grad(loss_of(plain(x)), [x, *plain.parameters()])
    with gradlib.record(model, **options):
        found = torch.autograd.grad(loss_of(model(x)), [x, *model.parameters()])
    assert_close(found, expected, rtol=0, atol=0)


def test_a_block_is_begun_once() -> None:
    model, x = nn.Linear(3, 2), torch.ones(1, 3)
    block = gradlib.record(model)
    with block as recording:
        model(x)
        with (
            pytest.raises(gradlib.RecordingArgumentError, match="begun before"),
            block,
        ):
            pass
        model(x)
    with pytest.raises(gradlib.RecordingArgumentError, match="begun before"), block:
        model(x)
    assert len(recording) == 2
    assert not model._forward_hooks


@dataclass(unsafe_hash=True)
class Scaled(nn.Module):
    """A layer that equals any other with its factor."""

    factor: float

    def __post_init__(self) -> None:
        super().__init__()

    def forward(self, x: Tensor) -> Tensor:
        return self.factor * x


def test_two_modules_that_are_equal_are_refused() -> None:
    layer = Scaled(2)
    with pytest.raises(
        gradlib.RecordingArgumentError,
        match=r'"0" and "2" are two, .* class Scaled .* @dataclass\(eq=False\)',
    ):
        gradlib.record(nn.Sequential(layer, layer, Scaled(2)))
    with gradlib.record(nn.Sequential(layer, layer, Scaled(3))) as recording:
        layer(torch.ones(1))
    assert len(recording) == 1


def put_in_front(model: nn.Sequential, layer: nn.Module) -> None:
    model.insert(0, layer)


def put_in_place(model: nn.Sequential, layer: nn.Module) -> None:
    model[0] = layer


def put_inside(model: nn.Sequential, layer: nn.Module) -> None:
    model.append(nn.Sequential(layer, nn.ReLU()))


def put_past_hooks(model: nn.Sequential, layer: nn.Module) -> None:
    model._modules["3"] = layer


@pytest.mark.parametrize(
    ("put", "name"),
    [
        (nn.Sequential.append, "2"),
        (put_in_front, "0 (new)"),
        (put_in_place, "0 (new)"),
        (put_inside, "2.0"),
        (put_past_hooks, "3"),
    ],
)
def test_a_module_that_equals_another_and_comes_later_is_named(
    put: Callable[[nn.Sequential, nn.Module], object], name: str
) -> None:
    model = nn.Sequential(Scaled(2), nn.ReLU())
    with gradlib.record(model) as recording:
        model(torch.ones(1))
        put(model, Scaled(2))
        model(torch.ones(1))
    assert f"no call was seen of {name}: recording[name] says why" in str(recording)
    said = rf'"{re.escape(name)}" was not recorded: .* class Scaled they are equal'
    with pytest.raises(gradlib.NoSuchCallError, match=said):
        recording[name]


def test_a_module_that_equals_another_and_was_not_chosen() -> None:
    layer = Scaled(2)
    model = nn.Sequential(layer, nn.ReLU())
    with gradlib.record(model, modules=["0", "1"]) as recording:
        model.append(layer)
        model.append(Scaled(2))
        model(torch.ones(1))
    assert "no call was seen" not in str(recording)
    with pytest.raises(gradlib.NoSuchCallError, match=r"modules=\.\.\.\) left it out"):
        recording["3"]


ASKED: dict[str, Any] = {
    "a call": lambda it: it["0"],
    "a picture": lambda it: it.plot(),
    "all calls": list,
}


@pytest.mark.parametrize("asked", ASKED)
def test_without_a_with_block_there_is_no_recording(asked: str) -> None:
    model = nn.Linear(3, 2)
    recording: Any = gradlib.record(model)
    model(torch.ones(1, 3)).sum().backward()
    wanted = r"with gradlib\.record\(model\) as recording"
    with pytest.raises(gradlib.RecordingArgumentError, match=wanted):
        ASKED[asked](recording)


def test_what_makes_a_recording_has_nothing_else() -> None:
    recorder: Any = gradlib.record(nn.Linear(3, 2))
    assert repr(recorder) == "<record(Linear), for a with block>"
    assert not hasattr(recorder, "nothing")
    assert repr(copy.copy(recorder)) == repr(recorder)


def test_what_has_no_values_is_not_moved() -> None:
    model = nn.Sequential(nn.Linear(2, 2, device="meta"), nn.ReLU())
    x = torch.ones(1, 2, device="meta")
    with gradlib.record(model, device="cpu") as recording:
        model(x).sum().backward()
    assert recording["0"].output.is_meta
    assert recording["0"].param_grads["weight"].is_meta


def test_a_reduction_that_draws_moves_no_generator() -> None:
    def some(tensor: Tensor) -> Tensor:
        return tensor.flatten()[torch.randint(tensor.numel(), (3,))]

    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(), nn.Dropout())
    results: list[tuple[Tensor, Tensor]] = []
    for reduce in (None, some):
        torch.manual_seed(0)
        with gradlib.record(model, reduce=reduce):
            output = model(torch.ones(2, 4))
            output.sum().backward()
        results.append((output, torch.rand(3)))
    for one, other in zip(*results, strict=True):
        assert torch.equal(one, other)
