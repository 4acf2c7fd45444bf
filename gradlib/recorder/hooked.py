"""A module with our hooks, and what of it stays the same from call to call."""

from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import Any, TypeAlias

from torch import nn

from gradlib.private.modules import own_buffers, own_parameters
from gradlib.recorder.graph import End
from gradlib.recording.trace import Grads

Parameters: TypeAlias = dict[str, tuple[nn.Parameter, End, Grads]]
"""Parameters by name, each with where its gradient goes and what it got."""


class Hooked:
    """A module that is recorded.

    Hooks run at every call; what need not be found out again stands here.
    """

    was_called = False
    # The numbers of the hooks that run when a call begins, and when it returns.
    before_id = after_id = 0
    names: Sequence[str] = ()  # of its own parameters
    _own: tuple[object, ...] = ()  # the ids of those it had, and their names
    _is_for_good = False

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
            name: The module's.
            module: The module.
            calls: Gives each call its index: those of one name are counted together.
            is_left_out: Whether it is hooked only because it is the model itself.
        """
        self.name = name
        self.module = module
        self.is_left_out = is_left_out
        self.calls = calls
        self.parameters: Parameters = {}  # its own

    @cached_property
    def holds_state(self) -> bool:
        """Whether there are parameters or buffers in it, or in a module inside it."""
        modules: Any = self.module.modules()
        return any(own_parameters(it) or own_buffers(it) for it in modules)

    def holds(self, other: nn.Module) -> bool:
        """Tell whether another module is inside this one."""
        modules: Any = self.module.modules()
        return other is not self.module and other in modules

    def rename(self, name: str, calls: Iterator[int]) -> None:
        """Take another name, before the first call, and what counts its calls."""
        self.name = name
        self.calls = calls

    def knows(self, own: dict[str, nn.Parameter | None]) -> bool:
        """Tell whether `own`, what the module has now, is what it had before."""
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
        """Remember what was made of `own`, for the next call too if it is for good."""
        self.parameters = parameters
        self.names = list(parameters)
        self._own = *map(id, own.values()), *own
        self._is_for_good = for_good
