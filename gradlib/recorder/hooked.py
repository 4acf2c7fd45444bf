"""A module with our hooks, and what of it stays the same from call to call."""

from collections.abc import Collection
from typing import TypeAlias

from torch import nn

from gradlib.recorder.forward_values import End
from gradlib.recording.trace import Grads

Parameters: TypeAlias = dict[str, tuple[nn.Parameter, End, Grads]]
"""Parameters by name, each with where its gradient goes and what it got."""


class Hooked:
    """A module that is recorded.

    Hooks run at every call; what need not be found out again stands here.
    """

    __slots__ = ("_ids", "calls", "module", "name", "names", "parameters")

    def __init__(self, name: str, module: nn.Module) -> None:
        """Begin with no call."""
        self.name = name
        self.module = module
        self.calls = 0
        self.parameters: Parameters = {}  # its own
        self.names: list[str] = []
        self._ids: list[int] = []

    def knows(self, own: Collection[nn.Parameter | None]) -> bool:
        """Tell whether `own`, what the module has now, is what it had before."""
        return self._ids == [*map(id, own)]

    def remember(
        self,
        own: Collection[nn.Parameter | None],
        parameters: Parameters,
        *,
        for_good: bool,
    ) -> None:
        """Remember what was made of `own`, for the next call too if it is for good."""
        self.parameters = parameters
        self.names = list(parameters)
        self._ids = [*map(id, own)] if for_good else []
