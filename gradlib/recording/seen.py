"""What stands in one module, and what stood there at each moment before."""

from bisect import bisect_right
from collections.abc import Mapping
from operator import itemgetter
from types import MappingProxyType
from typing import Any

from torch import nn

from gradlib.recording.kept import Kept
from gradlib.recording.past_attributes import Attributes

Children = dict[str, nn.Module | None]
"""What stands in a module, by name."""

Tensors = dict[str, Kept | None]
"""The parameters or buffers of a module, by name, but those that are lazy."""

Hooks = tuple[type[nn.Module], dict[str, Any]]
"""The class of a module, and its hooks, as its attributes."""

_NOTHING: Tensors = {}  # others are made in its place, and nothing is put in


class Seen:
    """What stands in a module, as it was last seen.

    Of each field, what stood there before is kept too.
    """

    # Most modules need few of these, so what they share stands in the class.
    parameters = buffers = _NOTHING
    hooks: Hooks | None = None  # those of others; None for none
    lazy: frozenset[str] = frozenset()  # the names of what was not initialised yet
    # The names of what was, and when it was last seen so.
    filled: Mapping[str, int] = MappingProxyType({})
    # By field: what stood there, each until when.
    _past: dict[str, list[tuple[int, Any]]] | None = None

    def __init__(
        self,
        moment: int,
        training: bool,
        kind: type[nn.Module],
        children: Children,
        attributes: Attributes,
    ) -> None:
        """Begin with what is seen at a moment: as if it had always been so."""
        self.since = self.last = moment  # it was seen first, and last
        self.training = training
        self.kind = kind
        self.children = children
        self.attributes = attributes

    def change(self, field: str, value: Any, since: int) -> None:
        """Put in a field what stands there since a moment."""
        if since > self.since:
            if self._past is None:
                self._past = {}
            past = self._past.setdefault(field, [])
            until = max(since, past[-1][0]) if past else since
            past.append((until, getattr(self, field)))
        setattr(self, field, value)

    def fill(self, field: str, name: str, value: Any) -> None:
        """Put in what was lazy: as if it had been there at once."""
        self.lazy -= {name}
        self.filled = {**self.filled, name: self.last}
        if self._past is not None and field in self._past:
            past = self._past[field]
            past[:] = [(until, {**stood, name: value}) for until, stood in past]
        setattr(self, field, {**getattr(self, field), name: value})

    def at(self, field: str, moment: int) -> Any:
        """Return what stood in a field at a moment; before all, what was seen first."""
        past = self.past(field)
        found = bisect_right(past, moment, key=itemgetter(0))
        return past[found][1] if found < len(past) else getattr(self, field)

    def past(self, field: str) -> list[tuple[int, Any]]:
        """Return what stood in a field before, each until when."""
        return [] if self._past is None else self._past.get(field, [])
