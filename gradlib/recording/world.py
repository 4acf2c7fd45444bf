"""The state outside of the model that changes what a call computes."""

from collections.abc import Generator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from gradlib.private.classes import once_for_each_class
from gradlib.private.hooks import FORWARD_HOOKS, saved_tensors_hooks
from gradlib.private.modes import tensors_may_be_dual, unseen
from gradlib.private.modules import CHILDREN, is_of_torch

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


def world_now(
    module: nn.Module,
    last: World | None,
    autocast: dict[str, torch.dtype],
    all_are_hooked: bool,
) -> World:
    """Return the state in which a call begins now.

    Args:
        module: The called module.
        last: That in which the last call began; returned if it is known to be the same.
        autocast: What `autocast_now` gives.
        all_are_hooked: Whether a hook holds for every module.
    """
    is_dual = tensors_may_be_dual()
    saves_through_hooks = saved_tensors_hooks() is not None
    if (
        last is not None
        and last.autocast == autocast
        and last.is_dual is is_dual
        and last.saves_through_hooks is saves_through_hooks
        and not all_are_hooked
        and _draws_nothing(type(module), vars(module))
    ):
        return last
    random, cuda = random_states()
    if last is not None and random == last.random:
        random = last.random  # each is some kilobytes
    return World(random, cuda, autocast, is_dual, saves_through_hooks)


def _draws_nothing(kind: type[nn.Module], own: dict[str, Any]) -> bool:
    """Tell whether a call of a module is known to draw no random number.

    Its class may be known for that; a forward that was put in, or a hook of others, is
    not. The recorder itself has one hook before its forward, and one after it.

    Args:
        kind: The module's class.
        own: The module's ``vars()``.
    """
    return (
        not own[CHILDREN]
        and "forward" not in own
        and len(own[FORWARD_HOOKS[0]]) < 2
        and len(own[FORWARD_HOOKS[1]]) < 2
        and _never_draws(kind)
    )


@once_for_each_class
def _never_draws(kind: type[nn.Module]) -> bool:
    return is_of_torch(kind) and not (
        kind.__module__ in ("torch.nn.modules.dropout", "torch.nn.modules.rnn")
        or issubclass(kind, nn.RReLU | nn.FractionalMaxPool2d | nn.FractionalMaxPool3d)
    )


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
