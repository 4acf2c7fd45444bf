"""The Jacobian of a graph of known operations, from their structure.

Most operations work on each token, or each head, by itself. So dY/dH, for a tensor H,
is a sum of products of small tensors. These are multiplied in the cheapest order, a few
rows at a time; nothing is computed for entries that cannot depend on each other.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from gradlib.jacobian.fast.known import all_is_known
from gradlib.jacobian.fast.structure.chunks import Run
from gradlib.jacobian.fast.structure.program import Builder
from gradlib.jacobian.fast.structure.promise import promises
from gradlib.jacobian.fast.structure.rules import RULES
from gradlib.jacobian.fast.structure.terms import settle
from gradlib.jacobian.fast.structure.walk import Walk
from gradlib.jacobian.fresh import empty
from gradlib.jacobian.graph import Graph
from gradlib.jacobian.pieces import Block
from gradlib.jacobian.plan import JacobianPlan
from gradlib.private.modes import graph_is_captured

MOST = 1
"""A factor has at most this many times the entries of the Jacobian."""

WORTH = 1.3
"""How many times less work this way must take."""

LOOK = 2**22
"""How many multiply-adds take as long as finding how to compute one value."""

TURN = 2**19
"""How many multiply-adds take as long as starting a value for some of its rows."""


@dataclass(frozen=True)
class Structured:
    """How to compute the Jacobian.

    Attributes:
        bytes: How many bytes are held at most, besides the result.
        are_finite: Whether all constants are finite, where that cannot be read yet, as
            while a CUDA graph is captured: if not, the result is made NaN.
        needs_proof: Whether to compare the result with a VJP: where numbers are large,
            these steps may give another finite result than rows do.
    """

    bytes: int
    are_finite: Tensor | None
    _run: Run

    needs_proof = True

    def planned(self, plan: JacobianPlan) -> JacobianPlan:
        """Return the plan that takes this way."""
        return plan.shortened(
            "structure",
            "most operations work on each token, or each head, by itself",
            "sums of products",
            None,
            self.bytes,
        )

    def blocks(
        self, graph: Graph, out: dict[Block, Tensor] | None = None
    ) -> dict[Block, Tensor]:
        """Return the blocks, written into the contiguous tensors of `out` if given."""
        point = graph.points[0].detach()
        made = empty(graph.shape(0, 0), point) if out is None else out[0, 0]
        with torch.no_grad():
            self._run.write(made)
            if self.are_finite is not None:
                one = self.are_finite.to(made.dtype)
                made.mul_(one / one)
        return {(0, 0): made}


def find_structured(graph: Graph, plan: JacobianPlan) -> Structured | None:
    """Return how to compute one Jacobian from the structure of its graph.

    Returns:
        ``None`` where an operation is not known, where this would not take less, or
        where a constant is not finite.
    """
    root, size = graph.roots[0], math.prod(graph.shape(0, 0))
    rows, room = plan.rows_worth, plan.max_bytes - plan.result_bytes
    if not promises(graph, rows) or not all_is_known(graph.drawing, RULES):
        return None
    with torch.no_grad():
        return _found(Walk(graph, MOST * size), root, rows, room)


def _found(walk: Walk, root: Tensor, rows: float, room: int) -> Structured | None:
    if walk.total is None or not settle(walk.total):
        return None
    builder = Builder(walk.rows, root)
    builder.of_sum(walk.total, whole=True)
    run = Run(builder.values, walk.rows, root)
    each = LOOK + TURN * run.turns
    work = sum(value.work + each for value in builder.values)
    held = run.bytes_held()
    if work * WORTH > rows * walk.work or held > room:
        return None
    are_finite = builder.are_finite()
    if graph_is_captured():
        return Structured(held, are_finite, run)
    return Structured(held, None, run) if are_finite else None
