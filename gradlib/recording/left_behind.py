"""The tensors with a graph that a call has left where they may be used later."""

from collections.abc import Callable, Collection, Iterable, Iterator
from functools import partial
from operator import attrgetter
from typing import Any, cast

from torch import Tensor, nn
from torch.autograd.graph import Node
from torch.distributions import Distribution

from gradlib.private.modules import own_buffers
from gradlib.recording.past_attributes import (
    CONTAINERS,
    DEPTH,
    MANY,
    OF_TORCH,
    things_in,
)


def left_in(module: nn.Module) -> Iterator[tuple[str, int, Tensor]]:
    """Yield the tensors in attributes and buffers that have a graph.

    Each comes with the name of the attribute, and its place among the tensors there.
    """
    own = vars(module).copy().items()
    kept = [(name, it) for name, it in own if name not in OF_TORCH]
    for name, value in [*kept, *dict(own_buffers(module)).items()]:
        for place, tensor in left_in_arguments([value]):
            yield name, place, tensor


def left_in_arguments(given: Iterable[Any]) -> Iterator[tuple[int, Tensor]]:
    """Yield the tensors in arguments that have a graph, each with its place there."""
    for place, tensor in enumerate(_tensors_in([*given], DEPTH)):
        if _has_graph(tensor):
            yield place, tensor


def nodes_left_in(module: nn.Module, given: Iterable[Any]) -> list[Node]:
    """Return the nodes of tensors that a call left where they may be used later.

    It looks in attributes, buffers and arguments, and in lists, dicts, distributions
    and the like there, `DEPTH` deep. It leaves out a container of more than `MANY`
    things, all that is inside included, as it runs at every call.
    """
    own = vars(module)  # other threads may change it, and what is in it
    attributes = map(own.get, own.keys() - OF_TORCH)
    every = *attributes, *dict(own_buffers(module)).values(), *given
    found = _tensors_in(every, DEPTH)
    try:
        return [*filter(None, map(_NODE, found))]
    except Exception:  # a class of tensors may refuse to tell
        return [*map(_NODE, filter(_has_graph, found))]


_NODE: Callable[[Tensor], Node] = attrgetter("grad_fn")


def _has_graph(tensor: Tensor) -> bool:
    try:
        return tensor.grad_fn is not None
    except Exception:
        return False


def _tensors_in(
    entries: Collection[Any], depth: int, room: list[int] | None = None
) -> list[Tensor]:
    """Return the tensors among some things, and inside them, in their order.

    Args:
        entries: The things.
        depth: How deep to look.
        room: How many things may yet come; `MANY` in each of `entries` if not given.
    """
    found: list[Tensor] = []
    kinds = set(filter(_may_hold, set(map(type, entries))))
    for entry in entries if kinds else ():
        if type(entry) not in kinds:
            continue
        if issubclass(type(entry), Tensor):
            found.append(entry)
        elif depth > 1:
            held, left = _held_by(entry), room or [MANY]
            if len(held) <= left[0]:
                left[0] -= len(held)
                found += _tensors_in([*held], depth - 1, left)
    return found


def _may_hold(kind: type[Any]) -> bool:
    """Tell whether things of a class may be tensors, or have some in them."""
    return kind in CONTAINERS or issubclass(kind, _MAY_HOLD)


_MAY_HOLD = Tensor, tuple, dict, Distribution


def _held_by(container: Any) -> Collection[Any]:
    """Return what a container holds, without running code of its class."""
    kind: type[Any] = type(cast(object, container))
    if issubclass(kind, Distribution):
        return cast(dict[str, Any], vars(container)).values()
    if issubclass(kind, dict):
        return dict[Any, Any].values(container)
    if kind is partial:
        return things_in(container)
    if issubclass(kind, tuple):
        return tuple[Any, ...].__getitem__(container, slice(None))
    return container
