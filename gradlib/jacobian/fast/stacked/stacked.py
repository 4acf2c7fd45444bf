"""Backward passes for several rows at once through known operations.

Each operation gets the gradients of all vectors as if they were more samples, and goes
back with its ordinary kernel. torch's own way to have several vectors in a pass, vmap,
takes some operations one vector after the other, and others in many small steps.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor

from gradlib.jacobian import reverse
from gradlib.jacobian.chunk import at_once
from gradlib.jacobian.drawing import Drawing, Spot, kept_for_each
from gradlib.jacobian.fast.known import all_is_known
from gradlib.jacobian.fast.moves import rows_of
from gradlib.jacobian.fast.operation import operations
from gradlib.jacobian.fast.stacked.back import Back, Part
from gradlib.jacobian.fast.stacked.rules import RULES
from gradlib.jacobian.form import Form
from gradlib.jacobian.graph import Graph
from gradlib.jacobian.pass_memory import bytes_of_graph
from gradlib.jacobian.pieces import Block, written
from gradlib.jacobian.plan import BATCHED, JacobianPlan

ROWS = 8
"""With fewer rows, reading the graph and a backward pass would take longer, unless vmap
is slow.

With torch 2.13 on a core of an Intel Xeon, 3 to 6 rows of nets with convolutions or
attention took two thirds to nearly all of the time of a batched pass, and of others a
tenth less to a ninth more.
"""

_SLOW = "Convolution", "ScaledDotProduct"
"""What the names of the operations contain that vmap is slow for."""


Way: TypeAlias = tuple[Spot, Back, Mapping[int, Spot]]
"""The way back through an operation: the spot of its incoming gradient; its backward;
and by position the spot that each gradient of that goes to. It is no class, as each
call makes many anew."""


@dataclass(frozen=True)
class Stacked:
    """How to go back through a graph.

    Attributes:
        ways: The ways through all operations, each before those that it leads to.
        drawing: The drawing of the graph.
        chunk: How many vectors a pass takes.
        vector_bytes: How many bytes are held for each vector, by estimate.
        slope_bytes: How many bytes are held for all.
        needs_proof: False: each vector takes the same steps as in a pass of its own.
    """

    ways: Sequence[Way]
    drawing: Drawing
    chunk: int
    vector_bytes: int
    slope_bytes: int

    needs_proof = False

    def planned(self, plan: JacobianPlan) -> JacobianPlan:
        """Return the plan that takes this way."""
        return plan.together(
            "stacked",
            "each operation can take rows as more samples",
            self.chunk,
            self.slope_bytes,
            self.vector_bytes,
        )

    def blocks(
        self, graph: Graph, out: dict[Block, Tensor] | None = None
    ) -> dict[Block, Tensor]:
        """Return the blocks, written into the contiguous tensors of `out` if given."""
        with torch.no_grad():
            pieces = reverse.pieces(graph, self.chunk, go_back=self._way_back(graph))
            return written(graph, pieces, out)

    def _way_back(self, graph: Graph) -> reverse.GoBack:
        """Return a function that gives VJPs of several vectors, as `passes.pull`."""
        starts = dict(zip(map(id, graph.roots), self.drawing.roots, strict=True))
        return lambda output, _, vectors: self._go_back(starts[id(output)], vectors)

    def _go_back(self, start: Spot, vectors: Tensor) -> list[Tensor | None]:
        came = _Gradients(self.drawing.forms, len(vectors))
        came.add(start, vectors)
        for spot, back, given in self.ways:
            grad = came.taken(spot)
            if grad is not None:
                grads = back(grad)
                for i, after in given.items():
                    came.add(after, grads[i])
        return [came.taken(it) for it in self.drawing.ends if it is not None]


class _Gradients:
    """The gradients that have come to each spot so far, ``(vectors, *shape)``."""

    def __init__(self, forms: Mapping[Spot, Form], count: int) -> None:
        self._forms = forms
        self._count = count
        self._sums: dict[Spot, Tensor] = {}
        self._own: set[Spot] = set()  # whose sum is in memory of its own
        # Parts that wait for others, at spots where no whole gradient has come.
        self._parts: dict[Spot, list[Part]] = {}
        self._rows: dict[Spot, int] = {}  # how many rows these have

    def taken(self, spot: Spot) -> Tensor | None:
        """Return the gradient that has come to a spot, and forget it."""
        if spot in self._parts:
            parts = self._parts.pop(spot)
            if self._are_all(spot, parts):
                return _joined([it.values for it in parts], parts[0].dim)
            self._write(spot, parts)
        return self._sums.pop(spot, None)

    def add(self, spot: Spot, grad: Tensor | Part) -> None:
        """Add a gradient to those that have come to a spot."""
        if isinstance(grad, Part):
            self._add_part(spot, grad)
            return
        if spot in self._parts:
            self._write(spot, self._parts.pop(spot))
        before = self._sums.get(spot)
        if before is None:
            self._sums[spot] = grad
        elif spot in self._own:
            before.add_(grad)
        else:
            self._sums[spot] = before + grad
            self._own.add(spot)

    def _add_part(self, spot: Spot, part: Part) -> None:
        """Let a part wait for others, while they have no more rows than the whole."""
        parts = self._parts.setdefault(spot, [])
        parts.append(part)
        self._rows[spot] = rows = self._rows.get(spot, 0) + len(part.rows)
        if spot in self._sums or rows > self._forms[spot].shape[part.dim - 1]:
            self._write(spot, self._parts.pop(spot))

    def _are_all(self, spot: Spot, parts: list[Part]) -> bool:
        """Sort parts, and tell whether they are the whole, with each row once."""
        parts.sort(key=lambda it: it.rows.start)
        dim, end = parts[0].dim, 0
        for part in parts:
            start, end = end, end + len(part.rows)
            if part.dim != dim or part.rows != range(start, end):
                return False
        return end == self._forms[spot].shape[dim - 1]

    def _write(self, spot: Spot, parts: list[Part]) -> None:
        """Add parts to the gradient that has come to a spot."""
        whole = self._sums.get(spot)
        if whole is None:
            shape = self._forms[spot].shape
            whole = parts[0].values.new_zeros(self._count, *shape)
        elif spot not in self._own:
            whole = whole.clone()
        self._own.add(spot)
        self._sums[spot] = whole
        for part in parts:
            rows_of(whole, part.dim, part.rows).add_(part.values)


def _joined(parts: list[Tensor], dim: int) -> Tensor:
    """Return parts as one tensor, in the layout most likely needed next.

    Inputs have the batch first. Parts along the first dimension were moved there, as
    attention does with queries, keys and values, and the next step moves them back.
    """
    if dim > 1:
        return torch.cat(parts, dim)
    return torch.cat([it.movedim(1, -2) for it in parts], -2).movedim(-2, 1)


def find_stacked(graph: Graph, plan: JacobianPlan) -> Stacked | None:
    """Return how to go back with several rows at once, or ``None``.

    Returns:
        ``None`` where an operation is not known, or where this would not take less.
    """
    rows = plan.counts["reverse"]
    if plan.mode != "reverse" or not graph.batch:
        return None
    if not isinstance(rows, int) or plan.chunk < 2:
        return None
    if rows < ROWS and not _is_slow_for_vmap(graph.drawing):
        return None
    if not _is_known(graph.drawing) or graph.is_packed:
        return None
    chunk, each, slopes = _sizes(graph, plan)
    ways = None if chunk < 2 else _ways(graph)
    if ways is None:
        return None
    return Stacked(ways, graph.drawing, chunk, each, slopes)


@kept_for_each
def _is_slow_for_vmap(drawing: Drawing) -> bool:
    return any(it in name for name in drawing.names for it in _SLOW)


def _sizes(graph: Graph, plan: JacobianPlan) -> tuple[int, int, int]:
    """Return how many vectors a pass takes, the bytes of each, and the bytes for all.

    For all, there are slopes, about as many as gradients, and the scores of attention,
    which torch's kernels do not keep.
    """
    scores = [_bytes_of_scores(graph.nodes[it]) for it in _attentions(graph.drawing)]
    slopes = bytes_of_graph(graph.drawing) + 2 * sum(scores)
    most = max(scores, default=0)
    each = plan.pass_bytes + most
    # torch's kernel is faster, one vector at a time.
    if graph.on_cpu and most > plan.pass_bytes:
        return 0, each, slopes
    room = plan.max_bytes - plan.result_bytes - slopes
    fitting = at_once(
        room, BATCHED * each, each, convolution=plan.convolution, on_cpu=graph.on_cpu
    )
    return min(plan.chunk, fitting), each, slopes


@kept_for_each
def _attentions(drawing: Drawing) -> list[int]:
    """Return the numbers of the nodes of attention."""
    return [i for i, name in enumerate(drawing.names) if "Attention" in name]


def _bytes_of_scores(node: Any) -> int:
    query, key = node._saved_query, node._saved_key
    return query[..., 0].numel() * key.shape[-2] * query.element_size()


@kept_for_each
def _is_known(drawing: Drawing) -> bool:
    return all_is_known(drawing, RULES)


def _ways(graph: Graph) -> list[Way] | None:
    """Return the way through each operation, or ``None`` where one has none."""
    nodes = graph.nodes
    ways: list[Way] = []
    for it in operations(graph.drawing):
        back = RULES[it.name](it.among(nodes))
        if back is None:
            return None
        ways.append((it.spot, back, it.given))
    return ways
