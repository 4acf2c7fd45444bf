"""The random generators of devices, NumPy and Python: restored, and seeded."""

import random
from collections.abc import Callable, Generator
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeVar, cast

import numpy
import torch

from gradlib.finishing import finish

T = TypeVar("T")


def cuda_devices() -> range:
    """Return the CUDA devices in use."""
    return range(torch.cuda.device_count() if torch.cuda.is_initialized() else 0)


def generators_of_devices() -> tuple[torch.Generator, ...]:
    """Return the default generator of each device in use."""
    return torch.default_generator, *torch.cuda.default_generators


@contextmanager
def random_state_kept() -> Generator[None]:
    """Restore the state of all generators at the end: torch's, NumPy's and Python's."""
    python, numpys = random.getstate(), numpy.random.get_state(legacy=False)
    with cast(Any, torch.random).fork_rng(cuda_devices()):
        try:
            yield
        finally:
            put_back = partial(random.setstate, python)
            finish((put_back, partial(numpy.random.set_state, numpys)))


def moving_no_generator(function: Callable[..., T]) -> Callable[..., T]:
    """Return `function`, made to leave the generators of devices as they were."""

    def call(*args: object) -> T:
        before = [(it, it.get_state()) for it in generators_of_devices()]
        try:
            return function(*args)
        finally:
            for generator, state in before:
                # After set_state() cuDNN draws the dropout of RNNs anew.
                if not torch.equal(generator.get_state(), state):
                    generator.set_state(state)

    return call


def seed_all(seed: int) -> None:
    """Seed all generators, except those of devices that are not in use.

    For such a device ``torch.manual_seed`` would keep every seed it was ever given,
    with the stack of the call.
    """
    for generator in generators_of_devices():
        generator.manual_seed(seed)
    numpy.random.seed(seed)
    random.seed(seed)
