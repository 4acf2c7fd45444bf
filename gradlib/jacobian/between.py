"""The nodes of a graph between its outputs and its inputs."""

from collections.abc import Iterator, Sequence, Set

from torch.autograd.graph import Node

from gradlib.edges import Edge, edges_of
from gradlib.private.nodes import AccumulateGrad


def between(starts: Sequence[Node], ends: Set[Edge]) -> dict[Node, list[Edge]]:
    """Return the nodes on a way from `starts` to `ends`.

    Returns:
        Each node before those that it leads to, with its edges that lead on to an end;
        the nodes of the ends are included.
    """
    way: dict[Node, list[Edge]] = {}
    at_ends = {node for node, _ in ends}
    for node, edges in _from_below(starts):
        led = edges and [it for it in edges if it in ends or way.get(it[0])]
        if led or node in at_ends:
            way[node] = led
    return dict(reversed(way.items()))


def in_order(starts: Sequence[Node]) -> list[Node]:
    """Return all nodes reached from `starts`, each before those that it leads to."""
    return [node for node, _ in _from_below(starts)][::-1]


def _from_below(starts: Sequence[Node]) -> Iterator[tuple[Node, list[Edge]]]:
    """Yield all nodes reached from `starts`, each after those that it leads to.

    torch makes a node's list of edges anew for each call, so each is asked once.
    """
    seen: set[Node] = set()
    stack: list[tuple[Node, list[Edge] | None]] = [(start, None) for start in starts]
    while stack:
        node, edges = stack.pop()
        if edges is not None:
            yield node, edges  # all nodes that it leads to are done
        elif node not in seen:
            seen.add(node)
            led = edges_of(node)
            stack.append((node, led))
            for below, _ in led:
                if below in seen:
                    continue
                if below.__class__ is AccumulateGrad:  # of a leaf: leads nowhere
                    seen.add(below)
                    yield below, []
                else:
                    stack.append((below, None))
