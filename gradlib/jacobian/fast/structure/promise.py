"""Whether a graph is worth a closer look, from the shapes on its way alone."""

import math

from gradlib.jacobian.fast.structure.contract import ENTRY
from gradlib.jacobian.fast.structure.rules import RULES
from gradlib.jacobian.graph import Graph

LOOK = 2**25
"""How many multiply-adds of passes a node must have for a look at it to be short."""

PRODUCTS = ("AddmmBackward0", "MmBackward0", "BmmBackward0", "BaddbmmBackward0")


def promises(graph: Graph, rows: float) -> bool:
    """Return whether all is known, and products of parts of a sample take long.

    Args:
        graph: Of one output and one input.
        rows: How many backward passes it would take otherwise.
    """
    batch, way = graph.batch, graph.way
    forms, each = graph.forms, graph.roots[0].element_size()
    # Most graphs are small: no node has more work than the largest of all could have.
    largest = max(max(it.bytes // each, math.prod(it.shape)) for it in graph.kinds)
    widest = max(max(it.shape, default=1) for it in graph.kinds)
    edges = sum(map(len, way.values()))
    if rows * edges * largest * (2 * ENTRY + widest) <= LOOK * len(way):
        return False
    end = graph.ends[0][0]
    work, parts = 0, False
    for node, places in way.items():
        name = node.name()
        if node is not end and name not in RULES:
            return False
        work += 2 * ENTRY * sum(forms[it].bytes for it in places) // each
        if name in PRODUCTS:
            shape = forms[node, 0].shape
            size = math.prod(shape)
            parts = parts or size > batch * shape[-1]
            work += sum(size * forms[it].shape[-1] for it in places)
    return parts and rows * work > LOOK * len(way) and not graph.is_packed
