"""What threads share in a recorder: numbers that no two of them get."""

import sys
import threading
from collections import Counter
from collections.abc import Generator
from concurrent.futures import ThreadPoolExecutor
from types import ModuleType
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

import gradlib
from gradlib.recording.history import History

THREADS, STEPS = 2, 50


@pytest.fixture
def _hasty() -> Generator[None]:
    """Have threads take turns as often as they can."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


@pytest.mark.cpu
@pytest.mark.usefixtures("_hasty")
def test_two_threads_number_what_they_record() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Sequential(nn.Tanh(), nn.Linear(3, 1)))
    parameters = dict(model.named_parameters())
    inputs = torch.randn(THREADS, STEPS, 2, 3).requires_grad_()
    start = threading.Barrier(THREADS)
    given: dict[int, tuple[Tensor, ...]] = {}

    def train(thread: int) -> None:
        start.wait(10)
        for step in range(STEPS):
            x = inputs[thread, step]
            loss = model(x).square().sum()
            given[thread * STEPS + step] = torch.autograd.grad(
                loss, [x, *parameters.values()]
            )

    with ThreadPoolExecutor(THREADS) as pool, gradlib.record(model) as recording:
        list(pool.map(train, range(THREADS)))

    outermost = recording.calls("")
    every = range(THREADS * STEPS)
    assert sorted(call.forward for call in outermost) == [*every]
    assert sorted(call.passes[0].backward for call in outermost) == [*every]
    for name, _ in model.named_modules():
        assert sorted(call.index for call in recording.calls(name)) == [*every]
    moments = [call._trace.moment for call in recording]
    assert len(set(moments)) == len(moments) == 5 * len(every)

    # All calls of a forward are of one thread, and have its values and its pass.
    by_forward = Counter(call.forward for call in recording)
    assert set(by_forward.values()) == {5}
    for part in recording.forwards:
        (place,) = (
            i
            for i, x in enumerate(inputs.detach().flatten(0, 1))
            if torch.equal(part[""].args[0], x)
        )
        grads = dict(zip(["input", *parameters], given[place], strict=True))
        assert_close(part[""].grad_input, (grads["input"],))
        assert len({call.passes[0].backward for call in part}) == 1
        for name, module in model.named_modules():
            for key, _ in module.named_parameters(recurse=False):
                assert_close(part[name].param_grads[key], grads[f"{name}.{key}"])
        callers = {call._trace.moment: call for call in part}
        around = {it.name: callers.get(it._trace.caller) for it in part}
        names = {name: call and call.name for name, call in around.items()}
        assert names == {"": None, "0": "", "1": "", "1.0": "1", "1.1": "1"}


@pytest.mark.parametrize("name", ["torch._dynamo", "torch.distributed.fsdp"])
def test_what_another_thread_has_begun_to_import(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is among the modules, and has nothing yet."""
    monkeypatch.setitem(sys.modules, name, ModuleType(name))
    model = nn.Linear(3, 2)
    with gradlib.record(model) as recording:
        model(torch.ones(4, 3)).sum().backward()
    assert len(recording[""].passes) == 1


def test_what_one_thread_meets_is_not_taken_for_what_another_did(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One begins its call first, and would look at the weights last."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
    x = torch.randn(2, 4).requires_grad_()
    has_begun, has_looked = threading.Event(), threading.Event()
    look: Any = History.look

    def slow_look(history: History, moment: int) -> None:
        if threading.current_thread().name == "first":
            has_begun.set()
            has_looked.wait(0.2)
        look(history, moment)
        if threading.current_thread().name == "second":
            has_looked.set()

    found = dict[str, Tensor]()

    def call(name: str) -> None:
        found[name] = model(x)

    keep = ["args", "grad_input", "grad_output", "param_grads"]  # not what it returns
    with gradlib.record(model, keep=keep) as recording:
        model(x).sum().backward()
        with torch.no_grad():
            cast(nn.Linear, model[0]).weight.mul_(3)
        monkeypatch.setattr(History, "look", slow_look)
        first, second = (
            threading.Thread(target=call, args=(name,), name=name)
            for name in ("first", "second")
        )
        first.start()
        has_begun.wait(10)
        second.start()
        first.join()
        second.join()
        (found["first"].sum() + found["second"].sum()).backward()
    monkeypatch.undo()
    for call_of_all in recording.calls(""):
        replayed = call_of_all.replay().grad_input
        assert_close(replayed, call_of_all.grad_input)


def test_another_thread_sees_no_half_of_a_module(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    history, module = History([model := nn.BatchNorm1d(3)]), model
    look: Any = History._look_at_tensors

    def look_twice(*args: Any) -> None:
        monkeypatch.undo()
        history.look(2)  # as a forward of another thread, which begins meanwhile
        look(*args)

    monkeypatch.setattr(History, "_look_at_tensors", look_twice)
    history.look(1)
    for moment in (1, 2):
        assert history.at(module, moment).keys() == {
            name for name, _ in (*model.named_parameters(), *model.named_buffers())
        }
