"""Finds the narrowest tensor that every way through a graph passes."""

import math
from collections import defaultdict
from dataclasses import dataclass

import torch
from torch.autograd.graph import GradientEdge

from gradlib.jacobian.between import Spot
from gradlib.jacobian.drawing import Drawing, kept_for_each
from gradlib.jacobian.graph import Graph


@dataclass(frozen=True)
class Cut:
    """A tensor h inside a graph, known by its edge alone.

    Attributes:
        edge: The edge that its gradient flows through.
        number: The number of that edge's node in the graph.
        shape: ``(batch, *h)``.
        dtype: The dtype of h.
        device: The device of h.
    """

    edge: GradientEdge
    number: int
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
    for node, number in _bottlenecks(graph.drawing):
        shape, dtype, device, _ = graph.drawing.forms[node, number]
        if shape[:1] != (graph.batch,) or not dtype.is_floating_point:
            continue
        if not math.prod(shape):  # no gradient goes through it
            continue
        if best is None or math.prod(shape) < math.prod(best.shape):
            edge = GradientEdge(graph.nodes[node], number)
            best = Cut(edge, node, shape, dtype, device)
    return best


@kept_for_each
def _bottlenecks(drawing: Drawing) -> list[Spot]:
    """Return every edge between outputs and points that all ways pass."""
    ends = {end[0] for end in drawing.ends if end}
    # Going down in topological order, `ahead` holds the edges from nodes that are done
    # to nodes that are not. Where it holds just one, all ways pass that edge.
    ahead: set[Spot] = set()
    coming: dict[int, set[Spot]] = defaultdict(set)
    found: list[Spot] = []
    for node, led in enumerate(drawing.led):
        if node not in ends:  # edges to an end stay ahead, past all other nodes
            ahead -= coming[node]
            ahead.update(led)
            for spot in led:
                coming[spot[0]].add(spot)
        if len(ahead) == 1 and next(iter(ahead))[0] not in ends:
            found += ahead
    return found
