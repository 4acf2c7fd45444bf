"""The nodes of a graph between its outputs and its inputs, by their numbers."""

from collections.abc import Iterable, Iterator, Sequence, Set
from typing import TypeAlias

Spot: TypeAlias = tuple[int, int]
"""An edge: the number of its node, and which output of that node's operation it is."""

NOWHERE = -1
"""The number of the node of an edge that leads nowhere."""


def between(
    edges: Sequence[Sequence[Spot]], starts: Iterable[int], ends: Set[Spot]
) -> dict[int, list[int]]:
    """Return the nodes on the way from `starts` to `ends`.

    Args:
        edges: All edges of each node.
        starts: The nodes that the way begins at.
        ends: The edges that it ends at.

    Returns:
        Each node before those that it leads to, with the positions of its edges that
        lead on to an end; the nodes of the ends are included.
    """
    way: dict[int, list[int]] = {}
    at_ends = {node for node, _ in ends}
    for node in _from_below(edges, starts):
        led = [i for i, it in enumerate(edges[node]) if way.get(it[0]) or it in ends]
        if led or node in at_ends:
            way[node] = led
    return dict(reversed(way.items()))


def _from_below(
    edges: Sequence[Sequence[Spot]], starts: Iterable[int]
) -> Iterator[int]:
    """Yield all nodes reached from `starts`, each after those that it leads to."""
    seen = {NOWHERE}
    stack = [(start, False) for start in starts]
    while stack:
        node, below_is_done = stack.pop()
        if below_is_done:
            yield node
        elif node not in seen:
            seen.add(node)
            stack.append((node, True))
            for below, _ in edges[node]:
                if below in seen:
                    continue
                if edges[below]:
                    stack.append((below, False))
                else:  # a leaf
                    seen.add(below)
                    yield below
