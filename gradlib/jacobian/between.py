"""The nodes between what was computed and what it was computed from."""

from collections.abc import Iterator, Sequence, Set

from torch.autograd.graph import Node

from gradlib.edges import Edge, edges_of
from gradlib.private.nodes import AccumulateGrad


def between(starts: Sequence[Node], ends: Set[Edge]) -> dict[Node, list[Edge]]:
    """Return the nodes below some from which an end can be reached.

    Returns:
        Each before those that it leads to, with the edges that lead on to an end; and
        the nodes that ends are at.
    """
    found: dict[Node, list[Edge]] = {}
    at_ends = {node for node, _ in ends}
    for node, edges in _from_below(starts):
        led = edges and [it for it in edges if it in ends or found.get(it[0])]
        if led or node in at_ends:
            found[node] = led
    return dict(reversed(found.items()))


def in_order(starts: Sequence[Node]) -> list[Node]:
    """Return the nodes below some, each before those that it leads to."""
    return [node for node, _ in _from_below(starts)][::-1]


def _from_below(starts: Sequence[Node]) -> Iterator[tuple[Node, list[Edge]]]:
    """Go through the nodes below some, each after those that it leads to.

    What a node leads to is made anew whenever it is asked, so it is asked once.
    """
    seen: set[Node] = set()
    stack: list[tuple[Node, list[Edge] | None]] = [(start, None) for start in starts]
    while stack:
        node, edges = stack.pop()
        if edges is not None:
            yield node, edges  # all below it is done
        elif node not in seen:
            seen.add(node)
            led = edges_of(node)
            stack.append((node, led))
            for below, _ in led:
                if below in seen:
                    continue
                if below.__class__ is AccumulateGrad:  # of a leaf: it leads nowhere
                    seen.add(below)
                    yield below, []
                else:
                    stack.append((below, None))
