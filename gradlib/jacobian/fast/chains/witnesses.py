"""The readings that found a chain: where all give the same again, so does the chain.

Each reading is a function of an object that was read before, starting with the function
that is called, so repeating them reads the present objects. The user's objects are not
kept: of a module only its class, of a function only its code, by weak references.
"""

from collections.abc import Callable, Collection, Sequence
from operator import getitem
from types import FunctionType, MethodType
from typing import Any, NamedTuple, cast
from weakref import ref

from torch import Tensor, nn
from torch.nn import Parameter

from gradlib.jacobian.fast.chains.functions import CONSTANTS, is_torchs_function
from gradlib.jacobian.fast.chains.noted import Found, Read, length
from gradlib.jacobian.fast.chains.own import KNOWN
from gradlib.jacobian.fast.chains.read import attributes_of, is_of_class, value_of

Key = Callable[[Any], Any]
"""A function from a value to what must be the same when it is read again."""


class Reading(NamedTuple):
    """A reading, and what it must give again.

    Attributes:
        read: The function that reads.
        owner: The number of the reading that gave the object read from.
        name: The name, or the like, that is read.
        key: Gives what must be the same of the value; ``None`` for the value itself.
        expected: What that was.
    """

    read: Read
    owner: int
    name: Any
    key: Key | None
    expected: Any


class Witnesses:
    """Notes of readings. Number 0 is the function that is called.

    Attributes:
        readings: The readings, numbered from 1.
        twice: The pairs of numbers of readings that gave the same object.
        own: What had to be torch's own, or Python's.
        complete: Whether all readings could be noted.
    """

    def __init__(self, fn: Any) -> None:
        """Start with the function that is called."""
        self.readings: list[Reading] = []
        self.twice: list[tuple[int, int]] = []
        self.own: Found = ()
        self.complete = True
        # Kept alive, so that no other object gets an `id` of theirs.
        self._values = [fn]
        self._numbers = {id(fn): 0}
        # Of each module, by its id, the attributes and the names that were read.
        self._attributes: dict[int, tuple[dict[str, Any], set[str]]] = {}
        self._add_parts(fn)

    def number_of(self, value: Any) -> int | None:
        """Return the number of the reading that first gave a value, if one did."""
        return self._numbers.get(id(value))

    def every(self, kinds: Collection[type[Any]]) -> dict[int, Any]:
        """Return all values of some types that were read, by number."""
        values = enumerate(self._values)
        return {number: it for number, it in values if type(it) in kinds}

    def add(self, read: Read, owner: Any, name: Any, value: Any) -> None:
        """Note a reading."""
        if read is value_of and not is_of_class(owner, name):
            read, owner = getitem, self._attributes_of(owner, name)
        of, number = self.number_of(owner), len(self._values)
        known = _known(value)
        if of is None or known is None:
            self.complete = False
            return
        self.readings.append(Reading(read, of, name, *known))
        self._values.append(value)
        if type(value) in CONSTANTS:  # equal ones may be one object
            return
        first = self._numbers.setdefault(id(value), number)
        if first == number:
            self._add_parts(value)
        elif known[0] is not None:
            self.twice.append((first, number))

    def add_own(self, found: Found) -> None:
        """Note attributes that must stay torch's own, or Python's."""
        self.own += tuple(it for it in found if it not in self.own)

    def _attributes_of(self, module: nn.Module, name: str) -> dict[str, Any]:
        """Return a module's attributes, which are read at once for all its names."""
        if id(module) not in self._attributes:
            names: set[str] = set()
            attributes = attributes_of(module, names)
            self._attributes[id(module)] = attributes, names
            self.add(attributes_of, module, names, attributes)
        attributes, names = self._attributes[id(module)]
        names.add(name)
        return attributes

    def _add_parts(self, value: Any) -> None:
        """Note the parts of a value that are always read with it."""
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
    """Return the values that all readings give now; ``None`` where one differs.

    Args:
        fn: The function that is called.
        readings: The readings.
        twice: The pairs of numbers of those that gave the same object.
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
    """Return the key of a value, and its result; ``None`` for an unknown kind."""
    kind = cast(Any, type(value))
    if kind in CONSTANTS or is_torchs_function(value):
        return None, value
    if kind is FunctionType:
        return _code_of, _code_of(value)
    if kind in (tuple, list, dict, MethodType, Tensor, Parameter) or kind in KNOWN:
        return type, kind
    return (_class_of, _class_of(value)) if issubclass(kind, nn.Module) else None


# Weak references: each call gives the same one while the class or code is alive.


def _class_of(value: Any) -> Any:
    kind = cast(Any, type(value))
    return ref(kind)


def _code_of(value: Any) -> Any:
    return ref(value.__code__) if type(value) is FunctionType else None
