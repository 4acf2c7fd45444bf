"""Modules that carry a state from call to call are checked with what came through it.

The gradient of a call has a part that comes back from later calls through the state,
and through no output.
"""

from collections.abc import Callable, Iterable
from typing import Any, Final, NamedTuple

import pytest
import torch
from torch import Tensor, nn

import gradlib

SIZE: Final = 3


class Both(NamedTuple):
    """The hidden state and the one that it is read from, as of an LSTM."""

    hidden: Tensor
    cell: Tensor


class Cell(nn.Module):
    """A recurrent cell that keeps its state, and returns something made from it."""

    state: Any
    before: Tensor

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.forward_weight = nn.Parameter(torch.randn(SIZE, SIZE))
        self.back_weight = nn.Parameter(torch.randn(SIZE, SIZE))
        zeros = torch.zeros(2, SIZE)
        if kind == "buffer":
            self.register_buffer("state", zeros)
        else:
            self.state = {
                "list": [zeros, zeros],
                "twice": [zeros, zeros],
                "growing": [zeros],
                "learned": [nn.Parameter(torch.ones(2, SIZE)), zeros],
                "dict": {"state": zeros},
                "named tuple": Both(zeros, zeros),
                "of torch.max": torch.stack([zeros, zeros]).max(0),
            }.get(kind, zeros)
        self.before = zeros

    def get(self) -> Tensor:
        match self.kind:
            case "list" | "twice":
                return self.state[0] * self.state[1].cos()
            case "growing":
                return self.state[-1]
            case "learned":
                return self.state[0] + self.state[1]
            case "dict":
                return self.state["state"]
            case "named tuple":
                return self.state.hidden * self.state.cell.cos()
            case "of torch.max":
                return self.state.values
            case "two calls later":
                return self.before
            case _:
                return self.state

    def put(self, state: Tensor) -> None:
        match self.kind:
            case "list":
                self.state = [state, state.sin()]
            case "twice":
                self.state = [state, state]
            case "growing":
                self.state.append(state)
            case "learned":
                self.state[1] = state
            case "dict":
                self.state = {"state": state}
            case "named tuple":
                self.state = Both(state, state.sin())
            case "of torch.max":
                self.state = torch.stack([state, 2 * state]).max(0)
            case _:
                self.before, self.state = self.state, state

    def forward(self, x: Tensor) -> Tensor:
        if self.kind == "in place":
            self.state = self.state * 1 if self.state.grad_fn is None else self.state
            y = self.state.mul_(0.5).add_(x @ self.forward_weight).tanh()
            return y * self.back_weight[0]
        state = (x @ self.forward_weight + self.get() @ self.back_weight).tanh()
        y = state.sin()
        # The state may be made from what is returned, as where a spike resets it.
        self.put(state - y / 2 if self.kind == "reset" else state)
        return state if self.kind == "returned" else y


KINDS = (
    *("attribute", "buffer", "list", "growing", "learned", "dict", "two calls later"),
    *("in place", "reset", "returned", "named tuple", "of torch.max", "twice"),
)


class Loops(nn.Module):
    """Calls a cell several times in each forward."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.first, self.cell = nn.Linear(SIZE, SIZE), Cell(kind)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(2):
            x = x + self.cell(self.first(x))
        return x


def loops(kind: str) -> nn.Module:
    return Loops(kind)


def one_of_several(kind: str) -> nn.Module:
    return nn.Sequential(nn.Linear(SIZE, SIZE), Cell(kind), nn.Linear(SIZE, 1))


def inputs() -> list[Tensor]:
    return [torch.randn(2, SIZE, requires_grad=True) for _ in range(3)]


def recorded(model: Any, **options: Any) -> gradlib.Recording:
    """Record several calls of a model, and one pass that goes through all of them."""
    with gradlib.record(model, **options) as recording:
        torch.stack([model(x).square().sum() for x in inputs()]).sum().backward()
    return recording


def assert_all_agree(recording: gradlib.Recording) -> None:
    for numerical in (False, True):
        verified = recording.verify(numerical=numerical)
        assert verified.agreed == verified.calls, str(verified)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("make", [loops, one_of_several])
def test_right_ones_agree(make: Callable[[str], nn.Module], kind: str) -> None:
    torch.manual_seed(0)
    assert_all_agree(recorded(make(kind)))


@pytest.mark.parametrize("modules", [[""], ["cell"]])
def test_right_ones_agree_where_some_modules_are_left_out(modules: list[str]) -> None:
    torch.manual_seed(0)
    assert_all_agree(recorded(Loops("reset"), modules=modules))


def test_shares_of_replayed_calls_add_up_to_the_gradient() -> None:
    torch.manual_seed(0)
    model = Loops("reset")
    recording = recorded(model)
    calls = recording.calls("cell")
    shares = [call.replay().param_grads["back_weight"] for call in calls]
    torch.testing.assert_close(sum(shares), model.cell.back_weight.grad)


@pytest.mark.parametrize("modules", [None, ["1"]])
def test_a_call_whose_state_alone_is_used_agrees(modules: list[str] | None) -> None:
    torch.manual_seed(0)
    model = one_of_several("attribute")
    with gradlib.record(model, modules=modules) as recording:
        [*map(model, inputs())][-1].sum().backward()
    verified = recording.verify()
    assert verified.ok
    assert "1" not in {it.name for it in verified.skipped}


def test_each_of_several_passes_agrees() -> None:
    torch.manual_seed(0)
    model = Loops("reset")
    with gradlib.record(model) as recording:
        outputs = [model(x).sum() for x in inputs()]
        for output in outputs:
            output.backward(retain_graph=True)
    assert_all_agree(recording)


def test_passes_inside_of_a_forward_agree() -> None:
    class Trains(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model: Any = one_of_several("attribute")

        def forward(self, *xs: Tensor) -> None:
            for some in (xs[:2], xs[1:]):
                torch.stack([self.model(x).sum() for x in some]).sum().backward()
                self.model[1].state = self.model[1].state.detach()

    torch.manual_seed(0)
    model = Trains()
    with gradlib.record(model) as recording:
        model(*inputs())
    verified = recording.verify()
    assert not verified.disagreements
    assert {it.name for it in verified.skipped} == {""}


class GivenState(nn.Module):
    """Keeps its state in a container that it is given."""

    def forward(self, x: Tensor, states: dict[str, Tensor]) -> Tensor:
        states["last"] = x.sin() * states["last"]
        return states["last"].square()


class Around(nn.Module):
    """Gives the container on to a module inside."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = GivenState()

    def forward(self, x: Tensor, states: dict[str, Tensor]) -> Tensor:
        return self.inner(x.cos(), states).sin()


@pytest.mark.parametrize("make", [GivenState, Around])
def test_a_state_in_a_dict_that_is_given(make: type[nn.Module]) -> None:
    model, states = make(), {"last": torch.ones(2, SIZE)}
    with gradlib.record(model) as recording:
        torch.stack([model(x, states).sum() for x in inputs()]).sum().backward()
    assert_all_agree(recording)


def test_a_state_that_is_taken_away_is_said_not_to_be_checked() -> None:
    class Resets(Loops):
        def forward(self, x: Tensor) -> Tensor:
            y = super().forward(x)
            taken.append(self.cell.state)
            self.cell.state = torch.zeros(2, SIZE)
            return y

    taken: list[Tensor] = []
    torch.manual_seed(0)
    model = Resets("attribute")
    with gradlib.record(model) as recording:
        (model(inputs()[0]).sum() + taken[0].square().sum()).backward()
    verified = recording.verify()
    assert not verified.disagreements
    (skipped,) = verified.skipped
    said = "gradients also came by attribute cell.state, and a replay lacks them"
    assert (skipped.name, skipped.reason) == ("", said)


class SetsInside(nn.Module):
    """Keeps its state on the cell that it calls."""

    def __init__(self, end: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.cell: Any = nn.LSTMCell(SIZE, SIZE)
        self.cell.states = torch.zeros(2, SIZE), torch.zeros(2, SIZE)
        self.end = end

    def forward(self, x: Tensor) -> Tensor:
        hidden, cell = self.cell(x, self.cell.states)
        self.cell.states = hidden.sin(), cell.tanh()
        return self.end(hidden)


def test_a_state_left_in_a_module_inside_is_said_not_to_be_checked() -> None:
    torch.manual_seed(0)
    recording = recorded(nn.Sequential(SetsInside(torch.cos)))
    said = "gradients may have come by attribute cell.states too, and a replay lacks"
    for numerical in (False, True):
        verified = recording.verify(numerical=numerical)
        assert not verified.disagreements, str(verified)
        assert {it.reason for it in verified.skipped if it.name == "0"} == {
            f"{said} them"
        }


def test_a_wrong_one_that_leaves_a_state_inside_is_named() -> None:
    torch.manual_seed(0)
    recording = recorded(SetsInside(lambda h: Twice.apply(h, True)))
    found = recording.verify(numerical=True).disagreements
    assert ("", 0) in named(found), str(found)


class Twice(torch.autograd.Function):
    """Has a backward that is wrong, or does not repeat."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, _repeats: bool) -> Tensor:
        ctx.repeats = _repeats
        return 2 * x

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        factor = 3 if ctx.repeats else torch.rand(())
        return grads[0] * factor, None


class Wrong(Cell):
    """Has a wrong backward, of its state alone or of what it returns."""

    def __init__(self, where: str, repeats: bool) -> None:
        super().__init__("attribute")
        self.where, self.repeats = where, repeats

    def forward(self, x: Tensor) -> Tensor:
        if self.where == "before both":
            return super().forward(Twice.apply(x, self.repeats))
        y = super().forward(x)
        if self.where == "state":
            self.state = Twice.apply(self.state, self.repeats)
            return y
        return Twice.apply(y, self.repeats)


@pytest.mark.parametrize("repeats", [True, False])
@pytest.mark.parametrize("where", ["before both", "state", "output"])
def test_wrong_ones_are_named(where: str, repeats: bool) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(SIZE, SIZE), Wrong(where, repeats))
    recording = recorded(model)
    found = recording.verify(numerical=repeats).disagreements
    assert named(found) == {("1", i) for i in range(3 if where != "state" else 2)}
    reasons = {it.reason.split(":")[0] for it in found}
    said = "finite differences disagree" if repeats else "its backward does not repeat"
    assert reasons == {said}
    assert recording.verify().ok is repeats


def named(found: Iterable[Any]) -> set[tuple[str, int]]:
    return {(it.name, it.index) for it in found}
