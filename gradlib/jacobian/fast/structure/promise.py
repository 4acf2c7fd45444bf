"""Whether the structure of a graph may pay, judged from shapes alone."""

import math

from gradlib.jacobian.drawing import Drawing, kept_for_each
from gradlib.jacobian.fast.structure.contract import ENTRY
from gradlib.jacobian.graph import Graph

LOOK = 2**25
"""How many multiply-adds of passes there must be for each node to be worth a look."""

PRODUCTS = ("AddmmBackward0", "MmBackward0", "BmmBackward0", "BaddbmmBackward0")


def promises(graph: Graph, rows: float) -> bool:
    """Return whether passes take long, by products over parts of a sample, as tokens.

    Args:
        graph: The graph of one output and one input.
        rows: How many backward passes the Jacobian would take otherwise.
    """
    work, parts = _work(graph.drawing)
    long = rows * work > LOOK * len(graph.nodes)
    return long and parts > graph.batch and not graph.is_packed


@kept_for_each
def _work(drawing: Drawing) -> tuple[int, int]:
    """Return the multiply-adds of a pass, and the most vectors in one product."""
    forms = drawing.forms
    each = forms[drawing.roots[0]].dtype.itemsize
    work, most = 0, 0
    for node, name in enumerate(drawing.names):
        led = drawing.led[node]
        work += 2 * ENTRY * sum(forms[it].bytes for it in led) // each
        if name in PRODUCTS:
            shape = forms[node, 0].shape
            size = math.prod(shape)
            most = max(most, size // max(1, shape[-1]))
            work += sum(size * forms[it].shape[-1] for it in led)
    return work, most
