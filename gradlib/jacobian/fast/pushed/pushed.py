"""Columns by tangents that go forward through known operations, several at once.

Each operation gets the tangents of all columns as if they were more samples. The mode
``"forward"`` differentiates a backward pass instead, and torch's own way to have
several vectors in a pass, vmap, takes some operations one vector after the other.
"""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from gradlib.jacobian import forward
from gradlib.jacobian.chunk import at_once
from gradlib.jacobian.drawing import Drawing, Spot
from gradlib.jacobian.fast.known import all_is_known
from gradlib.jacobian.fast.operation import operations
from gradlib.jacobian.fast.pushed.apart import keeps_apart
from gradlib.jacobian.fast.pushed.forth import Forth
from gradlib.jacobian.fast.pushed.rules import RULES
from gradlib.jacobian.graph import Graph
from gradlib.jacobian.pass_memory import bytes_of_graph
from gradlib.jacobian.pieces import Block, written
from gradlib.jacobian.plan import BATCHED, JacobianPlan

CONVOLVED = 6 * 2**20
"""How many bytes of tangents a pass has at most on a CPU, where there are convolutions:
going forward these are fast with more than going back.

On a core of an AMD EPYC with torch 2.13, six networks took up to a quarter less time
with this than with half as much, and up to a quarter more, or as long, with twice as
much.
"""

ROWS, SMALL = 8, 2**20
"""With fewer rows than that, of fewer bytes of gradients in all, rows are computed in
one pass: reading the graph would take longer.

With torch 2.13 on a core of an AMD EPYC, eight networks of 2 to 7 rows took up to a
third longer forward below that, and above it from about as long to three fifths of it.
"""


class Passed(NamedTuple):
    """An operation that tangents pass.

    Attributes:
        spot: The spot of its output.
        forth: Its JVP.
        given: The spots of its inputs, by position.
        keeps_apart: Whether it is known to mix no samples.
    """

    spot: Spot
    forth: Forth
    given: dict[int, Spot]
    keeps_apart: bool


@dataclass(frozen=True)
class Pushed:
    """How to go forward through a graph.

    Attributes:
        steps: The operations, each after those it gets its input from.
        drawing: The drawing of the graph.
        chunk: How many columns a pass computes.
        column_bytes: How many bytes are held for each column, by estimate.
        slope_bytes: How many bytes are held for all.
        needs_proof: Whether to compare the result with a VJP: samples may mix.
    """

    steps: Sequence[Passed]
    drawing: Drawing
    chunk: int
    column_bytes: int
    slope_bytes: int
    needs_proof: bool

    @cached_property
    def _waiting(self) -> Counter[Spot]:
        """How many operations and outputs use the tangents at each spot."""
        waiting = Counter(self.drawing.roots)
        for step in self.steps:
            waiting.update(step.given.values())
        return waiting

    def planned(self, plan: JacobianPlan) -> JacobianPlan:
        """Return the plan that takes this way."""
        return plan.together(
            "pushed",
            "each operation can take columns as more samples",
            self.chunk,
            self.slope_bytes,
            self.column_bytes,
            of="forward",
        )

    def blocks(
        self, graph: Graph, out: dict[Block, Tensor] | None = None
    ) -> dict[Block, Tensor]:
        """Return the blocks, written into the contiguous tensors of `out` if given."""
        with torch.no_grad():
            pieces = forward.pieces(graph, self.chunk, push=self._push)
            return written(graph, pieces, out)

    def _push(self, point: int, tangents: Tensor) -> list[Tensor | None]:
        """Return the tangents of each output, as `Linearized.push` does."""
        drawing = self.drawing
        start = drawing.ends[point]
        at = {} if start is None else {start: tangents}
        waiting = self._waiting.copy()
        for spot, forth, places, _ in self.steps:
            given = {i: at[it] for i, it in places.items() if it in at}
            if given:
                at[spot] = forth(given)
            for it in places.values():
                waiting[it] -= 1
                if not waiting[it]:
                    at.pop(it, None)  # no operation uses it any more
        return [at.get(root) for root in drawing.roots]


def find_pushed(graph: Graph, plan: JacobianPlan) -> Pushed | None:
    """Return how to go forward with several columns at once, or ``None``.

    Returns:
        ``None`` where an operation is not known, or where this would not take less.
    """
    if plan.mode not in ("forward", "reverse") or not graph.batch:
        return None
    if not _is_shorter(plan) or graph.is_packed:
        return None
    if not all_is_known(graph.drawing, RULES):
        return None
    slopes = bytes_of_graph(graph.drawing)
    chunk = _columns_at_once(graph, plan, slopes)
    if chunk < 1:
        return None
    steps = _steps(graph)
    if steps is None:
        return None
    mixes = not all(it.keeps_apart for it in steps)
    return Pushed(steps, graph.drawing, chunk, plan.pass_bytes, slopes, mixes)


def _is_shorter(plan: JacobianPlan) -> bool:
    """Tell whether there are fewer columns than rows, and not too few rows."""
    rows, columns = plan.counts["reverse"], plan.counts["forward"]
    if not isinstance(rows, int) or not isinstance(columns, int):
        return False
    few = plan.mode == "reverse" and rows < ROWS and rows * plan.pass_bytes < SMALL
    return 0 < columns < rows and not few


def _columns_at_once(graph: Graph, plan: JacobianPlan, slopes: int) -> int:
    """Return how many columns a pass computes; 0 where there is no room."""
    columns, each = plan.counts["forward"], plan.pass_bytes
    assert isinstance(columns, int), "they are asked for"
    room, held = plan.max_bytes - plan.result_bytes - slopes, BATCHED * each
    if room < held:
        return 0
    fitting = at_once(
        room,
        held,
        each,
        convolution=plan.convolution,
        on_cpu=graph.on_cpu,
        convolved=CONVOLVED,
    )
    passes = math.ceil(columns / max(1, fitting))
    return math.ceil(columns / passes)  # all passes alike


def _steps(graph: Graph) -> list[Passed] | None:
    """Return the operations in the order of the forward pass, if each has a rule."""
    nodes = graph.nodes
    steps: list[Passed] = []
    for it in reversed(operations(graph.drawing)):
        op = it.among(nodes)
        forth = RULES[it.name](op)
        if forth is None:
            return None
        apart = keeps_apart(it.name, op, graph.batch)
        steps.append(Passed(it.spot, forth, it.given, apart))
    return steps
