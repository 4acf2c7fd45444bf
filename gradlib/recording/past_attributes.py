"""What stood in the attributes of each module, at each of its calls."""

import copy
import weakref
from collections import OrderedDict, defaultdict, deque
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from operator import is_
from typing import Any, Final, cast

import optree
from torch import Tensor, nn

from gradlib.opaque import FIXED, is_fixed
from gradlib.private.classes import once_for_each_class
from gradlib.private.modes import unseen
from gradlib.private.modules import is_of_torch
from gradlib.private.tensors import referent
from gradlib.recording.kept import UNKNOWN, version_of
from gradlib.recording.stateful import are_alike, copied, is_large, is_stateful
from gradlib.values import place_of, same_values

OF_TORCH = frozenset(vars(nn.Module()))
"""The names that every module has in its ``vars()``: no attributes of its own."""

CONTAINERS = frozenset[type[Any]](
    {list, tuple, dict, OrderedDict, defaultdict, deque, set, partial}
)

# Attributes are read at every call: this deep, and with at most so many things in them.
DEPTH, MANY = 3, 1000

SMALL = 2**16
"""A tensor of at most this many entries is copied; a larger one shares its memory."""

NOT_COPIED = frozenset({"forward", "_reversed_padding_repeated_twice"})
"""The values under these names are held as they are.

They are a forward that was put in, and a list that convolutions make of their padding,
to which nothing is written: a copy at each call would take longer than the rest.
"""

NOT_KEPT: Final = object()
"""Stands for what cannot be kept, such as an object of unknown content."""


@dataclass(frozen=True, slots=True, eq=False)
class Was:
    """A tensor that stood in an attribute, and the value it had then.

    The value of a large tensor is right unless it was overwritten in place since.
    Lazily shared memory would not help: torch refuses to resize such a tensor, and a
    write to it is not seen in a NumPy array that has the same memory.
    """

    # Not the tensor itself, which would hold the graph it came from. All references to
    # one tensor are the same object.
    original: weakref.ref[Tensor]
    version: int
    place: int
    requires_grad: bool
    value: Tensor

    @classmethod
    def now(cls, tensor: Tensor) -> "Was":
        """Keep the value that a tensor has now."""
        with unseen():
            shown = tensor.detach()
            value = shown.clone() if tensor.numel() <= SMALL else shown
        return cls(
            weakref.ref(tensor),
            version_of(tensor),
            place_of(tensor),
            tensor.requires_grad,
            value,
        )

    def is_still(self, tensor: Tensor) -> bool:
        """Tell whether a tensor is this one, and still has this value."""
        if referent(self.original) is not tensor:
            return False
        if self.requires_grad != tensor.requires_grad:
            return False
        if tensor.is_cpu and tensor.numel() <= SMALL:
            return same_values(tensor, self.value)
        # To look at another device's memory would wait for the device.
        if self.version == UNKNOWN or self.version != tensor._version:
            return False
        return self.place == place_of(tensor)


@dataclass(frozen=True, slots=True, eq=False)
class Held:
    """A list, dict or the like that stood in an attribute, and what was in it then."""

    original: object  # stands for it: the same for one list in several attributes
    value: Any


@dataclass(slots=True, eq=False)
class Attributes:
    """What stood in the attributes of a module at some moment.

    Modules of one class of torch share one while it is true of all of them.

    Attributes:
        last: When it was last seen, if something in it can change in place.
        names: The names of the attributes.
        values: Their values: a tensor as a `Was`, what else can change in place as
            `Held` or `NOT_KEPT`, and any other as it is.
        size: How many entries the module had in its ``vars()``.
    """

    last: int
    names: list[str]
    values: list[Any]
    size: int

    @property
    def found(self) -> dict[str, Any]:
        """The values by name."""
        return dict(zip(self.names, self.values, strict=True))

    def stand_in(self, state: dict[str, Any]) -> bool:
        """Tell whether they stand in ``vars(module)``, and cannot have changed."""
        # What can change in place is not among the values: something stands for it.
        return len(state) == self.size and all(
            map(is_, map(state.get, self.names), self.values)
        )


class PastAttributes:
    """Keeps what stands in attributes; an object in two places only once."""

    def __init__(self) -> None:
        """Begin with nothing known."""
        # By class of torch: the attributes of one module, and their values' classes.
        self._likes: dict[type[nn.Module], tuple[Attributes, list[type[Any]]]] = {}
        self.tensors: dict[int, Was] = {}  # as last seen, by id
        # By id: what stands for a list or the like, and where it was first seen.
        self._containers: dict[int, tuple[object, dict[str, Any], str]] = {}

    def of(self, module: nn.Module, moment: int) -> Attributes:
        """Keep what stands in a module that was not looked at before.

        Modules of one class of torch are mostly made alike: if nothing in the first had
        to be copied, nothing in a second one has to.
        """
        kind, state = type(module), vars(module)
        if kind in self._likes:
            like, kinds = self._likes[kind]
            values = [*map(state.get, like.names)]
            if len(state) == like.size and [*map(type, values)] == kinds:
                if all(map(is_, values, like.values)):
                    return like
                return Attributes(moment, like.names, values, like.size)
        made = self._made(state, moment)
        if is_of_torch(kind) and made.stand_in(state):
            self._likes[kind] = made, [*map(type, made.values)]
        return made

    def anew(self, known: Attributes, module: nn.Module, moment: int) -> Attributes:
        """Keep what stands in a module now; return `known` if nothing has changed."""
        made = self._made(vars(module), moment)
        if known.names == made.names and _all_same(known.values, made.values):
            known.last = moment
            return known
        return made

    def _made(self, state: dict[str, Any], moment: int) -> Attributes:
        found = {
            name: value
            if _stays(type(cast(object, value))) or name in NOT_COPIED
            else self._stood(value, state, name)
            for name, value in state.copy().items()  # other threads may change it
            if name not in OF_TORCH
        }
        return Attributes(moment, [*found], [*found.values()], len(state))

    def _stood(self, value: Any, state: dict[str, Any], name: str) -> Any:
        kept = self._kept(value, DEPTH, [MANY])
        if kept is value or kept is NOT_KEPT or type(kept) is Was:
            return kept
        return Held(self._stands_for(value, state, name), kept)

    def _stands_for(self, value: Any, state: dict[str, Any], name: str) -> object:
        """Return an object that stands for a list or the like, which is not held.

        The list is known again by its id, as long as it stands where it was first seen.
        """
        known = self._containers.get(id(value))
        if known is not None and known[1].get(known[2]) is value:
            return known[0]
        made = object()
        self._containers[id(value)] = made, state, name
        return made

    def _kept(self, value: Any, depth: int, room: list[int]) -> Any:
        """Return what to keep of a value; `room` holds how many things may yet come."""
        kind = type(cast(object, value))
        if kind is Tensor:  # first: there may be many in a list
            return self._was(value)
        if _stays(kind) or is_fixed(value):
            return value
        if is_stateful(value):
            return NOT_KEPT if is_large(value) else copied(value)
        if not is_container(kind) or not depth or len(things_in(value)) > room[0]:
            return NOT_KEPT
        made = copy.copy(value)
        things = things_in(made)
        room[0] -= len(things)
        if issubclass(kind, dict) and not _all_lasting(made):
            return NOT_KEPT
        if all(map(_stays, set(map(type, things)))):
            return made
        kept = [self._kept(it, depth - 1, room) for it in things]
        if all(map(is_, kept, things)):
            return made
        if kind is set or any(it is NOT_KEPT for it in kept):
            return NOT_KEPT
        return filled(made, kept)

    def _was(self, tensor: Tensor) -> Any:
        try:
            known = self.tensors.get(id(tensor))
            if known is None or not known.is_still(tensor):
                known = self.tensors[id(tensor)] = Was.now(tensor)
        except Exception:  # what torch.func leaves behind is no tensor any more
            return NOT_KEPT
        return known


@once_for_each_class
def _stays(kind: type[Any]) -> bool:
    """Tell whether things of a class are held as they are: they need no copies."""
    return issubclass(kind, (*FIXED, nn.Module, nn.Parameter))


@once_for_each_class
def is_container(kind: type[Any]) -> bool:
    """Tell whether things of a class are containers, of which copies are made."""
    named: Any = optree.is_namedtuple_class(kind)
    return kind in CONTAINERS or named or optree.is_structseq_class(kind)


def things_in(container: Any) -> Collection[Any]:
    """Return what is in a container; of a dict the values, of a partial the arguments.

    The function of a `functools.partial` is held as it is.
    """
    kind: type[Any] = type(cast(object, container))
    if kind is partial:
        return [*container.args, *container.keywords.values()]
    return container.values() if issubclass(kind, dict) else container


def _all_lasting(keys: Iterable[Any]) -> bool:
    """Tell whether keys may be held: they never change, nor does what is in them."""
    kinds = set(map(type, keys)) - {tuple}
    tuples = (cast(Any, it) for it in keys if type(it) is tuple)
    return all(map(_stays, kinds)) and all(map(_all_lasting, tuples))


def held_among(
    given: Iterable[Any], tensors: Mapping[int, Was]
) -> dict[int, weakref.ref[Tensor]]:
    """Return references to the given tensors that stand in attributes too, by place.

    Args:
        given: The flat inputs of a call.
        tensors: The tensors in attributes, by id.
    """
    found: dict[int, weakref.ref[Tensor]] = {}
    for place, leaf in enumerate(given):
        known = tensors.get(id(leaf))
        if known is not None and referent(known.original) is leaf:
            found[place] = known.original
    return found


def filled(container: Any, things: list[Any]) -> Any:
    """Return a container with `things` in place of what is in it."""
    kind: type[Any] = type(cast(object, container))
    is_named: Any = optree.is_namedtuple_class(kind)
    if kind is partial:
        count = len(container.args)
        named = dict(zip(container.keywords, things[count:], strict=True))
        return partial(container.func, *things[:count], **named)
    if is_named:  # which may check what it is made of
        return cast(Any, tuple).__new__(kind, things)
    if issubclass(kind, tuple):
        return cast(Any, kind)(things)
    places: Any = container if issubclass(kind, dict) else range(len(container))
    for place, thing in zip(places, things, strict=True):
        container[place] = thing
    return container


def _are_same(a: Any, b: Any) -> bool:
    """Tell whether two things are one, or containers of the very same things."""
    kind = type(cast(object, a))
    if a is b or kind is not type(cast(object, b)):
        return a is b
    if kind is Held:
        return a.original is b.original and _are_same(a.value, b.value)
    if is_stateful(a):
        return are_alike(a, b)
    if not is_container(kind) or len(things_in(a)) != len(things_in(b)):
        return False
    if kind is set:
        return a == b
    if issubclass(kind, dict) and not all(map(is_, a, b)):
        return False
    if kind is partial and (a.func is not b.func or [*a.keywords] != [*b.keywords]):
        return False
    return _all_same(things_in(a), things_in(b))


def _all_same(some: Iterable[Any], others: Iterable[Any]) -> bool:
    return all(a is b or _are_same(a, b) for a, b in zip(some, others, strict=True))
