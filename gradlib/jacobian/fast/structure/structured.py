"""The Jacobian of a graph of known operations, from the structure these have.

Most operations work on each token, or each head, by itself. dY/dH is a sum of products
of small tensors, and these are multiplied in the cheapest order, a few rows at a time;
nothing is computed for entries that cannot depend on each other.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from gradlib.jacobian.fast.kernels import DTYPES
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
from gradlib.jacobian.plan import Plan
from gradlib.private.modes import graph_is_captured

MOST = 1
"""How many times as many entries as the Jacobian a factor has at most."""

WORTH = 1.3
"""How many times less work it must be."""

LOOK = 2**22
"""How many multiply-adds take as long as finding out how to compute one value."""

TURN = 2**19
"""The same of computing a value for some rows, besides its own."""


@dataclass(frozen=True)
class Structured:
    """How to compute the Jacobian.

    Attributes:
        bytes: What is held at most, besides the result.
        are_finite: Whether the numbers are that it begins with, if nobody could read it
            by now, as while a CUDA graph is captured: then the result is NaN if not.
        needs_proof: Whether a finite result may be another than rows give: where
            numbers are large, as the steps are others.
    """

    bytes: int
    are_finite: Tensor | None
    _run: Run

    needs_proof = True

    def planned(self, plan: Plan) -> Plan:
        """Return a plan to take it."""
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
        """Return the blocks, written into contiguous tensors where there are some."""
        point = graph.points[0].detach()
        made = empty(graph.shape(0, 0), point) if out is None else out[0, 0]
        with torch.no_grad():
            self._run.write(made)
            if self.are_finite is not None:
                one = self.are_finite.to(made.dtype)
                made.mul_(one / one)
        return {(0, 0): made}


def find_structured(graph: Graph, plan: Plan) -> Structured | None:
    """Return how to compute a Jacobian from the structure of its graph.

    Args:
        graph: What it is of.
        plan: How it would be computed otherwise.

    Returns:
        ``None`` where an operation is not known, where it would not take less, or
        where a number is not finite.
    """
    if len(graph.roots) != 1 or len(graph.points) != 1 or graph.shared[0]:
        return None
    root, size = graph.roots[0], math.prod(graph.shape(0, 0))
    if not size or root.dtype not in DTYPES:
        return None
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
