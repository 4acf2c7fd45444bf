"""The tensor that a loop carries to its next step is named, and the fix detaches it."""

from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch
from torch import Tensor, nn

import gradlib


def weights() -> Tensor:
    return torch.ones(3, requires_grad=True)


def a_hidden_state() -> None:
    cell, h = nn.GRUCell(2, 3), torch.zeros(1, 3)
    for _ in range(2):
        h = cell(torch.ones(1, 2), h)
        loss = h.sum()
        loss.backward()


def two_states() -> None:
    cell = nn.LSTMCell(2, 3)
    h = c = torch.zeros(1, 3)
    while True:
        h, c = cell(torch.ones(1, 2), (h, c))
        torch.autograd.grad((h * c).sum(), cell.weight_ih)


class State(NamedTuple):
    h: Tensor
    c: Tensor


def a_state_with_names() -> None:
    cell, state = nn.LSTMCell(2, 3), State(torch.zeros(1, 3), torch.zeros(1, 3))
    for _ in range(2):
        state = State(*cell(torch.ones(1, 2), tuple(state)))
        loss = state.h.sum()
        loss.backward()


def a_sum_of_losses() -> None:
    w, total = weights(), torch.zeros(())
    for step in range(2):
        loss = (w**2).sum()
        if step < 2:
            total += loss

        total.backward()


def a_state_of_the_outer_loop() -> None:
    w, h = weights(), torch.ones(3)
    for _ in range(2):
        h = w * h
        for scale in (1, 2):
            loss = (scale * h**2).sum()
            torch.autograd.grad(
                loss, w, retain_graph=scale == 1
            )  # fmt: skip


def a_state_beside_the_output() -> None:
    """The output for the loss and the state are two outputs of one layer."""
    net, state = nn.GRU(2, 3), torch.zeros(1, 1, 3)
    for _ in range(2):
        y, state = net(torch.ones(4, 1, 2), state)
        loss = y.sum()
        loss.backward()


def a_state_in_a_tuple() -> None:
    net, state = nn.LSTM(2, 3), None
    for _ in range(2):
        y, state = net(torch.ones(4, 1, 2), state)
        loss = y.sum()
        loss.backward()


def a_state_in_a_dict() -> None:
    cell, state = nn.LSTMCell(2, 3), {"h": torch.zeros(1, 3), "c": torch.zeros(1, 3)}
    for _ in range(2):
        h, c = cell(torch.ones(1, 2), (state["h"], state["c"]))
        state = {"h": h, "c": c}
        loss = h.sum()
        loss.backward()


def an_entry_of_a_dict() -> None:
    cell, state = nn.GRUCell(2, 3), {"h": torch.zeros(1, 3), "step": 0}
    for _ in range(2):
        state["h"] = cell(torch.ones(1, 2), state["h"])
        loss = state["h"].sum()
        loss.backward()


def a_state_for_each_layer() -> None:
    cells = [nn.GRUCell(3, 3), nn.GRUCell(3, 3)]
    states = [torch.zeros(1, 3) for _ in cells]
    for _ in range(2):
        x = torch.ones(1, 3)
        for i, cell in enumerate(cells):
            states[i] = x = cell(x, states[i])
        loss = x.sum()
        loss.backward()


def a_state_that_is_moved_about() -> None:
    net, state = nn.RNN(2, 4), torch.zeros(1, 1, 4)
    for _ in range(2):
        y, new = net(torch.ones(4, 1, 2), state)
        state = torch.cat(new.unsqueeze(0).squeeze((0,)).split([1, 3], -1), -1)
        loss = y.sum()
        loss.backward()


class Cell(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.GRUCell(2, 2)
        self.h = torch.zeros(1, 2)

    def forward(self, x: Tensor) -> Tensor:
        self.h = self.cell(x, self.h)
        return self.h


class Buffered(Cell):
    def __init__(self) -> None:
        super().__init__()
        del self.h
        self.register_buffer("h", torch.zeros(1, 2))


class Pair(nn.Module):
    state: tuple[Tensor, Tensor] | None = None

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.LSTM(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        y, self.state = self.net(x, self.state)
        return y


def a_state_that_is_added() -> None:
    w, h = weights(), torch.ones(3)
    for _ in range(2):
        new = torch.zeros(3)
        new += w * h
        h = new.exp()
        loss = h.sum()
        loss.backward()


def states_of_modules(count: int = 2) -> None:
    net = nn.Sequential(Cell(), nn.Linear(2, 2), Buffered(), Cell())
    for _ in range(count):
        loss = net(torch.ones(1, 2)).sum()
        loss.backward()


class Trainer:
    def __init__(self) -> None:
        self.net = Pair()

    def step(self) -> None:
        loss = self.net(torch.ones(4, 1, 2)).sum()
        loss.backward()


def a_state_of_a_module_in_an_attribute() -> None:
    trainer = Trainer()
    for _ in range(2):
        trainer.step()


class Totalling:
    def __init__(self) -> None:
        self.w, self.total = weights(), torch.zeros(())

    def step(self) -> None:
        self.total += (self.w**2).sum()
        self.total.backward()


def a_sum_in_an_attribute() -> None:
    totalling = Totalling()
    for _ in range(2):
        totalling.step()


CARRIED: dict[Callable[[], None], list[str]] = {
    a_hidden_state: ["h = h.detach()", "loss = f(x, h)", "loss.backward()"],
    two_states: ["h = h.detach()", "c = c.detach()", "y = f(cell.weight_ih, h, c)"],
    a_sum_of_losses: ["total = total.detach()", "total = f(x, total)"],
    a_state_beside_the_output: ["state = state.detach()", "loss = f(x, state)"],
    a_state_in_a_tuple: [
        "state = tuple(it.detach() for it in state)",
        "loss = f(x, state)",
    ],
    a_state_with_names: [
        "state = state._make(it.detach() for it in state)",
        "loss = f(x, state)",
    ],
    a_state_in_a_dict: [
        "state = {key: it.detach() for key, it in state.items()}",
        "loss = f(x, state)",
    ],
    an_entry_of_a_dict: ['state["h"] = state["h"].detach()', "loss = f(x)"],
    a_state_for_each_layer: [
        "states = [it.detach() for it in states]",
        "loss = f(x, states)",
    ],
    a_state_that_is_moved_about: ["state = state.detach()", "loss = f(x, state)"],
    a_state_of_the_outer_loop: ["h = h.detach()", "loss = f(w, h)"],
    a_state_that_is_added: ["h = h.detach()", "loss = f(x, h)"],
    states_of_modules: [
        "net[0].h = net[0].h.detach()",
        "net[2].h = net[2].h.detach()",
        "net[3].h = net[3].h.detach()",
        "loss = f(x)",
        "loss.backward()",
    ],
    a_state_of_a_module_in_an_attribute: [
        "self.net.state = tuple(it.detach() for it in self.net.state)",
        "loss = f(x)",
    ],
    a_sum_in_an_attribute: ["self.total = self.total.detach()", "y = f(x)"],
}


def code_of(program: Callable[[], None]) -> list[str]:
    with pytest.raises(RuntimeError) as caught, gradlib.explain_errors():
        program()
    (note,) = caught.value.__notes__
    assert note.startswith("\n[GL111]")
    return [line[4:] for line in note.splitlines() if line.startswith("    ")]


@pytest.mark.parametrize("program", CARRIED)
def test_it_is_detached(program: Callable[[], None]) -> None:
    said = [line.partition("  #")[0] for line in code_of(program)]
    assert said[: len(CARRIED[program])] == CARRIED[program]
    assert "retain_graph" not in said[0]


def no_loop() -> None:
    y = (weights() ** 2).sum()
    y.backward()
    y.backward()


def nothing_carried() -> None:
    y = (weights() ** 2).sum()
    for _ in range(2):
        y.backward()


def another_loop() -> None:
    w, h = weights(), torch.ones(3)
    for _ in range(2):
        h = w * h

    def twice(y: Tensor) -> None:
        for _ in range(2):
            y.backward()

    twice((h**2).sum())


def a_loop_that_is_over() -> None:
    w, h = weights(), torch.ones(3)
    for _ in range(2):
        h = w * h
    for loss in [(h**2).sum()] * 2:
        loss.backward()


def a_name_set_twice_in_a_step() -> None:
    base = weights().exp()
    for step in range(1, 3):
        y = base * step
        y = y.sum()
        y.backward()


def a_mean_of_what_was_computed_before() -> None:
    base, running = weights().exp(), torch.zeros(())
    for step in range(1, 3):
        loss = (base * step).sum()
        running = 0.9 * running + 0.1 * loss
        loss.backward()


def the_best_so_far() -> None:
    base, best = weights().exp(), torch.full((), torch.inf)
    for step in range(1, 3):
        loss = (base * step).sum()
        if loss < best:
            best = loss
        loss.backward()


class Looked(Cell):
    def forward(self, x: Tensor) -> Tensor:
        self.h = self.cell(x)
        return self.h


class Cut(Cell):
    def forward(self, x: Tensor) -> Tensor:
        self.h = self.cell(x, self.h.detach())
        return self.h


def no_state_of(net: Cell) -> None:
    def once(y: Tensor) -> None:
        assert net
        y.backward()

    y = net(torch.ones(1, 2)).sum()
    once(y)
    once(y)


def kept_for_a_look() -> None:
    no_state_of(Looked())


def detached_where_it_is_read() -> None:
    no_state_of(Cut())


@pytest.mark.parametrize(
    "program",
    [
        kept_for_a_look,
        detached_where_it_is_read,
        no_loop,
        nothing_carried,
        another_loop,
        a_loop_that_is_over,
        a_name_set_twice_in_a_step,
        a_mean_of_what_was_computed_before,
        the_best_so_far,
    ],
)
def test_elsewhere_the_earlier_pass_retains_the_graph(
    program: Callable[[], None],
) -> None:
    said = code_of(program)
    assert said[1].endswith("backward(retain_graph=True)  # the earlier pass")
    assert not any("detach" in line for line in said)


def test_without_a_source_nothing_is_named() -> None:
    program = "for _ in range(2):\n    h = w * h\n    (h**2).sum().backward()"
    with pytest.raises(RuntimeError) as caught, gradlib.explain_errors():
        exec(program, {"w": weights(), "h": torch.ones(3)})
    assert "detach()  #" not in caught.value.__notes__[0]
