"""The gradients that the recorder gathers for a call, by where they flow."""

from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass
from functools import reduce
from operator import add
from types import MappingProxyType
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from gradlib.private.modes import unseen

Grads: TypeAlias = dict[int, Any]
"""What was kept of a tensor's gradients, by torch's number of the backward pass."""

Key: TypeAlias = int | str
"""A position among the flat inputs or outputs, or the name of an own parameter."""

Left: TypeAlias = tuple[nn.Module, str, int]
"""Where a call left a tensor: the module, the name of its attribute or buffer, and the
place among the tensors there."""

ARGUMENT = ""
"""Stands for the name where a call left a tensor in a container that it was given."""


@dataclass(slots=True)
class Sum:
    """The sum of the parts of a gradient that have come, and what to keep of it."""

    total: Tensor
    missing: int
    keep: Callable[[Tensor], Any]


def whole(parts: Sequence[Any]) -> Any:
    """Return what is kept of a gradient that came in `parts`; ``None`` for none."""
    if not parts:
        return None
    with unseen():
        if isinstance(parts[0], Sum):
            return parts[0].keep(reduce(add, (part.total for part in parts)))
        return reduce(add, parts)


def less(total: Tensor, own: Tensor | None) -> Tensor | None:
    """Return a gradient without a part of it; ``None`` if nothing is left."""
    if own is None:
        return total
    with unseen():
        return None if torch.equal(total, own) else total - own


class Flow:
    """The gradients gathered for one computation of a call.

    What requires no grad has no entry.
    """

    # torch's numbers of the passes that went through the graph which an earlier pass
    # with create_graph=True made in this call.
    gone_through: Set[int] = frozenset[int]()
    # Our number of the first pass after one with is_grads_batched and
    # create_graph=True, which has no number itself.
    behind_batched: int | None = None
    # Whether the call's backward returned a tensor that it had saved, in a pass with
    # create_graph=True.
    gave_back = False
    # Whether the call put tensors where only a backward pass through them shows it, and
    # torch's numbers of the passes that went through some before that was seen.
    left_elsewhere = False
    missed: Set[int] = frozenset[int]()
    # torch's numbers of the passes that reached an output before the call returned it:
    # a pass inside the call, or one before the call returned a leaf.
    earlier: Set[int] = frozenset[int]()
    # Where the call left tensors for later ones: of each of these, and of each output,
    # all gradients, and those that the call itself has computed.
    alone: Mapping[Key | Left, tuple[Grads, Grads]] = MappingProxyType({})

    def __init__(self) -> None:
        """Begin without entries."""
        self.shares: dict[Key, Grads] = {}
        self.totals: dict[Key, Grads] = {}
        self.outputs: dict[Key, Grads] = {}

    def gathered(self, what: str) -> dict[Key, Grads]:
        """Return a field's gradients: all totals, or those since the call returned."""
        found: dict[Key, Grads] = getattr(self, what)
        if what == "totals" or not self.earlier:
            return found
        return {
            key: {it: grad for it, grad in grads.items() if it not in self.earlier}
            for key, grads in found.items()
        }
