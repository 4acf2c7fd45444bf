"""Other threads run modules while a Jacobian is checked."""

import threading
from collections.abc import Callable
from contextlib import suppress

import torch
from torch import Tensor, nn

import gradlib


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


def normed() -> nn.Module:
    """Return a net that is called again to check its Jacobian."""
    return nn.Sequential(nn.Linear(4, 16), nn.LayerNorm(16), nn.Linear(16, 5)).eval()


def test_modules_of_another_thread_keep_their_weights() -> None:
    model, other = normed(), nn.Sequential(nn.Linear(5, 9), nn.ReLU(), nn.Linear(9, 1))
    before, dtypes = dict(other.named_parameters()), set[torch.dtype]()
    x = torch.randn(6, 4)

    def run() -> None:
        for _ in range(40):
            gradlib.per_sample_jacobian(model, x)

    # In another dtype the call raises, and the thread ends, which pytest reports.
    beside(lambda: dtypes.add(other(torch.randn(8, 5)).dtype), run)
    assert dtypes == {torch.float32}
    after = dict(other.named_parameters())
    assert all(after[name] is parameter for name, parameter in before.items())


def test_modules_of_another_thread_couple_no_samples() -> None:
    x = torch.randn(6, 4)

    def run() -> None:
        for _ in range(20):
            with suppress(gradlib.CoupledSamplesError):
                gradlib.per_sample_jacobian(centred, x)

    model = nn.Linear(4, 4)
    beside(lambda: model(torch.randn(3, 4)), run)
    assert model.weight.dtype == torch.float32


def centred(x: Tensor) -> Tensor:
    return x - x.mean(0)


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
