"""The nodes of a graph between its outputs and its inputs."""

from collections.abc import Iterator, Sequence, Set
from typing import Any, NamedTuple, TypeAlias

from torch.autograd.graph import Node

from gradlib.edges import Edge
from gradlib.private.nodes import AccumulateGrad

Edges: TypeAlias = tuple[Edge, ...]
"""All edges of a node; one that leads nowhere has ``None`` for its node."""


class Way(NamedTuple):
    """The nodes on a way through a graph.

    Attributes:
        led: Each node before those that it leads to, with its edges that lead on to an
            end; the nodes of the ends are included.
        positions: Of each node of which not all edges do, the numbers of those that do.
    """

    led: dict[Node, list[Edge]]
    positions: dict[Node, tuple[int, ...]]


def between(starts: Sequence[Node], ends: Set[Edge]) -> Way:
    """Return the way from `starts` to `ends`."""
    way: dict[Node, list[Edge]] = {}
    positions: dict[Node, tuple[int, ...]] = {}
    at_ends = {node for node, _ in ends}
    for node, edges in _from_below(starts):
        led = [it for it in edges if way.get(it[0]) or it in ends]
        if led or node in at_ends:
            way[node] = led
            if len(led) < len(edges):
                positions[node] = tuple([i for i, it in enumerate(edges) if it in led])
    return Way(dict(reversed(way.items())), positions)


def _from_below(starts: Sequence[Node]) -> Iterator[tuple[Node, Edges]]:
    """Yield all nodes reached from `starts`, each after those that it leads to.

    torch makes a node's list of edges anew for each call, so each is asked once.
    """
    seen: set[Node | None] = {None}
    stack: list[tuple[Node, Edges | None]] = [(start, None) for start in starts]
    while stack:
        node, edges = stack.pop()
        if edges is not None:
            yield node, edges  # all nodes that it leads to are done
        elif node not in seen:
            seen.add(node)
            edges: Any = node.next_functions
            stack.append((node, edges))
            for below, _ in edges:
                if below in seen:
                    continue
                if below.__class__ is AccumulateGrad:  # of a leaf: leads nowhere
                    seen.add(below)
                    yield below, ()
                else:
                    stack.append((below, None))
