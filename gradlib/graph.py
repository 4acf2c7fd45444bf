"""The part of the autograd graph that one module call made."""

from collections.abc import Iterable, Iterator
from typing import NamedTuple, TypeAlias

from torch import Tensor
from torch.autograd.graph import Node

from gradlib.private import leaf_of, sequence_number

Edge: TypeAlias = tuple[Node, int]
"""Where a gradient goes: a node, and which of that node's outputs it belongs to."""

CAST = "ToCopyBackward0"  # the node of Tensor.to() and of autocast's casts


class GraphEdge(NamedTuple):
    """Entry `entry` of the gradients that `node` computes flows into `edge`."""

    node: Node
    entry: int
    edge: Edge
    leaf: Tensor | None  # the tensor it ends in, where it does

    def leads_out(self, since: int) -> bool:
        """Tell whether it leads out of what was made since: to a leaf, or back."""
        return self.leaf is not None or sequence_number(self.edge[0]) < since


def edges_of_call(
    roots: Iterable[Node], *, since: int, seen: set[Node]
) -> Iterator[GraphEdge]:
    """Walk the nodes made since a call began.

    Args:
        roots: Where to begin: the nodes of whatever the call made.
        since: autograd's sequence number when the call began. Older nodes were made
            by others.
        seen: The nodes walked already; this walk's are added.

    Yields:
        Every edge of those nodes. An edge into an older node or into a leaf leads out.
        The cast of a leaf counts as the leaf: autocast shares it between calls, so it
        belongs to none of them.
    """
    stack = list(roots)
    while stack:
        node = stack.pop()
        if node in seen or sequence_number(node) < since:
            continue
        seen.add(node)
        for entry, (target, number) in enumerate(node.next_functions):
            if target is None:
                continue
            edge = GraphEdge(node, entry, (target, number), _leaf_behind(target))
            yield edge
            if not edge.leads_out(since):
                stack.append(target)


def _leaf_behind(node: Node) -> Tensor | None:
    """Return the leaf whose gradient `node` accumulates, or casts on its way there."""
    if type(node).__name__ == CAST:
        node = node.next_functions[0][0] or node
    return leaf_of(node)
