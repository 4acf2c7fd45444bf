"""Each note that a call can have; no other note exists."""

import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.utils.checkpoint import checkpoint

import gradlib
from gradlib.recording import notes

Run = Callable[[nn.Module, Tensor], object]


class Parts(nn.Module):
    """Two outputs, of which a loss may use one."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(2, 1), nn.Linear(2, 1)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.left(x), self.right(x)


class Sine(nn.Module):
    """Computes one output from the other, with a second derivative that is not zero."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(2, 1)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = self.fc(x)
        return y, y.sin()


class Both(nn.Module):
    """A `Sine` with parameters of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = (nn.Parameter(torch.ones(2)) for _ in range(2))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x * self.left, x * self.right


class Fails(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        raise ValueError(x.shape)


def stopped_by_a_hook() -> nn.Module:
    def stop(*_: object) -> None:
        raise ValueError

    model = nn.Linear(2, 1)
    model.register_forward_hook(stop)
    return model


class Interrupted(nn.Module):
    """Is interrupted in its first call, so that no hook runs at its end."""

    done = False

    def forward(self, x: Tensor) -> Tensor:
        if not self.done:
            self.done = True
            raise KeyboardInterrupt
        return 2 * x


class Slopes(nn.Module):
    """Sets a hook that multiplies the gradient by the module's input."""

    def forward(self, x: Tensor) -> Tensor:
        y = x.sin()
        if y.requires_grad:
            y.register_hook(lambda grad: grad * x)
        return y.square()


class HookedCast(nn.Module):
    """Sets a hook on the cast of its weight."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones(2))

    def forward(self, x: Tensor) -> Tensor:
        w: Any = self.w.bfloat16()
        w.register_hook(lambda grad: grad * 2)
        return x * w


class Product(torch.autograd.Function):
    """A product whose backward returns what it has saved as it is."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        ctx.save_for_backward(x, w)
        return x * w

    @staticmethod
    def backward(ctx: Any, *_grads: Tensor) -> tuple[Tensor, ...]:
        x, w = ctx.saved_tensors
        return w, x


class Products(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones(3, 2))

    def forward(self, x: Tensor) -> Tensor:
        product: Any = Product.apply(x, self.w)
        return product


class PutsElsewhere(nn.Module):
    """Stores a tensor in a global list, after it has computed its output."""

    def forward(self, x: Tensor) -> Tensor:
        y = x.sin()
        PUT.append(x.square())
        return y


PUT: list[Tensor] = []


class Wrapped(nn.Module):
    """Returns an object that the recorder does not open."""

    def forward(self, x: Tensor) -> object:
        return iter((2 * x,))


def forward_only(model: nn.Module, x: Tensor) -> None:
    model(x)


def backward(model: nn.Module, x: Tensor) -> None:
    model(x).sum().backward()


def without_grad(model: nn.Module, x: Tensor) -> None:
    with torch.no_grad():
        model(x)


def failing(model: nn.Module, x: Tensor) -> None:
    with suppress(ValueError):
        model(x)


def interrupted(model: nn.Module, x: Tensor) -> None:
    with suppress(KeyboardInterrupt):
        model(x)
    model(x)


def interrupted_at_last(model: nn.Module, x: Tensor) -> None:
    with suppress(KeyboardInterrupt):
        model(x)


def elsewhere(model: nn.Module, x: Tensor) -> None:
    with ThreadPoolExecutor(1) as pool:
        assert isinstance(pool.submit(model, x).exception(), KeyboardInterrupt)


def broken_backward(model: nn.Module, x: Tensor) -> None:
    output = model(x)

    def fail(_grad: Tensor) -> None:
        raise ValueError

    output.register_hook(fail)
    with suppress(ValueError):
        output.sum().backward()


def left_only(model: nn.Module, x: Tensor) -> None:
    model(x)[0].sum().backward()


def checkpointed(model: nn.Module, x: Tensor) -> None:
    x.requires_grad_()
    checkpoint(model, x, use_reentrant=False).sum().backward()


def with_gradient(model: nn.Module, x: Tensor) -> None:
    backward(model, x.requires_grad_())


def vectorized(model: nn.Module, x: Tensor) -> None:
    torch.vmap(model)(x)


def batched(model: nn.Module, x: Tensor) -> None:
    output = model(x)
    vectors = torch.ones(1, *output.shape)
    torch.autograd.grad(
        output, list(model.parameters()), vectors, is_grads_batched=True
    )


def left_and_penalty(model: nn.Module, x: Tensor) -> None:
    """Go backward from the left output, and from the right parameter itself."""
    assert isinstance(model, Both)
    model(x)[0].sum().add(model.right.square().sum()).backward()


def twice_batched(model: nn.Module, x: Tensor) -> None:
    outputs = model(x)
    output = (outputs[-1] if isinstance(outputs, tuple) else outputs).pow(2)
    vectors = torch.ones(1, *output.shape)
    weight = next(model.parameters())
    (grads,) = torch.autograd.grad(
        output, weight, vectors, is_grads_batched=True, create_graph=True
    )
    grads.sum().backward()


def penalty(model: nn.Module, x: Tensor) -> None:
    loss = model(x.requires_grad_()).sum()
    (slope,) = torch.autograd.grad(loss, x, create_graph=True)
    slope.square().sum().backward()


def captured(model: nn.Module, x: Tensor) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "is_initialized", lambda: True)
        patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
        model(x)


def captured_backward(model: nn.Module, x: Tensor) -> None:
    outputs = model(x)
    loss = (outputs[-1] if isinstance(outputs, tuple) else outputs).sum()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "is_initialized", lambda: True)
        patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
        loss.backward()


def autocast(model: nn.Module, x: Tensor) -> None:
    with torch.autocast(x.device.type, torch.bfloat16):
        y = model(x)
    y.sum().backward()


def through_tangents(model: nn.Module, x: Tensor) -> None:
    with forward_ad.dual_level():
        y = model(forward_ad.make_dual(x, torch.ones_like(x)))
        tangent = forward_ad.unpack_dual(y).tangent
    assert tangent is not None
    tangent.square().sum().backward()


def with_what_was_put(model: nn.Module, x: Tensor) -> None:
    (model(x.requires_grad_()) + PUT.pop()).sum().backward()


class ClearsHooks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        self._forward_hooks.clear()
        return self.layer(x)


CASES: list[tuple[str, nn.Module, Run]] = [
    (notes.STAND_INS, nn.Linear(2, 1), vectorized),
    (notes.CAPTURED, nn.Linear(2, 1), captured),
    (notes.DISABLED, nn.Linear(2, 1), without_grad),
    (notes.NO_GRAD_OUT, nn.ReLU(), forward_only),
    (notes.RAISED, Fails(), failing),
    (notes.HOOK_RAISED, stopped_by_a_hook(), failing),
    (notes.BROKEN_OFF, Interrupted(), interrupted),
    (notes.BROKEN_OFF, Interrupted(), interrupted_at_last),
    (notes.HOOK_TAKEN, ClearsHooks(), forward_only),
    (notes.NOT_RETURNED, Interrupted(), elsewhere),
    (notes.NOT_REACHED, nn.Linear(2, 1), forward_only),
    (notes.NO_GRAD, nn.Linear(2, 1), backward),
    (notes.NOTHING_GIVEN, Parts(), left_only),
    (notes.NOT_THROUGH_IT, Both(), left_and_penalty),
    (notes.NOT_FROM_OUTSIDE, Both(), left_and_penalty),
    (notes.RETURNED, nn.Identity(), with_gradient),
    (notes.SECOND_ORDER, nn.Linear(2, 1), twice_batched),
    (notes.BETWEEN_OUTPUTS, Sine(), twice_batched),
    (notes.HOOKS_INSIDE, Slopes(), penalty),
    (notes.HOOKED_CASTS, HookedCast(), autocast),
    (notes.GAVE_BACK, Products(), penalty),
    (notes.LEFT_ELSEWHERE, PutsElsewhere(), with_what_was_put),
    (notes.TANGENTS, nn.Linear(2, 1), through_tangents),
    (notes.NOT_OPENED, Wrapped(), forward_only),
    (notes.RECOMPUTED, nn.Linear(2, 1), checkpointed),
    (notes.UNFINISHED, nn.Linear(2, 1), broken_backward),
    (notes.BATCHED, nn.Linear(2, 1), batched),
    (notes.CAPTURED_PASS, nn.Linear(2, 1), captured_backward),
    (notes.CAPTURED_PASS, Sine(), captured_backward),
]


def fits(text: str, note: str) -> bool:
    return bool(re.search(re.escape(text).replace(r"\{\}", r"[^;]+?"), note))


@pytest.mark.parametrize(("text", "model", "run"), CASES)
def test_it_is_said_when_it_happens(text: str, model: nn.Module, run: Run) -> None:
    with gradlib.record(model) as recording:
        run(model, torch.randn(3, 2))
    assert fits(text, next(iter(recording)).note)


def test_what_an_interrupt_has_broken_off_is_said_when_the_block_ends() -> None:
    model = nn.Sequential(nn.Linear(2, 2), Interrupted())
    with gradlib.record(model) as recording:
        interrupted_at_last(model, torch.ones(3, 2))
        assert [it.note.partition(";")[0] for it in recording] == [
            *(notes.NOT_RETURNED, notes.NOT_REACHED, notes.NOT_RETURNED)
        ]
    assert [recording[name].note for name in ("", "1")] == [notes.BROKEN_OFF] * 2


@pytest.mark.parametrize("outermost", [True, False])
@pytest.mark.parametrize("times", [1, 2])
def test_a_forward_that_clears_its_own_hooks_is_not_said_to_be_broken_off(
    outermost: bool, times: int
) -> None:
    clears = ClearsHooks()
    model = clears if outermost else nn.Sequential(clears, nn.Linear(2, 1))
    with gradlib.record(model) as recording:
        for _ in range(times):
            model(torch.ones(3, 2)).sum().backward()
    name = "" if outermost else "0"
    found = [call.note.split("; ")[0] for call in recording.calls(name)]
    assert found == [notes.HOOK_TAKEN] * times
    assert not any(notes.BROKEN_OFF in call.note for call in recording)
    inside = name + "." * (not outermost) + "layer"
    assert all(len(call.passes) == 1 for call in recording.calls(inside))


def test_what_goes_on_when_the_block_ends_is_not_broken_off() -> None:
    class Records(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(2, 2)

        def forward(self, x: Tensor) -> Tensor:
            block = gradlib.record(self)
            recording = block.__enter__()
            y = self.inner(x)
            assert recording["inner"].note.startswith(notes.NOT_REACHED)
            block.__exit__(None, None, None)
            return y

    model = nn.Sequential(Records())
    with gradlib.record(model) as recording:
        model(torch.ones(3, 2)).sum().backward()
    assert not any(notes.BROKEN_OFF in it.note for it in recording)


@pytest.mark.parametrize("loaded", [False, True])
def test_a_call_that_a_pass_did_not_reach_says_that_it_raised(
    tmp_path: Path, loaded: bool
) -> None:
    class Raises(torch.autograd.Function):
        forward: Any = staticmethod(lambda _, x: x.clone())
        backward: Any = staticmethod(lambda _, grad: grad.nothing)

    model = nn.Sequential(nn.Linear(2, 2), nn.Tanh(), nn.Linear(2, 1))
    with gradlib.record(model) as recording:
        hidden = cast(Tensor, cast(Any, Raises.apply)(model[:2](torch.ones(3, 2))))
        with pytest.raises(AttributeError):
            model[2](hidden).sum().backward()
        model[:2](torch.ones(3, 2)).sum().backward()
    if loaded:
        recording.save(tmp_path / "run")
        recording = gradlib.load_recording(tmp_path / "run")
    said = notes.UNFINISHED.format(0)
    assert recording["0", 0].note.startswith(f"{notes.NOT_REACHED}; {said}")
    assert said not in recording["2"].note  # it got all
    assert said not in recording["0", 1].note


def test_nothing_asked() -> None:
    model = nn.Linear(2, 1)
    with gradlib.record(model, keep=["output"]) as recording:
        backward(model, torch.ones(3, 2))
    assert recording[""].note == notes.NOT_ASKED


def test_nothing_missing_nothing_said() -> None:
    model = nn.Linear(2, 1)
    with gradlib.record(model) as recording:
        with_gradient(model, torch.ones(3, 2))
    assert recording[""].note == ""


@pytest.mark.parametrize(
    ("model", "x"),
    [(Parts(), torch.ones(3, 2)), (nn.MaxPool1d(2, return_indices=True), None)],
)
def test_an_output_that_requires_no_grad(
    model: nn.Module, x: Tensor | None, tmp_path: Path
) -> None:
    if x is None:
        x = torch.ones(1, 1, 4, requires_grad=True)
    else:
        model.get_submodule("right").requires_grad_(requires_grad=False)
    with gradlib.record(model) as recording:
        model(x)[0].sum().backward()
    recording.save(tmp_path / "notes.safetensors")
    for it in recording, gradlib.load_recording(tmp_path / "notes.safetensors"):
        assert "output[1] does not require grad" in it[""].note
        assert "output[0]" not in it[""].note


class Result:
    """An object that the recorder does not open."""

    def __init__(self, y: Tensor) -> None:
        self.y = y


class Results(nn.Module):
    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = factor

    def forward(self, x: Any) -> Result:
        return Result(self.factor * (x.y if isinstance(x, Result) else x))


class Handing(nn.Module):
    def __init__(self, factor: float) -> None:
        super().__init__()
        self.first, self.second = Results(2.0), Results(factor)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.second(self.first(x)).y
        return y


def test_what_is_not_opened_is_said_everywhere(tmp_path: Path) -> None:
    def recorded(factor: float) -> gradlib.Recording:
        model = Handing(factor)
        with gradlib.record(model) as recording:
            model(torch.ones(3, 2, requires_grad=True)).sum().backward()
        return recording

    recording = recorded(3.0)
    recording.save(tmp_path / "notes.safetensors")
    output = notes.NOT_OPENED.format("output", "Result")
    for it in recording, gradlib.load_recording(tmp_path / "notes.safetensors"):
        assert it["first"].note == output
        # As the forward ends, it shows what has come of what was in it.
        grad = it["first"].grad_input[0].cpu()
        assert torch.equal(grad, torch.full((3, 2), 6.0, device="cpu"))
        given = notes.NOT_OPENED.format("args[0]", "Result")
        assert it["second"].note.startswith(f"{given}; {output}")
        compared = it.compare(recorded(3.0))
        assert any(output in reason for reason in compared.skipped)
    skipped = {it.name: it.reason for it in recording.verify().skipped}
    assert skipped["first"] == output
    # Nobody sees by what it multiplies, but in the output of the whole.
    compared = recording.compare(recorded(4.0))
    assert compared.first is not None
    assert compared.first.name == ""


def test_no_pass_reached_what_stands_beside_something_not_opened() -> None:
    class Beside(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(2, 2)

        def forward(self, x: Tensor) -> tuple[Tensor, Result]:
            return self.layer(x), Result(x * 2)

    x = torch.ones(1, 2, requires_grad=True)
    with gradlib.record(model := Beside()) as recording:
        model(x)
    closed = notes.NOT_OPENED.format("output[1]", "Result")
    assert recording[""].note == f"{notes.NOT_REACHED}; {closed}"
    with gradlib.record(model) as recording:
        model(x)[0].sum().backward()
    assert recording[""].note == closed


def test_these_are_all() -> None:
    texts = {text for name, text in vars(notes).items() if name.isupper()}
    assert texts == {text for text, _, _ in CASES} | {notes.NOT_ASKED}
