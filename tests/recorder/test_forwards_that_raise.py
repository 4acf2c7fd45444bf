"""Forwards that raise or are interrupted get a note, and the others stay right."""

import contextlib

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

import gradlib

from .first_nets import Net, hooks_of


def test_a_forward_that_raises() -> None:
    net = Net()
    with gradlib.record(net) as recording:
        with pytest.raises(RuntimeError):
            net(torch.randn(4, 5))
        net(torch.randn(4, 3)).sum().backward()
    broken, fine = recording.calls("fc1")
    assert broken.note == "its forward raised RuntimeError"
    assert broken.output is None
    assert (broken.forward, fine.forward) == (0, 1)
    assert recording.calls("")[0].note == "its forward raised RuntimeError"
    assert fine.grad_output is not None


def test_a_module_that_returns_none_while_an_exception_is_handled() -> None:
    class Nothing(nn.Module):
        def forward(self, x: Tensor) -> None:
            pass

    with gradlib.record(model := Nothing()) as recording:
        try:
            raise ValueError
        except ValueError:
            model(torch.ones(1))
    assert recording[""].note == "it returned no tensor that requires grad"


def test_nothing_is_left_when_the_block_raises() -> None:
    net = Net()
    x = torch.randn(4, 3)
    recorded = gradlib.record(net)
    recording = recorded.__enter__()
    assert hooks_of(net)
    output = net(x)
    assert not recorded.__exit__(KeyError, KeyError(), None)
    assert hooks_of(net) == []
    output.sum().backward()  # outside the block, where nothing is recorded
    assert recording["fc3"].passes == ()


def test_a_pre_hook_that_raises() -> None:
    class Careful(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.part = nn.Linear(2, 2)

        def forward(self, x: Tensor) -> Tensor:
            try:
                return self.part(x)
            except ValueError:
                return 2 * x

    def refuse(_module: nn.Module, _args: object) -> None:
        raise ValueError

    model = Careful()
    model.part.register_forward_pre_hook(refuse)
    x = torch.ones(1, 2, requires_grad=True)
    with gradlib.record(model) as recording:
        model(x).sum().backward()
    assert recording["part"].note == "its forward raised ValueError"
    assert_close(recording[""].grad_input, (torch.full((1, 2), 2.0),))


def test_a_hook_that_ends_the_forward_early() -> None:
    class Enough(Exception):  # noqa: N818 # no error
        pass

    model = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 1))
    taken: list[Tensor] = []

    def stop(_module: nn.Module, _args: object, output: Tensor) -> None:
        taken.append(output)
        raise Enough

    model[1].register_forward_hook(stop)
    x = torch.randn(2, 3, requires_grad=True)
    with gradlib.record(model) as recording:
        with contextlib.suppress(Enough):
            model(x)
        taken[0].sum().backward()
    call = recording["1"]
    assert call.note == ""
    assert_close(call.output, taken[0].detach())
    assert_close(call.grad_output, (torch.ones(2, 3),))
    assert_close(recording["0"].grad_input, (x.grad,))
    assert recording[""].note == "its forward raised Enough"


def test_a_keyboard_interrupt_that_is_caught() -> None:
    class Slow(nn.Module):
        interrupt = True

        def __init__(self) -> None:
            super().__init__()
            self.part = nn.Linear(2, 2)

        def forward(self, x: Tensor) -> Tensor:
            y = self.part(x)
            if self.interrupt:
                raise KeyboardInterrupt
            return y

    with gradlib.record(model := Slow()) as recording:
        with pytest.raises(KeyboardInterrupt):
            model(torch.ones(1, 2))
        model.interrupt = False
        model(torch.ones(1, 2)).sum().backward()
    assert [call.forward for call in recording.calls("part")] == [0, 1]
    assert recording["", 0].note == "its forward was broken off"
    assert recording["", 1].grad_output is not None


class Interrupted(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        del x
        raise KeyboardInterrupt


def test_a_keyboard_interrupt_that_the_model_catches() -> None:
    class Patient(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.slow, self.fast = Interrupted(), nn.Linear(2, 2)

        def forward(self, x: Tensor) -> Tensor:
            y = self.fast(x)
            with contextlib.suppress(KeyboardInterrupt):
                y = self.slow(y)
            return y

    model, x = Patient(), torch.ones(1, 2, requires_grad=True)
    with gradlib.record(model) as recording:
        y = model(x)
        y.sum().backward()
    assert recording["slow"].note == "its forward was broken off"
    assert recording["slow"].grad_output is None
    assert recording[""].note == ""
    assert_close(recording[""].grad_output, (torch.ones(1, 2),))
    assert_close(recording[""].grad_input, (x.grad,))


def test_a_view_is_overwritten_after_a_keyboard_interrupt_that_the_model_catches() -> (
    None
):
    class Patient(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.slow, self.flat = Interrupted(), nn.Flatten(0)

        def forward(self, x: Tensor) -> Tensor:
            h = 2 * x
            early = 7 * h.sum()
            y = self.flat(h)
            for _ in range(2):
                with contextlib.suppress(KeyboardInterrupt):
                    self.slow(y)
            y.mul_(3)
            return early + y.sum()

    with gradlib.record(model := Patient()) as recording:
        model(torch.ones(1, 2, requires_grad=True)).backward()
    assert_close(recording["flat"].grad_output, (torch.full((2,), 3.0),))
