"""A call that cannot be replayed raises an error that says why, and nothing changes."""

import random
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import gradlib

from .replayed import everything, loss_of, replays


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"reduce": gradlib.tensor_stats}, "Replay where you record, without reduce="),
        ({"keep": ["grad_output", "output"]}, 'A replay needs "args"'),
        ({"keep": ["args", "grad_input"]}, 'A replay needs "grad_output"'),
    ],
)
def test_what_a_replay_needs(options: dict[str, Any], message: str) -> None:
    recording = replays(nn.Linear(2, 2), torch.ones(1, 2), **options)
    with pytest.raises(gradlib.CannotReplayError) as caught:
        recording[""].replay()
    assert message in str(caught.value)
    assert caught.value.code == "GL207"
    assert isinstance(caught.value, RuntimeError)


def test_a_loaded_recording(tmp_path: Any) -> None:
    recording = replays(nn.Linear(2, 2), torch.ones(1, 2))
    recording.save(tmp_path / "run")
    loaded = gradlib.load_recording(tmp_path / "run")
    with pytest.raises(gradlib.CannotReplayError, match="loaded from a file"):
        loaded[""].replay()


def test_without_a_backward_pass() -> None:
    model = nn.Linear(2, 2)
    with gradlib.record(model) as recording:
        model(torch.ones(1, 2))
        with torch.no_grad():
            model(torch.ones(1, 2))
    for call, why in zip(recording, ("no backward pass", "disabled"), strict=True):
        with pytest.raises(gradlib.CannotReplayError, match=why):
            call.replay()


def test_a_module_that_does_not_repeat() -> None:
    class Drifts(nn.Module):
        factors = iter(range(1, 9))

        def forward(self, x: Tensor) -> Tensor:
            return x * next(self.factors)

    recording = replays(Drifts(), torch.ones(1, 2, requires_grad=True))
    with pytest.raises(gradlib.CannotReplayError, match="does not repeat"):
        recording[""].replay()


class Cache:
    """An object that the recorder does not open, and that the call changes."""

    keys: Tensor | None = None


class Remembers(nn.Module):
    def forward(self, x: Tensor, *, state: dict[str, Any]) -> Tensor:
        cache = state["cache"]
        cache.keys = x if cache.keys is None else torch.cat([cache.keys, x])
        return cache.keys.softmax(0)[-len(x) :] * x


def test_an_argument_that_may_change_is_never_given_again() -> None:
    model, cache = Remembers(), Cache()
    x = torch.randn(2, 3, requires_grad=True)
    with gradlib.record(model) as recording:
        model(x, state={"cache": cache}).sum().backward()
    with pytest.raises(gradlib.CannotReplayError) as caught:
        recording[""].replay()
    assert "kwargs['state']['cache'] is of type Cache" in str(caught.value)
    found = recording.verify(numerical=True)
    assert found.disagreements == ()
    assert found.skipped[0].reason == caught.value.args[0]
    assert cache.keys is x


def test_a_generator_is_not_drawn_from() -> None:
    class Noisy(nn.Module):
        def forward(self, x: Tensor, generator: torch.Generator) -> Tensor:
            made = torch.rand(x.shape, generator=generator, device="cpu")
            return x * made.to(x)

    generator = torch.Generator().manual_seed(0)
    model = Noisy()
    with gradlib.record(model) as recording:
        model(torch.ones(2, requires_grad=True), generator).sum().backward()
    before = generator.get_state()
    with pytest.raises(gradlib.CannotReplayError, match=r"args\[1\] is of type Gen"):
        recording[""].replay()
    assert torch.equal(generator.get_state(), before)


def test_plain_values_and_arrays_are_given_again() -> None:
    given: list[Any] = []

    class Many(nn.Module):
        def forward(self, x: Tensor, shift: Any, *_rest: Any, act: Any) -> Tensor:
            given.append(shift)
            return act(x * torch.from_numpy(shift).to(x))

    array = np.ones(2, dtype=np.float32)
    rest = (torch.float32, torch.device("cpu"), x_size := torch.ones(2).shape, "a", int)
    assert isinstance(x_size, torch.Size)
    model, x = Many(), torch.ones(2, requires_grad=True)
    with gradlib.record(model) as recording:
        model(x, array, *rest, act=F.relu).sum().backward()
    recording[""].replay()
    given[-1][:] = 0
    assert recording[""].args[1].tolist() == array.tolist() == [1, 1]


def test_one_of_two_outputs_that_does_not_repeat() -> None:
    class Drifts(nn.Module):
        factors = iter(range(1, 9))

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return 2 * x, x * next(self.factors)

    model = Drifts()
    with gradlib.record(model) as recording:
        model(torch.ones(1, 2, requires_grad=True))[0].sum().backward()
    with pytest.raises(gradlib.CannotReplayError, match="does not repeat"):
        recording[""].replay()


def test_an_output_of_another_form() -> None:
    class Shrinks(nn.Module):
        sizes = iter((3, 2))

        def forward(self, x: Tensor) -> Tensor:
            return x[: next(self.sizes)]

    recording = replays(Shrinks(), torch.ones(4, requires_grad=True))
    with pytest.raises(gradlib.CannotReplayError, match="does not repeat"):
        recording[""].replay()


@pytest.mark.parametrize("when", ["forward", "backward"])
def test_an_exception_leaves_everything_as_it_was(when: str) -> None:
    class Breaks(torch.autograd.Function):
        broken = False

        @staticmethod
        def forward(_ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, *grads: Tensor) -> Tensor:
            assert ctx.needs_input_grad[0]
            if Breaks.broken and when == "backward":
                raise KeyError("broken")
            return grads[0]

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(3)

        def forward(self, x: Tensor) -> Tensor:
            x = F.dropout(self.norm(x), 0.5)
            self.last = x
            if Breaks.broken and when == "forward":
                random.random()
                np.random.rand()
                raise KeyError("broken")
            return Breaks.apply(x)

    model = Model()
    with gradlib.record(model) as recording:
        loss_of(model(torch.randn(4, 3, requires_grad=True))).backward()
    Breaks.broken = True
    before = everything(model)
    with (
        torch.no_grad(),
        torch.autocast(torch.get_default_device().type, torch.bfloat16),
        pytest.raises(
            gradlib.CannotReplayError, match="again raised KeyError"
        ) as caught,
    ):
        recording[""].replay()
    assert isinstance(caught.value.__cause__, KeyError)
    after = everything(model)
    assert str(before) == str(after)


@pytest.mark.filterwarnings("ignore:.torch.jit.")
def test_a_script_module() -> None:
    scripted: Any = torch.jit.trace(nn.Tanh(), torch.ones(1))
    model = nn.Sequential(nn.Linear(2, 2), scripted)
    recording = replays(model, torch.ones(1, 2))
    with pytest.raises(gradlib.CannotReplayError, match="contains a ScriptModule"):
        recording[""].replay()


def test_an_iterator_that_has_ended_does_not_end_the_verification() -> None:
    class Draws(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.numbers = iter([1.0, 2.0])

        def forward(self, x: Tensor) -> Tensor:
            return x * next(self.numbers)

    model = nn.Sequential(nn.Linear(2, 2), Draws())
    with gradlib.record(model) as recording:
        for _ in range(2):
            model(torch.ones(1, 2)).sum().backward()
    found = recording.verify()
    assert found.agreed == 2
    assert {it.reason for it in found.skipped} == {
        "Computing it again raised StopIteration"
    }
    with pytest.raises(gradlib.CannotReplayError, match="again raised StopIteration"):
        recording["1", 0].replay()


def test_inside_a_transform() -> None:
    recording = replays(nn.Linear(2, 2), torch.ones(1, 2))

    def ask(x: Tensor) -> Tensor:
        with pytest.raises(gradlib.CannotReplayError, match=r"inside of torch\.func"):
            recording[""].replay()
        assert "inside of torch.func" in recording.verify().skipped[0].reason
        return x.sum()

    torch.func.grad(ask)(torch.ones(2))
    assert recording.verify().ok
