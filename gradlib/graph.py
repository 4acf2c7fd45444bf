"""The part of the autograd graph that one module call made."""

from collections.abc import Iterable, Iterator
from typing import NamedTuple, TypeAlias

from torch import Tensor
from torch.autograd.graph import Node

from gradlib.private import leaf_of, sequence_number

Edge: TypeAlias = tuple[Node, int]
"""Where a gradient goes: a node, and which of that node's outputs it belongs to."""

CAST = "ToCopyBackward0"  # the node of Tensor.to() and of autocast's casts


class Leaving(NamedTuple):
    """An edge out of a call's part of the graph.

    Entry `entry` of the gradients `node` computes flows into `edge`, or into `leaf`.
    """

    node: Node
    entry: int
    edge: Edge
    leaf: Tensor | None


def edges_leaving(
    roots: Iterable[Node], *, since: int, seen: set[Node]
) -> list[Leaving]:
    """Walk the nodes made since a call began, and return the edges that leave them.

    Args:
        roots: Where to begin: the nodes of whatever the call made.
        since: autograd's sequence number when the call began. Older nodes were made
            by others.
        seen: The nodes walked already; this walk's are added.

    Returns:
        The edges into older nodes and into leaves. The cast of a leaf counts as the
        leaf: autocast shares it between calls, so it belongs to none of them.
    """
    leaving: list[Leaving] = []
    stack = list(roots)
    while stack:
        node = stack.pop()
        if node in seen or sequence_number(node) < since:
            continue
        seen.add(node)
        for entry, (target, number) in enumerate(node.next_functions):
            if target is None:
                continue
            leaf = _leaf_behind(target)
            if leaf is not None or sequence_number(target) < since:
                leaving.append(Leaving(node, entry, (target, number), leaf))
            else:
                stack.append(target)
    return leaving


def edges_inside(
    roots: Iterable[Node], *, since: int
) -> Iterator[tuple[Node, int, Edge]]:
    """Yield every edge between the nodes made since a call began.

    Args:
        roots: Where to begin.
        since: autograd's sequence number when the call began.

    Yields:
        A node, the entry of its gradients, and the edge that entry flows into.
    """
    seen: set[Node] = set()
    stack = list(roots)
    while stack:
        node = stack.pop()
        if node in seen or sequence_number(node) < since:
            continue
        seen.add(node)
        for entry, (target, number) in enumerate(node.next_functions):
            if target is not None and leaf_of(target) is None:
                yield node, entry, (target, number)
                stack.append(target)


def _leaf_behind(node: Node) -> Tensor | None:
    """Return the leaf whose gradient `node` accumulates, or casts on its way there."""
    if type(node).__name__ == CAST:
        node = node.next_functions[0][0] or node
    return leaf_of(node)
