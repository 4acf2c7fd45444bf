"""A recorded module, and what stays the same from one call of it to the next."""

from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import TypeAlias

from torch import nn

from gradlib.private.modules import modules_in, own_buffers, own_parameters
from gradlib.recorder.ends import End
from gradlib.recording.flow import Grads

Parameters: TypeAlias = dict[str, tuple[nn.Parameter, End, Grads]]
"""Parameters by name, each with where its gradient flows and what is kept of that."""


class Hooked:
    """A module that is recorded.

    It holds what the hooks, which run at every call, need not find out again.
    """

    was_called = False
    # The ids of the hooks that run when a call begins and when it returns.
    before_id = after_id = 0
    names: Sequence[str] = ()  # of its own parameters
    _own: tuple[object, ...] = ()  # the ids and names of those that it had last
    _is_for_good = False  # whether `parameters` also holds for later calls with these

    def __init__(
        self,
        name: str,
        module: nn.Module,
        calls: Iterator[int],
        *,
        is_left_out: bool,
    ) -> None:
        """Begin with no call.

        Args:
            name: The name of the module.
            module: The module.
            calls: Gives each call its index; calls of one name are counted together.
            is_left_out: Whether it was not chosen, and is hooked only as the model.
        """
        self.name = name
        self.module = module
        self.is_left_out = is_left_out
        self.calls = calls
        self.parameters: Parameters = {}  # its own

    @cached_property
    def holds_state(self) -> bool:
        """Whether the module, or one inside it, has parameters or buffers."""
        every = modules_in(self.module)
        return any(own_parameters(it) or own_buffers(it) for it in every)

    def holds(self, other: nn.Module) -> bool:
        """Tell whether another module is inside this one."""
        return other is not self.module and other in modules_in(self.module)

    def rename(self, name: str, calls: Iterator[int]) -> None:
        """Take another name and its counter of calls, before the first call."""
        self.name = name
        self.calls = calls

    def knows(self, own: dict[str, nn.Parameter | None]) -> bool:
        """Tell whether what was remembered of `own` holds for this call too."""
        return self._is_for_good and self.has_seen(own)

    def has_seen(self, own: dict[str, nn.Parameter | None]) -> bool:
        """Tell whether `own` are the same tensors as before, under the same names."""
        return self._own == (*map(id, own.values()), *own)

    def remember(
        self,
        own: dict[str, nn.Parameter | None],
        parameters: Parameters,
        *,
        for_good: bool,
    ) -> None:
        """Remember `parameters`, made of `own`, for later calls too if `for_good`."""
        self.parameters = parameters
        self.names = list(parameters)
        self._own = *map(id, own.values()), *own
        self._is_for_good = for_good
