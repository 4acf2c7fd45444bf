"""The states of torch's random generators: those of devices, and a function's own."""

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
    """Keeps the state that a generator had when first passed as ``generator=``."""

    def __init__(self) -> None:
        """Start without any generator."""
        super().__init__()
        self._states: dict[torch.Generator, Tensor] = {}

    @property
    def has_met(self) -> bool:
        """Whether a generator was passed."""
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
        """Note the generator among the keywords of a function of torch, if any."""
        generator = kwargs.get("generator")
        if generator is None or generator in self._states or _is_devices(generator):
            return
        self._states[generator] = generator.get_state()

    def set(self) -> None:
        """Set the noted generators back to their kept states."""
        for generator, state in self._states.items():
            generator.set_state(state)


@contextmanager
def generators_kept() -> Generator[None]:
    """Restore generators that functions of torch are given in the block."""
    met = Met()
    try:
        with met:
            yield
    finally:
        met.set()


@dataclass(frozen=True)
class RandomState:
    """The states of torch's generators.

    Attributes:
        cpu: The state of the CPU's generator.
        cuda: The states of the CUDA devices' generators.
        own: The generators of the function's own, noted once it has used them.
    """

    cpu: Tensor
    cuda: list[Tensor]
    own: Met = field(default_factory=Met)

    @classmethod
    def now(cls) -> "RandomState":
        """Return the present states."""
        cuda = [torch.cuda.get_rng_state(device) for device in cuda_devices()]
        for device, state in enumerate(cuda):
            # After the state is set, cuDNN draws the dropout of RNNs anew from it: so
            # the first call draws the same as later ones.
            torch.cuda.set_rng_state(state, device)
        return cls(torch.get_rng_state(), cuda)

    def set(self) -> None:
        """Set all generators to these states."""
        torch.set_rng_state(self.cpu)
        for device, state in enumerate(self.cuda):
            torch.cuda.set_rng_state(state, device)
        self.own.set()

    @contextmanager
    def kept(self) -> Generator[None]:
        """Restore all generators: of devices, the function, NumPy and Python."""
        with random_state_kept():
            try:
                yield
            finally:
                self.own.set()


def _is_devices(generator: torch.Generator) -> bool:
    """Tell whether a generator is the default one of a device."""
    return any(generator is it for it in generators_of_devices())
