"""What was read to find a chain: where it is all the same again, so is the chain.

Each reading is a function of something that had been read before, beginning with what
is called. To go through them again reads what is there now. Nothing that somebody has
made is kept for that: of modules and functions only which class, or code, they are of,
and that weakly.
"""

from collections.abc import Callable, Sequence
from operator import getitem
from types import FunctionType, MethodType
from typing import Any, NamedTuple, cast
from weakref import ref

from torch import Tensor, nn
from torch.nn import Parameter

from gradlib.jacobian.fast.chains.functions import CONSTANTS, is_torchs_function
from gradlib.jacobian.fast.chains.noted import Found, Read, length
from gradlib.jacobian.fast.chains.own import KNOWN

Key = Callable[[Any], Any]
"""Of a value: what of it must be the same."""


class Reading(NamedTuple):
    """A reading, and what came of it.

    Attributes:
        read: How it is read.
        owner: The number of the reading that gave what it is read of.
        name: By which name, or the like.
        key: What must be the same of what is read; ``None`` for itself.
        expected: What that was.
    """

    read: Read
    owner: int
    name: Any
    key: Key | None
    expected: Any


class Witnesses:
    """Readings, as they are taken down.

    Attributes:
        readings: All but the first, which is what is called.
        twice: The numbers of two readings that gave the same.
        own: What had to be torch's own, or Python's.
        complete: Whether all could be taken down.
    """

    def __init__(self, fn: Any) -> None:
        """Begin with what is called."""
        self.readings: list[Reading] = []
        self.twice: list[tuple[int, int]] = []
        self.own: Found = ()
        self.complete = True
        self._values = [fn]  # they stay, so that no other has the `id` of one
        self._numbers = {id(fn): 0}
        self._add_parts(fn)

    def number_of(self, value: Any) -> int | None:
        """Return the number of the reading that first gave a value, if one did."""
        return self._numbers.get(id(value))

    def add(self, read: Read, owner: Any, name: Any, value: Any) -> None:
        """Take down a reading."""
        of, number = self.number_of(owner), len(self._values)
        known = _known(value)
        if of is None or known is None:
            self.complete = False
            return
        self.readings.append(Reading(read, of, name, *known))
        self._values.append(value)
        if type(value) in CONSTANTS:  # it may be anybody's
            return
        first = self._numbers.setdefault(id(value), number)
        if first == number:
            self._add_parts(value)
        elif known[0] is not None:
            self.twice.append((first, number))

    def add_own(self, found: Found) -> None:
        """Take down what has to be torch's own, or Python's."""
        self.own += tuple(it for it in found if it not in self.own)

    def _add_parts(self, value: Any) -> None:
        """Take down what is always read with a value."""
        kind = cast(Any, type(value))
        if kind is tuple:
            self.add(length, value, None, len(value))
            for number, part in enumerate(value):
                self.add(getitem, value, number, part)
        elif kind is MethodType:
            for name in ("__func__", "__self__"):
                self.add(getattr, value, name, getattr(value, name))


def read_again(
    fn: Any, readings: Sequence[Reading], twice: Sequence[tuple[int, int]]
) -> list[Any] | None:
    """Return what all readings give now; ``None`` where something else is there.

    Args:
        fn: What is called.
        readings: All that followed.
        twice: The numbers of those that gave the same.
    """
    values = [fn]
    add = values.append
    for read, owner, name, key, expected in readings:
        value = read(values[owner], name)
        if (value if key is None else key(value)) is not expected:
            return None
        add(value)
    for one, other in twice:
        if values[one] is not values[other]:
            return None
    return values


def _known(value: Any) -> tuple[Key | None, Any] | None:
    """Return what must be the same of a value; ``None`` where nobody knows."""
    kind = cast(Any, type(value))
    if kind in CONSTANTS or is_torchs_function(value):
        return None, value
    if kind is FunctionType:
        return _code_of, _code_of(value)
    if kind in (tuple, list, dict, MethodType, Tensor, Parameter) or kind in KNOWN:
        return type, kind
    return (_class_of, _class_of(value)) if issubclass(kind, nn.Module) else None


# Weak references that are the same as long as what they are to is there.


def _class_of(value: Any) -> Any:
    kind = cast(Any, type(value))
    return ref(kind)


def _code_of(value: Any) -> Any:
    return ref(value.__code__) if type(value) is FunctionType else None
