"""Tensors in objects that no `Tree` opens, such as a distribution.

A call returns such an object, or is given it. Its tensors are not shown, but the graph
that leads to them is a part of the call.
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
from gradlib.private.classes import in_slots

MOST = 1000
"""How many things are looked at, at most, as an object may hold anything."""

_CONTAINERS: tuple[Any, ...] = list, tuple, set, deque
# These may lead anywhere, and are no result.
_NO_RESULT = nn.Module, ModuleType, FunctionType


def nodes_inside(values: Iterable[object]) -> list[Node]:
    """Return the nodes of the tensors that objects hold, directly or at any depth.

    Args:
        values: The objects. The things nearest to them are looked at first.
    """
    nodes: list[Node] = []
    # Each thing is held, as its id is unique only while it lives.
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
                nodes.append(node)
    return nodes


def _held_by(thing: Any) -> list[Any]:
    """Return what an object holds, without running code of its class."""
    kind: type[Any] = type(cast(object, thing))
    if issubclass(kind, _NO_RESULT) or is_fixed(thing):
        return []
    held: list[Any] = []
    with suppress(AttributeError):  # it has slots alone; getattr() would run its code
        held += islice(object.__getattribute__(thing, "__dict__").values(), MOST)
    held += in_slots(thing).values()
    if issubclass(kind, dict):
        held += islice(dict[Any, Any].values(thing), MOST)
    for container in _CONTAINERS:
        if issubclass(kind, container):
            held += islice(container.__iter__(thing), MOST)
    return held
