"""What modules keep in their attributes, of which a call computed again gets copies.

Copied are tensors, and lists, dicts and the like. Who would say what another object
holds: of it there is one.
"""

import copy
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Any, cast

import optree
from torch import Tensor, nn
from torch.autograd.graph import Node

from gradlib.recording.past_attributes import (
    CONTAINERS,
    DEPTH,
    MANY,
    OF_TORCH,
    Held,
    Was,
    may_hold,
)
from gradlib.values import clone


def attributes(module: nn.Module) -> list[tuple[str, Any]]:
    """Return the attributes of a module that are tensors, or may hold some."""
    return [
        (name, value)
        for name, value in vars(module).items()
        if name not in OF_TORCH and _is_copied(value)
    ]


def tensors_with_graph(value: object) -> Iterator[Tensor]:
    """Return the tensors in an attribute that gradients can flow through."""
    for leaf in optree.tree_leaves(cast(Any, value), none_is_leaf=True):
        if isinstance(leaf, Tensor) and leaf.grad_fn is not None:
            yield leaf


def nodes_left_in(module: nn.Module, given: Iterable[Any]) -> list[Node]:
    """Return the nodes of tensors that a call made and left, to be used later.

    In attributes and arguments, and in lists, dicts and the like there and in these:
    not in one of more than `MANY` things, since this is asked at every call.

    Args:
        module: Whose call it was.
        given: Its arguments.
    """
    own = vars(module)
    places = [own[name] for name in own.keys() - OF_TORCH]
    return _nodes_in([*places, *given], DEPTH)


def _nodes_in(entries: Collection[Any], depth: int) -> list[Node]:
    found: list[Node] = []
    for kind in filter(may_hold, set(map(type, entries))):
        for entry in entries:
            if type(entry) is not kind:
                continue
            if isinstance(entry, Tensor):
                found += [entry.grad_fn] if entry.grad_fn is not None else []
            elif depth > 1 and len(entry) <= MANY:
                is_dict = isinstance(entry, dict)
                held: Any = cast(Any, entry).values() if is_dict else entry
                found += _nodes_in(held, depth - 1)
    return found


class Copies:
    """Copies of what stands in attributes: of what stands in two places, one."""

    def __init__(self, change: Callable[[Tensor], Tensor]) -> None:
        """Begin with none; `change` gives what to copy instead of a tensor."""
        self._change = change
        # The original is held too: its id is its own only while it lives.
        self._made: dict[int, tuple[Any, Any]] = {}

    def know(self, original: Tensor | None, made: Tensor) -> None:
        """Take what was made of a parameter or buffer: an attribute may hold it too."""
        if original is not None:
            self._made[id(original)] = original, made

    def of(self, value: Any) -> Any:
        """Return the copy of a tensor, of what it was, or of a container of these."""
        if not _is_copied(value):
            return value
        original = _original(value)
        if id(original) not in self._made:
            self._made[id(original)] = original, self._copied(value)
        return self._made[id(original)][1]

    def __contains__(self, tensor: Tensor) -> bool:
        """Tell whether a tensor is one of the copies."""
        return any(made is tensor for _, made in self._made.values())

    def _copied(self, value: Any) -> Any:
        if isinstance(value, Held):
            value = value.value
        if isinstance(value, set):
            return copy.copy(cast(set[Any], value))
        if not isinstance(value, Tensor | Was):
            return cast(Any, optree).tree_map(self.of, value, none_is_leaf=True)
        kept = value.value if isinstance(value, Was) else value.detach()
        # Memory shared lazily would not do: it may be the module's own, and to whoever
        # gives such a tensor another size torch raises an error.
        made = self._change(kept).clone()
        # No leaf: torch lets nobody write to one that requires grad.
        return clone(made.requires_grad_()) if value.requires_grad else made


def _is_copied(value: object) -> bool:
    return isinstance(value, Tensor | Was | Held) or type(value) in CONTAINERS


def _original(value: Any) -> Any:
    """Return what a copy is one of; of a tensor that is gone, what stands for it."""
    if isinstance(value, Held):
        return value.original
    if not isinstance(value, Was):
        return value
    tensor = value.original()
    return value.original if tensor is None else tensor
