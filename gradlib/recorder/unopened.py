"""Tensors in what a call returns, or is given, that no `Tree` opens.

As in a distribution. They are not shown, but a graph that leads to them is a part of
the call.
"""

from collections import deque
from collections.abc import Iterable
from contextlib import suppress
from itertools import islice
from types import FunctionType, ModuleType
from typing import Any, cast

from torch import Tensor, nn
from torch.autograd.graph import Node

from gradlib.opaque import is_fixed
from gradlib.private.classes import slots_of

MOST = 1000
"""At how many things is looked at most: an object may hold whatever it likes."""

_CONTAINERS: tuple[Any, ...] = list, tuple, set, deque
# What may lead anywhere, and is no result.
_NO_RESULT = nn.Module, ModuleType, FunctionType


def nodes_inside(values: Iterable[object]) -> list[Node]:
    """Return the nodes of tensors in the attributes of objects, and in these in turn.

    Args:
        values: The objects. The nearest things in them are looked at first.
    """
    found: list[Node] = []
    # Each is held: its id is its own only while it lives.
    seen: dict[int, object] = {}
    waiting = deque(values)
    while waiting and len(seen) < MOST:
        thing = waiting.popleft()
        if id(thing) in seen:
            continue
        seen[id(thing)] = thing
        with suppress(Exception):  # a class may refuse to tell
            if not issubclass(type(thing), Tensor):
                waiting.extend(_held_by(thing))
            elif (node := cast(Tensor, thing).grad_fn) is not None:
                found.append(node)
    return found


def _held_by(thing: Any) -> list[Any]:
    """Return what an object holds, and have none of its class's own code run."""
    kind: type[Any] = type(cast(object, thing))
    if issubclass(kind, _NO_RESULT) or is_fixed(thing):
        return []
    own: dict[str, Any] = getattr(thing, "__dict__", {})
    held = [*islice(own.values(), MOST)]
    for slot in slots_of(kind):
        with suppress(AttributeError):  # it is empty
            held.append(slot.__get__(thing, kind))
    if issubclass(kind, dict):
        held += islice(dict[Any, Any].values(thing), MOST)
    for container in _CONTAINERS:
        if issubclass(kind, container):
            held += islice(container.__iter__(thing), MOST)
    return held
