"""Finds the narrowest tensor that every way through a graph passes."""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch.autograd.graph import GradientEdge, Node

from gradlib.edges import Edge
from gradlib.jacobian.graph import Graph


@dataclass(frozen=True)
class Cut:
    """A tensor h inside a graph, known by its edge alone.

    Attributes:
        edge: The edge that its gradient flows through.
        shape: ``(batch, *h)``.
        dtype: The dtype of h.
        device: The device of h.
    """

    edge: GradientEdge
    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    @property
    def width(self) -> int:
        """How many entries h has for each sample."""
        return math.prod(self.shape[1:])


def narrowest(graph: Graph) -> Cut | None:
    """Return the tensor ``(batch, *h)`` with the fewest entries that all ways pass.

    Args:
        graph: The graph of a single output.

    Returns:
        The tensor; ``None`` where there is none.
    """
    best: Cut | None = None
    for edge in _bottlenecks(graph):
        shape, dtype, device, _ = graph.forms[edge]
        if shape[:1] != (graph.batch,) or not dtype.is_floating_point:
            continue
        if not math.prod(shape):  # no gradient goes through it
            continue
        if best is None or math.prod(shape) < math.prod(best.shape):
            best = Cut(GradientEdge(*edge), shape, dtype, device)
    return best


def _bottlenecks(graph: Graph) -> Iterator[Edge]:
    """Yield every edge between outputs and points that all ways pass."""
    ends = {node for node, _ in graph.ends}
    # Going down in topological order, `ahead` holds the edges from nodes that are done
    # to nodes that are not. Where it holds just one, all ways pass that edge.
    ahead: set[Edge] = set()
    coming: dict[Node, set[Edge]] = {}
    for node, edges in graph.way.items():
        if node not in ends:  # edges to an end stay ahead, past all other nodes
            ahead -= coming.pop(node, set())
            ahead.update(edges)
            for edge in edges:
                coming.setdefault(edge[0], set()).add(edge)
        if len(ahead) == 1 and next(iter(ahead))[0] not in ends:
            yield next(iter(ahead))
