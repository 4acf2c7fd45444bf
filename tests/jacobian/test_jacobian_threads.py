"""Other threads run modules while a Jacobian is checked."""

import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn

import gradlib
from gradlib.private.compiling import run_eagerly


def beside(work: Callable[[], object], run: Callable[[], object]) -> None:
    """Run one thing while another thread does some work again and again."""
    stop = threading.Event()

    def work_on() -> None:
        while not stop.is_set():
            work()

    thread = threading.Thread(target=work_on)
    thread.start()
    try:
        run()
    finally:
        stop.set()
        thread.join()


class Norm(nn.LayerNorm):
    """A subclass may do anything, so its Jacobian is not known."""


def normed() -> nn.Module:
    """Return a net that is called again to check its Jacobian."""
    return nn.Sequential(nn.Linear(4, 16), Norm(16), nn.Linear(16, 5)).eval()


def test_modules_of_another_thread_keep_their_weights() -> None:
    model, other = normed(), nn.Sequential(nn.Linear(5, 9), nn.ReLU(), nn.Linear(9, 1))
    before, dtypes = dict(other.named_parameters()), set[torch.dtype]()
    x = torch.randn(6, 4)

    def run() -> None:
        for _ in range(40):
            gradlib.per_sample_jacobian(model, x)

    given = torch.randn(8, 5)  # not there: a default device is a thread's own
    # In another dtype the call raises, and the thread ends, which pytest reports.
    beside(lambda: dtypes.add(other(given).dtype), run)
    assert dtypes == {torch.float32}
    after = dict(other.named_parameters())
    assert all(after[name] is parameter for name, parameter in before.items())


class Centred(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x - x.mean(0)


def test_what_couples_samples_is_not_looked_for_in_another_thread() -> None:
    model, x = nn.Sequential(nn.Linear(4, 4), Centred()), torch.randn(6, 4)

    def run() -> None:
        for _ in range(20):
            with pytest.raises(gradlib.CoupledSamplesError, match='"1", a Centred'):
                gradlib.per_sample_jacobian(model, x)

    other = nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 4))
    beside(lambda: other(x), run)


def test_two_threads_that_check_one_model_leave_it_as_it_was() -> None:
    model, x = normed(), torch.randn(6, 4)
    before = dict(model.named_parameters())

    def run() -> None:
        for _ in range(30):
            with suppress(Exception):  # the one may meet what the other has put in
                gradlib.per_sample_jacobian(model, x)

    threads = [threading.Thread(target=run) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    after = dict(model.named_parameters())
    assert all(after[name] is parameter for name, parameter in before.items())


def test_two_threads_that_run_eagerly_leave_torch_compile_as_it_was() -> None:
    compiled = torch.compile(lambda x: x + 1, backend=_counting)
    inside, may_leave = threading.Event(), threading.Event()

    def run() -> None:
        with run_eagerly():
            inside.set()
            may_leave.wait(timeout=10)

    thread = threading.Thread(target=run)
    with run_eagerly():  # the one that begins first ends first
        thread.start()
        inside.wait(timeout=10)
    may_leave.set()
    thread.join()
    before = len(_graphs)
    assert compiled(torch.ones(2)).sum() == 4
    assert len(_graphs) == before + 1


_graphs: list[object] = []


def _counting(graph: Any, _inputs: object) -> Any:
    _graphs.append(graph)
    return graph


def test_another_thread_keeps_its_default_dtype() -> None:
    model, x, seen = normed(), torch.randn(6, 4), set[torch.dtype]()
    with gradlib.record(model) as recording:
        model(x).sum().backward()

    def run() -> None:
        for _ in range(20):
            gradlib.per_sample_jacobian(model, x)
        recording.verify(numerical=True)

    beside(lambda: seen.add(torch.zeros(1).dtype), run)
    assert seen == {torch.float32}


@pytest.mark.parametrize(
    "name", ["a cast by class", "a new leaf", "a buffer", "a default dtype"]
)
def test_what_the_check_makes_wider(name: str) -> None:
    functions: dict[str, Callable[[Tensor], Tensor]] = {
        "a cast by class": lambda x: cast(Any, x).type(torch.FloatTensor).sin(),
        "a new leaf": lambda x: x * torch.full((4,), 1.5, requires_grad=True).exp(),
        "a buffer": lambda x: torch.zeros(6, 4).copy_(x.sin()) * torch.ones(4),
        "a default dtype": lambda x: x * (torch.arange(4) / 3) + torch.zeros(6, 4),
    }
    x = torch.randn(6, 4)
    found = gradlib.per_sample_jacobian(functions[name], x)
    each = [
        torch.autograd.functional.jacobian(functions[name], x)[i, :, i] for i in (0, 5)
    ]
    assert torch.allclose(found[[0, 5]], torch.stack(cast(list[Tensor], each)))
