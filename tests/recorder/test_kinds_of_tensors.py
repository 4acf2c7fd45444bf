"""Kinds of tensors: subclasses, empty, nested, quantized, without a tensor at all."""

import copy
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close
from torch.utils._pytree import tree_map

import gradlib

from .truth import Net, assert_same_bits, grad_of, grads_of, run

aten: Any = torch.ops.aten


class Tagged(Tensor):
    """A tensor with a class of its own."""


def test_a_subclass_of_tensor() -> None:
    model = Net()
    x = torch.randn(2, 3).as_subclass(Tagged).requires_grad_()
    plain = copy.deepcopy(model)
    (expected,) = torch.autograd.grad(plain(x).sum(), x)
    with gradlib.record(model) as recording:
        output = model(x)
        output.sum().backward()
    assert type(output) is Tagged
    assert_close(x.grad, expected)
    call = recording["first"]
    assert_close(call.grad_input, (x.grad,))
    assert type(call.args[0]) is Tagged
    assert_close(call.param_grads["weight"], model.first.weight.grad)


def test_a_tensor_with_torch_function() -> None:
    seen: list[str] = []

    class Watching(Tensor):
        @classmethod
        def __torch_function__(
            cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            seen.append(getattr(func, "__name__", str(func)))
            return super().__torch_function__(func, types, args, kwargs or {})

    model = nn.Sequential(nn.Linear(3, 2), nn.ReLU())
    x = torch.randn(2, 3).as_subclass(Watching).requires_grad_()
    with gradlib.record(model) as recording:
        model(x).sum().backward()
    assert_close(recording["0"].grad_input[0].as_subclass(Tensor), x.grad)


class Wrapped(Tensor):
    """A tensor around another, whose class computes only what its table lists."""

    table = (
        aten.clone.default,
        aten.detach.default,
        aten.expand.default,
        aten.mul.Tensor,
        aten.ones_like.default,
        aten.sum.default,
    )
    held: Tensor

    @staticmethod
    def __new__(cls, held: Tensor) -> "Wrapped":
        make: Any = cast(Any, Tensor)._make_wrapper_subclass
        made = make(cls, held.shape, dtype=held.dtype)
        made.held = held
        return made

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Compute it on what it holds, or raise as a table does."""
        if func not in cls.table:
            raise KeyError(func)
        result = func(*tree_map(_held, args), **tree_map(_held, kwargs or {}))
        return cls(result) if isinstance(result, Tensor) else result


def _held(leaf: Any) -> Any:
    return leaf.held if isinstance(leaf, Wrapped) else leaf


def test_a_class_that_knows_few_operations(tmp_path: Path) -> None:
    class Twice(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x * 2

    model, x = nn.Sequential(Twice(), Twice()), Wrapped(torch.ones(2)).requires_grad_()
    with gradlib.record(model) as recording:
        model(x).sum().backward()
    grads = [it.grad_input[0].held for it in (recording["0"], recording["1"])]
    assert_close(grads, [torch.full((2,), 4.0), torch.full((2,), 2.0)])
    # It has no norm, no differences and no bytes.
    assert "1       Twice       [2]     nan" in str(recording)
    assert recording.first_nonfinite() is None
    assert recording.plot("histogram").axes
    assert recording.compare(recording).first is not None
    verified = recording.verify(numerical=True)
    assert len(verified.skipped) == len(recording)
    assert "Wrapped raises KeyError" in verified.skipped[0].reason
    with pytest.raises(gradlib.NotStorableError):
        recording.save(tmp_path / "wrapped.safetensors")


@pytest.mark.parametrize("kwargs", [{}, {"reduce": gradlib.tensor_stats}])
@pytest.mark.parametrize("refuses", ["everything else", "copies"])
def test_a_class_that_refuses_what_it_does_not_know(
    refuses: str, kwargs: dict[str, Any], tmp_path: Path
) -> None:
    """The model runs; nothing of such a tensor is seen, and the note says so."""

    class Strict(Tensor):
        @classmethod
        def __torch_function__(
            cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            known = (nn.functional.linear, Tensor.sin)
            name = func.__name__
            if refuses == "copies" and name not in ("detach", "clone", "_lazy_clone"):
                return super().__torch_function__(func, types, args, kwargs or {})
            if func not in known:
                raise NotImplementedError(f"Strict has no {name}")
            return super().__torch_function__(func, types, args, kwargs or {})

    class Sine(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.sin()

    class Plain(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            with torch._C.DisableTorchFunctionSubclass():
                return x.as_subclass(Tensor)

    model = nn.Sequential(nn.Linear(3, 3), Sine(), Plain(), nn.Linear(3, 1))
    x = torch.randn(2, 3).as_subclass(Strict)
    model(x).sum().backward()
    expected = [grad_of(it) for it in model.parameters()]
    model.zero_grad()
    with gradlib.record(model, **kwargs) as recording:
        model(x).sum().backward()
    assert_same_bits([grad_of(it) for it in model.parameters()], expected)
    assert "args[0] is of type Strict" in recording["0"].note
    assert recording["3"].grad_input is not None
    for call in recording:
        assert str(call)
    recording.save(tmp_path / "strict")


def test_a_note_says_what_reduce_raised_of_a_class_of_tensors(tmp_path: Path) -> None:
    class Other(Tensor):
        pass

    def of_plain(tensor: Tensor) -> Tensor:
        if type(tensor) is not Tensor:
            raise TypeError("not\nplain")
        return tensor.norm()

    model, x = nn.Linear(3, 2), torch.randn(4, 3).as_subclass(Other)
    with gradlib.record(model, reduce=of_plain) as recording:
        model(x).sum().backward()
    said = "is of type Other (reduce raised TypeError: not plain): tensors in it, if"
    recording.save(tmp_path / "file")
    for it in (recording, gradlib.load_recording(tmp_path / "file")):
        assert it[""].note.startswith(f"args[0] {said}")
        assert f"output {said}" in it[""].note


@pytest.mark.parametrize("is_learned", [True, False])
def test_a_weight_of_a_class_that_refuses_what_it_does_not_know(
    is_learned: bool,
) -> None:
    """It is recorded past its class, and cannot be replayed."""

    class Strict(Tensor):
        @classmethod
        def __torch_function__(
            cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            raise NotImplementedError(f"Strict has no {func.__name__}")

    class Scales(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            w = torch.randn(3)
            with torch._C.DisableTorchFunctionSubclass():
                w = w.as_subclass(Strict).requires_grad_(is_learned)
            (self._parameters if is_learned else self._buffers)["w"] = cast(Any, w)

        def forward(self, x: Tensor) -> Tensor:
            with torch._C.DisableTorchFunctionSubclass():
                return x * cast(Tensor, self.w)

    model = nn.Sequential(nn.Linear(3, 3), Scales(), nn.Linear(3, 1))
    x = torch.randn(2, 3)
    with gradlib.record(model) as recording:
        for _ in range(2):
            model(x).sum().backward()
    call = recording["1", 1]
    got = call.param_grads["w"] if is_learned else call.grad_input[0]
    of = call.grad_output[0]
    with torch._C.DisableTorchFunctionSubclass():
        w = cast(Tensor, model[1].w).detach().as_subclass(Tensor)
    assert_close(got, (of * call.args[0]).sum(0) if is_learned else of * w)
    with pytest.raises(gradlib.CannotReplayError, match="refuses to have it kept"):
        recording.verify()


def test_what_a_function_raises_that_reduces_goes_on() -> None:
    def reduce(_: Tensor) -> float:
        raise ZeroDivisionError

    model = nn.Tanh()
    with pytest.raises(ZeroDivisionError), gradlib.record(model, reduce=reduce):
        model(torch.ones(1))


def test_a_backward_that_gives_nothing() -> None:
    class Nothing(torch.autograd.Function):
        @staticmethod
        def forward(_ctx: Any, x: Tensor) -> Tensor:
            return 2 * x

        @staticmethod
        def backward(ctx: Any, *grads: Tensor) -> None:
            assert ctx.needs_input_grad == (True,)
            assert len(grads) == 1

    class Last(nn.Module):
        def forward(self, x: Tensor) -> Any:
            return Nothing.apply(x)

    model, x = nn.Sequential(Net(), Last()), torch.randn(2, 3, requires_grad=True)
    with gradlib.record(model) as recording:
        run(model, x)
    assert x.grad is None
    assert recording["1"].grad_input == (None,)
    assert recording["1"].note == "backward pass 0 gave no gradient to args[0]"
    assert (
        recording["0.first"].note == "no backward pass reached its output in the block"
    )


def test_gradients_that_are_nan() -> None:
    class Root(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return (x * 0).sqrt() * 0

    model = nn.Sequential(nn.Linear(3, 2), Root())
    x = torch.randn(2, 3, requires_grad=True)
    with gradlib.record(model) as recording:
        model(x).sum().backward()
    assert recording["0"].grad_output[0].isnan().all()
    assert_same_bits(recording["0"].param_grads["weight"], model[0].weight.grad)
    assert_same_bits(recording["0"].grad_input, (x.grad,))
    assert "nan" in str(recording)


def test_a_batch_of_none() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
    x = torch.randn(0, 3, requires_grad=True)
    for reduce in (None, gradlib.tensor_stats):
        model.zero_grad()
        with gradlib.record(model, reduce=reduce) as recording:
            model(x).sum().backward()
        call = recording["0"]
        assert call.grad_input[0].shape == (0, 3)
        assert call.param_grads["weight"].shape == (4, 3)
        str(recording)
        str(call)


def test_outputs_without_any_tensor() -> None:
    class Empty(nn.Module):
        def forward(self, x: Tensor, what: Any) -> Any:
            assert x.requires_grad
            return what

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.empty = Empty()

        def forward(self, x: Tensor) -> Tensor:
            for what in ((), [], {}, None, "text", 3, ((), [()])):
                assert self.empty(x, what) == what
            return 2 * x

    x = torch.ones(2, requires_grad=True)
    with gradlib.record(model := Model()) as recording:
        model(x).sum().backward()
    assert [call.output for call in recording.calls("empty")] == [
        (), [], {}, None, "text", 3, ((), [()]),
    ]  # fmt: skip
    for call in recording.calls("empty"):
        assert call.note == "it returned no tensor that requires grad"
        assert call.grad_output is None
    assert_close(recording[""].grad_input, (x.grad,))
    str(recording)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("layout", [torch.jagged, torch.strided])
def test_nested_tensors(layout: torch.layout) -> None:
    model, parts = nn.Linear(4, 3), [torch.ones(2, 4), torch.ones(3, 4)]
    x = torch.nested.nested_tensor(parts, layout=layout, requires_grad=True)
    with gradlib.record(model) as recording:
        output = model(x)
        torch.nested.to_padded_tensor(output, 0.0).sum().backward()
    (call,) = recording
    assert_close(
        call.param_grads, {"weight": torch.full((3, 4), 5.0)} | grads_of(model)
    )
    assert "2 nested" in str(recording) or "j" in str(recording)
    assert gradlib.tensor_stats(output).zeros == 0


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")
@pytest.mark.parametrize("reduce", [None, gradlib.tensor_stats])
def test_quantized_tensors(reduce: Any) -> None:
    class Quantizes(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.quantize_per_tensor(x, 0.5, 0, torch.qint8)

    with gradlib.record(model := Quantizes(), reduce=reduce) as recording:
        model(torch.tensor([1.0, 2.0, 2.0]))
    kept = recording[""].output
    found = gradlib.tensor_stats(kept) if reduce is None else kept
    assert (found.shape, found.norm, found.dtype) == ((3,), 3, torch.qint8)
    assert recording.to_frame()["output"].tolist() == [3]


@pytest.mark.cpu  # no GPU was asked whether it has such tensors
@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")  # they are deprecated
@pytest.mark.parametrize("reduce", [None, gradlib.tensor_stats])
def test_quantized_tensors_with_floating_zero_points(reduce: Any) -> None:
    class Quantizes(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            scales, zeros = torch.full((3,), 0.5), torch.zeros(3)
            return torch.quantize_per_channel(x, scales, zeros, 1, torch.quint8)

    with gradlib.record(model := Quantizes(), reduce=reduce) as recording:
        output = model(torch.tensor([[1.0, 2.0, 2.0]]))
    kept = recording[""].output
    assert kept is not output
    found = gradlib.tensor_stats(kept) if reduce is None else kept
    assert (found.norm, found.dtype) == (3, torch.quint8)
    if reduce is None:
        assert torch.equal(kept.int_repr(), output.int_repr())
        assert (kept.qscheme(), kept.q_per_channel_axis()) == (output.qscheme(), 1)


@pytest.mark.cpu  # no GPU was asked whether it has such tensors
def test_a_dtype_that_torch_does_not_turn_into_numbers() -> None:
    class Packs(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.view(torch.bits8)

    with gradlib.record(model := Packs()) as recording:
        model(torch.ones(3, dtype=torch.uint8))
    assert "bits8" in str(recording[""].output.dtype)
    assert str(recording).splitlines()[2].split() == [
        *("(root)", "Packs", "[3]", "-", "-", "-")
    ]
    assert "nan" in str(recording[""])
