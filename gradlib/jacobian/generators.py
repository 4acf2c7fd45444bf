"""Where torch's random generators stand: those of devices, and those of a function."""

from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from gradlib.random_state import (
    cuda_devices,
    generators_of_devices,
    random_state_kept,
)


class Met(TorchFunctionMode):
    """Keeps where generators stood when they were first passed as ``generator=``."""

    def __init__(self) -> None:
        """Begin with none."""
        super().__init__()
        self._states: dict[torch.Generator, Tensor] = {}

    @property
    def has_met(self) -> bool:
        """Whether there was one."""
        return bool(self._states)

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Call the function."""
        kwargs = kwargs or {}
        self.meet(kwargs)
        return func(*args, **kwargs)

    def meet(self, kwargs: dict[str, Any]) -> None:
        """Look for a generator among what a function of torch is called with."""
        generator = kwargs.get("generator")
        if generator is None or generator in self._states or _is_devices(generator):
            return
        self._states[generator] = generator.get_state()

    def set(self) -> None:
        """Have them stand there again."""
        for generator, state in self._states.items():
            generator.set_state(state)


@contextmanager
def generators_kept() -> Generator[None]:
    """Put the generators back that functions of torch are given meanwhile."""
    met = Met()
    try:
        with met:
            yield
    finally:
        met.set()


@dataclass(frozen=True)
class RandomState:
    """Where torch's generators stood.

    Attributes:
        cpu: That of the CPU.
        cuda: Those of the CUDA devices.
        own: Those that the function brings, once it has used them.
    """

    cpu: Tensor
    cuda: list[Tensor]
    own: Met = field(default_factory=Met)

    @classmethod
    def now(cls) -> "RandomState":
        """Return where they stand."""
        cuda = [torch.cuda.get_rng_state(device) for device in cuda_devices()]
        for device, state in enumerate(cuda):
            # Once it was set, cuDNN draws the dropout of RNNs anew from it: all calls
            # have the same then, the first one too.
            torch.cuda.set_rng_state(state, device)
        return cls(torch.get_rng_state(), cuda)

    def set(self) -> None:
        """Have them stand there again."""
        torch.set_rng_state(self.cpu)
        for device, state in enumerate(self.cuda):
            torch.cuda.set_rng_state(state, device)
        self.own.set()

    @contextmanager
    def kept(self) -> Generator[None]:
        """Put all generators back: a device's, the function's, NumPy's and Python's."""
        with random_state_kept():
            try:
                yield
            finally:
                self.own.set()


def _is_devices(generator: torch.Generator) -> bool:
    """Tell whether it is the one that a device uses by itself."""
    return any(generator is it for it in generators_of_devices())
