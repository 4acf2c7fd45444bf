"""The state outside of the model that changes what a call computes."""

from collections.abc import Generator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from gradlib.private.modes import unseen

AUTOCAST_DEVICES = ("cpu", "cuda")
NO_AUTOCAST: dict[str, torch.dtype] = {}


@dataclass(frozen=True, slots=True)
class World:
    """What was in force when a call began."""

    # The state of the CPU's generator: as bytes, compared in a sixth of the time.
    random: bytes
    cuda_random: tuple[Tensor, ...]  # of each CUDA device, once CUDA is in use
    autocast: dict[str, torch.dtype]  # by device type, where it is enabled
    is_dual: bool  # whether tensors may have carried tangents of forward-mode AD
    # Whether the tensors that autograd saved went through saved_tensors_hooks.
    saves_through_hooks: bool

    def has_drawn(self) -> bool:
        """Tell whether torch's generators have moved on since a call began here."""
        random, cuda_random = random_states()
        return random != self.random or not all(
            map(torch.equal, cuda_random, self.cuda_random)
        )

    @contextmanager
    def in_force(self) -> Generator[None]:
        """Set torch's generators and autocast as they were."""
        random = torch.frombuffer(bytearray(self.random), dtype=torch.uint8)
        torch.set_rng_state(random)
        for device, state in enumerate(self.cuda_random):
            torch.cuda.set_rng_state(state, device)
        with autocast_set_to(self.autocast):
            yield


def random_states() -> tuple[bytes, tuple[Tensor, ...]]:
    """Return the state of the CPU's generator, and that of each CUDA device in use."""
    with unseen():
        random = torch.get_rng_state().numpy().tobytes()
        if torch.cuda.is_initialized():
            return random, tuple(torch.cuda.get_rng_state_all())
    return random, ()


def autocast_now() -> dict[str, torch.dtype]:
    """Return autocast's dtype for each device type for which it is enabled now."""
    return {
        device: torch.get_autocast_dtype(device)
        for device in AUTOCAST_DEVICES
        if torch.is_autocast_enabled(device)
    }


@contextmanager
def autocast_set_to(dtypes: Mapping[str, torch.dtype]) -> Generator[None]:
    """Set autocast as `autocast_now` gave it."""
    with ExitStack() as stack:
        for device in AUTOCAST_DEVICES:
            dtype = dtypes.get(device)
            if dtype is not None:
                stack.enter_context(torch.autocast(device, dtype))
            elif torch.is_autocast_enabled(device):
                stack.enter_context(torch.autocast(device, enabled=False))
        yield
