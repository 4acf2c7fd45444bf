"""The narrowest tensor that everything has to pass on its way to an output."""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch.autograd.graph import GradientEdge, Node

from gradlib.edges import Edge
from gradlib.jacobian.graph import Graph


@dataclass(frozen=True)
class Cut:
    """A tensor h inside a graph, of which only the edge in the graph is left.

    Attributes:
        edge: Where its gradient flows.
        shape: ``(batch, *h)``.
        dtype: Of h.
        device: Of h.
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
    """Return the tensor with the fewest entries that all ways go through.

    Args:
        graph: Of one output. It must have the batch as its first axis.

    Returns:
        ``None`` where every way has something to itself.
    """
    best: Cut | None = None
    for edge in _bottlenecks(graph):
        shape, dtype, device, _ = graph.forms[edge]
        if shape[:1] != (graph.batch,) or not dtype.is_floating_point:
            continue
        if not math.prod(shape):  # nothing goes through it
            continue
        if best is None or math.prod(shape) < math.prod(best.shape):
            best = Cut(GradientEdge(*edge), shape, dtype, device)
    return best


def _bottlenecks(graph: Graph) -> Iterator[Edge]:
    """Return every edge that all ways pass, between the ends."""
    ends = {node for node, _ in graph.ends}
    # Going down in topological order: the edges that lead from nodes behind us to
    # nodes before us. Where there is just one, everything passes it.
    ahead: set[Edge] = set()
    coming: dict[Node, set[Edge]] = {}
    for node, edges in graph.way.items():
        if node not in ends:  # what leads to an end leads on past everything else
            ahead -= coming.pop(node, set())
            ahead.update(edges)
            for edge in edges:
                coming.setdefault(edge[0], set()).add(edge)
        if len(ahead) == 1 and next(iter(ahead))[0] not in ends:
            yield next(iter(ahead))
