"""What stands in one module, and what stood there at each moment before."""

from bisect import bisect_right
from collections.abc import Mapping
from operator import itemgetter
from types import MappingProxyType
from typing import Any

from torch import Tensor, nn

from gradlib.recording.kept import Kept
from gradlib.recording.past_attributes import Attributes

Children = dict[str, nn.Module | None]
"""The children of a module, by name."""

Tensors = dict[str, Kept | None]
"""The parameters or buffers of a module, by name, without those that are lazy."""

Hooks = tuple[type[nn.Module], dict[str, Any]]
"""The class of a module, and its hooks by the attribute that holds them."""

_NOTHING: Tensors = {}  # shared: a change makes a new dict and leaves this one empty


class Seen:
    """What stands in a module, as last seen, and what stood in each field before."""

    # Most modules need few of these, so the class holds the defaults.
    parameters = buffers = _NOTHING
    hooks: Hooks | None = None  # without the recorder's; None where there are none
    lazy: frozenset[str] = frozenset()  # names of tensors not initialised yet
    # The names of tensors that were lazy, each with the last moment at which it was.
    filled: Mapping[str, int] = MappingProxyType({})
    # By field: what stood there before, each value with the moment at which it went.
    _past: dict[str, list[tuple[int, Any]]] | None = None

    def __init__(
        self,
        moment: int,
        training: bool,
        kind: type[nn.Module],
        children: Children,
        attributes: Attributes,
    ) -> None:
        """Begin with what stands there at a moment, as if it had always been so."""
        self.since = self.last = moment  # the first and the last look
        self.training = training
        self.kind = kind
        self.children = children
        self.attributes = attributes

    def change(self, field: str, value: Any, since: int) -> None:
        """Set a field to the value that it has had since a moment."""
        if since > self.since:
            if self._past is None:
                self._past = {}
            past = self._past.setdefault(field, [])
            until = max(since, past[-1][0]) if past else since
            past.append((until, getattr(self, field)))
        setattr(self, field, value)

    def fill(self, field: str, name: str, value: Any) -> None:
        """Set a tensor that was lazy, as if it had been there from the start."""
        self.lazy -= {name}
        self.filled = {**self.filled, name: self.last}
        if self._past is not None and field in self._past:
            past = self._past[field]
            past[:] = [(until, {**stood, name: value}) for until, stood in past]
        setattr(self, field, {**getattr(self, field), name: value})

    def at(self, field: str, moment: int) -> Any:
        """Return a field's value at a moment; before the first look, what that saw."""
        past = (self._past or {}).get(field, [])
        place = bisect_right(past, moment, key=itemgetter(0))
        return past[place][1] if place < len(past) else getattr(self, field)

    def kept(self) -> list[Kept]:
        """Return what is kept of the parameters and buffers that stand there."""
        both = *self.parameters.values(), *self.buffers.values()
        return [it for it in both if it is not None]

    def last_change(self) -> int:
        """Return the moment since which all fields are what they are."""
        past = self._past or {}
        return max((until for *_, (until, _) in past.values()), default=0)


def are_as_kept(own: Mapping[str, Tensor | None], known: Tensors) -> bool:
    """Tell whether tensors are those that are kept, and were not changed since."""
    if len(own) != len(known):
        return False
    for name, tensor in own.items():
        kept = known.get(name)
        if kept is None or tensor is None:
            if kept is not tensor:
                return False
        elif (
            tensor is not kept.tensor
            or kept.was_written_to()
            or tensor.requires_grad != kept.requires_grad
        ):
            return False
    return True
