"""Elementwise functions: the Jacobian of a sample is diagonal.

One backward pass of ones gives the slopes. Each row would be another pass, for a single
entry that is not zero.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from gradlib.jacobian.drawing import Drawing, kept_for_each
from gradlib.jacobian.fast.slopes import ELEMENTWISE, SCALED
from gradlib.jacobian.fresh import empty
from gradlib.jacobian.graph import Graph
from gradlib.jacobian.pieces import Block
from gradlib.jacobian.plan import JacobianPlan

ROWS = 8
"""With fewer rows, several at once take no longer."""

# A batch norm in training mixes samples.
_NAMES = frozenset(it for it in ELEMENTWISE if "BatchNorm" not in it) | SCALED.keys()


class Diagonal(NamedTuple):
    """The way to the Jacobian of an elementwise function.

    Attributes:
        bytes: How many bytes the slopes take.
        needs_proof: False: the slopes are the entries, and the others are zero.
    """

    bytes: int

    needs_proof = False

    def planned(self, plan: JacobianPlan) -> JacobianPlan:
        """Return the plan that takes this way."""
        why = "each entry of the output depends on one of the input"
        return plan.shortened("diagonal", why, "one row of ones", None, self.bytes)

    def blocks(
        self, graph: Graph, out: dict[Block, Tensor] | None = None
    ) -> dict[Block, Tensor]:
        """Return the blocks, written into the contiguous tensors of `out` if given."""
        (root,), (point,) = graph.roots, graph.points
        ones = torch.ones_like(root)
        (slopes,) = torch.autograd.grad(root, point, ones, retain_graph=True)
        made = empty(graph.shape(0, 0), point) if out is None else out[0, 0]
        rows = made.zero_().view(graph.batch, graph.rows(0), graph.columns(0))
        rows.diagonal(dim1=1, dim2=2).copy_(slopes.flatten(1))
        return {(0, 0): made}


def find_diagonal(graph: Graph, plan: JacobianPlan) -> Diagonal | None:
    """Return the way to the Jacobian of one elementwise function, or ``None``."""
    if plan.rows_worth < ROWS or not _is_elementwise(graph.drawing):
        return None
    return Diagonal(graph.drawing.kinds[0].bytes)


@kept_for_each
def _is_elementwise(drawing: Drawing) -> bool:
    """Tell whether all operations are elementwise, and no shape is broadcast."""
    pairs = zip(drawing.names, drawing.led, strict=True)
    every_is = all(name in _NAMES for name, led in pairs if led)
    return every_is and len(drawing.kinds) == 1
