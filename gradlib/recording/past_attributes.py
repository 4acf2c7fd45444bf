"""What stood in the attributes of each module, at each of its calls."""

import copy
import sys
import weakref
from bisect import bisect_left
from collections import OrderedDict, defaultdict, deque
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from operator import attrgetter, is_
from typing import Any, cast

from torch import Tensor, nn

from gradlib.private import is_of_torch
from gradlib.recording.kept import UNKNOWN, value_of

OF_TORCH = frozenset(vars(nn.Module()))
"""What every module has under these names is no attribute of its own."""

CONTAINERS = frozenset({list, tuple, dict, OrderedDict, defaultdict, deque, set})

# At every call its attributes are gone through: so deep, and no longer lists, dicts and
# the like, as a vocabulary is.
DEPTH, MANY = 3, 1000


@dataclass(frozen=True, slots=True, eq=False)
class Was:
    """A tensor that stood in an attribute, and the value it had then."""

    # Not the tensor itself, which would hold the graph it came from. For one tensor
    # this is always the same object.
    original: weakref.ref[Tensor]
    version: int
    requires_grad: bool
    value: Tensor


@dataclass(frozen=True, slots=True, eq=False)
class Held:
    """A list, dict or the like that stood in an attribute, and what was in it then."""

    original: object  # stands for it, the same for one list in several attributes
    value: Any


@dataclass(slots=True)
class _Run:
    """Calls of a module that met the same in its attributes."""

    last: int  # the moment of the last one
    found: dict[str, Any]


class PastAttributes:
    """What stood in the attributes of the modules of a model at each moment."""

    def __init__(self) -> None:
        """Begin with nothing known."""
        self._runs: dict[nn.Module, list[_Run]] = {}
        self._called: set[nn.Module] = set()
        self._tensors: dict[int, Was] = {}  # as last seen, by id
        # By id: what stands for a list or the like, and where it was first seen.
        self._containers: dict[int, tuple[object, dict[str, Any], str]] = {}
        self._watched: dict[nn.Module, bool] = {}

    def look_at_called(self, module: nn.Module, moment: int) -> None:
        """Keep what a call meets that begins now."""
        if self._watches(module):
            self._called.add(module)
            self._look_at(module, moment)

    def look_at_uncalled(self, modules: Iterable[nn.Module], moment: int) -> None:
        """Keep what a forward may have met that ends now, where no call has told."""
        for module in modules:
            if module not in self._called and self._watches(module):
                self._look_at(module, moment)

    def end(self) -> None:
        """Keep what the last calls have left."""
        for module in self._called:
            self._look_at(module, sys.maxsize)

    def at(self, module: nn.Module, moment: int) -> dict[str, Any] | None:
        """Return what stood in the attributes of a module at a moment, by name.

        That is what its next call met: only the module itself, we take it, changes them
        while a forward runs.

        Returns:
            The values, each tensor as a `Was`, and what may hold some as `Held`;
            ``None`` where nobody looked.
        """
        runs = self._runs.get(module, [])
        place = bisect_left(runs, moment, key=attrgetter("last"))
        return runs[place].found if place < len(runs) else None

    def _watches(self, module: nn.Module) -> bool:
        """Tell whether somebody may change an attribute, the module itself or another.

        In modules of torch this is a setting as the share of what dropout drops.
        """
        known = self._watched.get(module)
        if known is None:
            known = self._watched[module] = not is_of_torch(type(module)) or any(
                isinstance(value, float) and name != "eps"
                for name, value in vars(module).items()
            )
        return known

    def _look_at(self, module: nn.Module, moment: int) -> None:
        state = vars(module)
        found: dict[str, Any] = {}
        for name, value in state.items():
            if name not in OF_TORCH:
                holds = may_hold(type(cast(object, value)))
                found[name] = self._stood(value, state, name) if holds else value
        runs = self._runs.setdefault(module, [])
        if runs and _are_same(runs[-1].found, found):
            runs[-1].last = moment
        else:
            runs.append(_Run(moment, found))

    def _stood(self, value: Any, state: dict[str, Any], name: str) -> Any:
        kept = self._kept(value, DEPTH)
        if kept is value or isinstance(kept, Was):
            return kept
        return Held(self._stands_for(value, state, name), kept)

    def _stands_for(self, value: Any, state: dict[str, Any], name: str) -> object:
        """Return what stands for a list or the like, which is not to be held.

        By its id we know it again, as long as it stands where it was first seen.
        """
        known = self._containers.get(id(value))
        if known is not None and known[1].get(known[2]) is value:
            return known[0]
        made = object()
        self._containers[id(value)] = made, state, name
        return made

    def _kept(self, value: Any, depth: int) -> Any:
        """Return what keeps a value; of what may be anything, there is one."""
        if type(value) is Tensor:
            return self._was(value)
        if type(value) not in CONTAINERS or not depth or len(value) > MANY:
            return value
        is_dict = isinstance(value, dict)
        held: Any = cast(Any, value).values() if is_dict else value
        made = copy.copy(value)  # somebody may put other things there
        if isinstance(value, set) or not any(map(may_hold, set(map(type, held)))):
            return made
        if isinstance(value, tuple):
            return tuple(self._kept(it, depth - 1) for it in cast(Any, value))
        places: Any = cast(Any, value).items() if is_dict else enumerate(held)
        for place, it in places:
            made[place] = self._kept(it, depth - 1)
        return made

    def _was(self, tensor: Tensor) -> Was:
        version = UNKNOWN if tensor.is_inference() else tensor._version
        known = self._tensors.get(id(tensor))
        if (
            known is None
            or known.original() is not tensor
            or known.version != version
            or version == UNKNOWN
            or known.requires_grad != tensor.requires_grad
        ):
            original = weakref.ref(tensor)
            value = value_of(tensor)
            known = Was(original, version, tensor.requires_grad, value)
            self._tensors[id(tensor)] = known
        return known


@cache
def may_hold(kind: type[Any]) -> bool:
    """Tell whether things of a class may be tensors, or have some in them."""
    return kind in CONTAINERS or issubclass(kind, Tensor)


def _are_same(a: dict[str, Any], b: dict[str, Any]) -> bool:
    return [*a] == [*b] and all(map(is_, a.values(), b.values()))
