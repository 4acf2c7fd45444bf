"""All steps of cleaning up are taken, whatever one raises, or breaks off."""

import linecache
import pickle
import random
import sys
import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn

import gradlib
from gradlib.finishing import finish
from gradlib.random_state import random_state_kept

pytestmark = pytest.mark.cpu


def test_all_steps_are_taken_and_the_first_error_is_raised() -> None:
    taken: list[int] = []
    errors = {1: ValueError("first"), 3: TypeError("second")}

    def step(number: int) -> None:
        taken.append(number)
        if number in errors:
            raise errors[number]

    with pytest.raises(ValueError, match="first"):
        finish(lambda number=number: step(number) for number in range(5))
    assert taken == [0, 1, 2, 3, 4]


def test_what_an_interrupt_breaks_off_is_taken_again() -> None:
    taken: list[str] = []

    def broken_off() -> None:
        taken.append("begun")
        if taken.count("begun") == 1:
            raise KeyboardInterrupt
        taken.append("done")

    with pytest.raises(KeyboardInterrupt):
        finish([broken_off, lambda: taken.append("next")])
    assert taken == ["begun", "begun", "done", "next"]


@contextmanager
def interrupted_at(line: str) -> Generator[None]:
    """Interrupt once, before a line that begins so runs in the package."""

    def trace(frame: Any, event: str, _: object) -> Any:
        name = frame.f_code.co_filename
        if event == "line" and linecache.getline(name, frame.f_lineno).strip() == line:
            sys.settrace(before)
            raise KeyboardInterrupt
        return trace if "gradlib" in name else None

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        yield
    finally:
        sys.settrace(before)


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(2, 2), Counts(), nn.Linear(2, 2))


class Counts(nn.BatchNorm1d):
    """Counts its calls in an attribute that it makes."""

    def __init__(self) -> None:
        super().__init__(2)

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 (as torch names it)
        self.calls = vars(self).get("calls", 0) + 1
        return super().forward(input)


def recorded(model: nn.Module) -> gradlib.Recording:
    with gradlib.record(model) as recording:
        model(torch.randn(3, 2)).square().sum().backward()
    return recording


def state_of(model: nn.Module) -> list[Any]:
    return [
        (key, id(value), *map(id, value.values() if isinstance(value, dict) else ()))
        for module in model.modules()
        for key, value in vars(module).items()
    ]


@pytest.mark.parametrize(
    "line", ["now.update(state)", "now.pop(name, None)", "fill_slots(module, filled)"]
)
def test_an_interrupted_replay_leaves_the_model_as_it_was(line: str) -> None:
    model = net()
    recording = recorded(model)
    del model[1].calls
    before = state_of(model)
    with pytest.raises(KeyboardInterrupt), interrupted_at(line):
        recording.verify()
    assert state_of(model) == before
    history: Any = recording._block.history
    assert not history.is_set_back
    assert recording.verify().ok


def hooks_left(model: nn.Module) -> int:
    modules: list[Any] = [*model.modules()]
    on_modules = sum(len(it._forward_hooks) for it in modules)
    return on_modules + sum(bool(it._backward_hooks) for it in model.parameters())


@pytest.mark.parametrize(
    "line",
    [
        "known.pop(id(hook), None)",
        "stop_all(itertools.chain.from_iterable(hooks.values()))",
        "hook.remove()",
        "self.on_tensors.clear()",
        "_users.discard(user)",
        "if not any(hook_dicts(modules)):",
    ],
)
def test_an_interrupt_as_the_block_ends_leaves_no_hook(line: str) -> None:
    model = net()

    def block() -> None:
        block = gradlib.record(model)
        block.__enter__()
        model(torch.randn(3, 2)).square().sum().backward()
        with interrupted_at(line):
            block.__exit__(None, None, None)

    with pytest.raises(KeyboardInterrupt):
        block()
    assert hooks_left(model) == 0
    assert recorded(model).verify().ok
    assert hooks_left(model) == 0


def test_an_interrupt_between_two_steps_leaves_none_out() -> None:
    taken: list[int] = []
    steps = [lambda number=number: taken.append(number) for number in range(3)]
    with pytest.raises(KeyboardInterrupt), interrupted_at("waiting.popleft()"):
        finish(steps)
    assert taken == [0, 0, 1, 2]


@pytest.mark.parametrize(
    "line",
    [
        "self.hooks = weakref.ref(hooks)",
        "known.append(self)",
        "hooks[self] = self  # at last: an interrupt may come between",
        "self._look(moment)",
        "seen.change(field, found, since)",
    ],
)
def test_an_interrupt_as_something_is_hooked_or_kept_leaves_nothing(line: str) -> None:
    model, x = net(), torch.randn(3, 2)

    def block() -> None:
        with gradlib.record(model):
            model(x)

    with interrupted_at(line), suppress(KeyboardInterrupt):
        block()
    assert torch.is_grad_enabled()
    assert hooks_left(model) == 0
    model(x).sum().backward()
    assert recorded(model).verify().ok


def test_an_interrupt_leaves_no_generator_as_it_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    put_back, interrupted = random.setstate, list[int]()

    def once(state: Any) -> None:
        if not interrupted:
            interrupted.append(1)
            raise KeyboardInterrupt
        put_back(state)

    def draw() -> None:
        with random_state_kept():
            random.random()
            numpy.random.rand()

    states = random.getstate(), pickle.dumps(numpy.random.get_state(legacy=False))
    monkeypatch.setattr(random, "setstate", once)
    with pytest.raises(KeyboardInterrupt):
        draw()
    numpys = pickle.dumps(numpy.random.get_state(legacy=False))
    assert (random.getstate(), numpys) == states


@pytest.mark.parametrize("ask", ["verify", "replay"])
def test_threads_that_ask_at_once_leave_the_model_as_it_was(ask: str) -> None:
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(20)))
    with gradlib.record(model) as recording:
        model(torch.randn(2, 8)).sum().backward()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1)
    questions: dict[str, Callable[[], Any]] = {
        "verify": lambda: recording.verify().ok,
        "replay": lambda: [call.replay() for call in recording],
    }
    before, answers = state_of(model), list[Any]()
    threads = [
        threading.Thread(target=lambda: answers.append(questions[ask]()))
        for _ in range(3)
    ]
    for it in threads:
        it.start()
    for it in threads:
        it.join()
    assert len(answers) == len(threads)
    assert all(answers)
    assert state_of(model) == before
