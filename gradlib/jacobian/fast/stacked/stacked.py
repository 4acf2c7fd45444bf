"""Backward passes for several rows at once through known operations.

Each operation gets the rows of all vectors as if they were more samples, and goes back
with the kernel that it has for those. torch's own way to have several vectors in a pass
takes some operations one vector after the other, and others in many small steps.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.autograd.graph import Node

from gradlib.jacobian import reverse
from gradlib.jacobian.fast.moves import SEVERAL
from gradlib.jacobian.fast.operation import Operation
from gradlib.jacobian.fast.stacked.back import Back, Part
from gradlib.jacobian.fast.stacked.rules import RULES
from gradlib.jacobian.form import Form
from gradlib.jacobian.fresh import keep_what_is_freed
from gradlib.jacobian.graph import Graph
from gradlib.jacobian.look import Look
from gradlib.jacobian.pieces import Block, collected, fill
from gradlib.jacobian.plan import BATCHED, Plan, at_once
from gradlib.vjp.connection import Place, place_of

ROWS = 8
"""How many rows there must be to make up for reading the graph, and a backward pass."""

DTYPES = (torch.float32, torch.float64)
"""Others are rounded so much that other kernels would give another answer."""


Way: TypeAlias = tuple[Place, Back, Sequence[int], Sequence[Place]]
"""A place, how to go back from there, which of the gradients that this gives matter,
and where each goes. It is no class: there are many, and each call makes them anew."""


@dataclass(frozen=True)
class Stacked:
    """How to go back through a graph.

    Attributes:
        ways: From each place that is passed, each before those that it leads to.
        forms: Of these, and those where it ends.
        chunk: How many vectors go together.
        vector_bytes: What is held for each of them, by our count.
        slope_bytes: What is held for all.
        needs_proof: Whether a finite result may be another than rows give, which they
            do not here: each vector takes the steps that it takes there.
    """

    ways: Sequence[Way]
    forms: Mapping[Place, Form]
    chunk: int
    vector_bytes: int
    slope_bytes: int

    needs_proof = False

    def look(self, graph: Graph) -> Look:
        """Return what the Jacobian must agree with."""
        return Look.at_all(graph)

    def planned(self, plan: Plan) -> Plan:
        """Return a plan to take it."""
        taken = {"stacked": plan.work["reverse"]} if "reverse" in plan.work else {}
        return replace(
            plan,
            mode="stacked",
            why="each operation can take rows as more samples",
            chunk=self.chunk,
            counts=plan.counts | {"stacked": plan.counts["reverse"]},
            work=plan.work | taken,
            part_bytes=self.slope_bytes,
            pass_bytes=self.vector_bytes,
        )

    def blocks(
        self, graph: Graph, out: dict[Block, Tensor] | None = None
    ) -> dict[Block, Tensor]:
        """Return the blocks, written into contiguous tensors where there are some."""
        keep_what_is_freed()
        with torch.no_grad():
            pieces = reverse.pieces(graph, self.chunk, go_back=self._go_back)
            if out is None:
                return collected(graph, pieces)
            fill(graph, out, pieces)
        return out

    def _go_back(
        self, output: Tensor, inputs: Sequence[Tensor], vectors: Tensor
    ) -> list[Tensor | None]:
        """Return the VJPs of several vectors, as `passes.pull` does."""
        came = _Gradients(self.forms, len(vectors))
        came.add(place_of(output), vectors)
        for place, back, positions, places in self.ways:
            grad = came.taken(place)
            if grad is not None:
                grads = back(grad)
                for i, there in zip(positions, places, strict=True):
                    came.add(there, grads[i])
        return [came.taken(place_of(it)) for it in inputs]


class _Gradients:
    """What has come to each place so far, ``(vectors, *shape)``."""

    def __init__(self, forms: Mapping[Place, Form], count: int) -> None:
        self._forms = forms
        self._count = count
        self._sums: dict[Place, Tensor] = {}
        self._own: set[Place] = set()  # whose memory nobody else has
        # What waits at places that nothing else has come to: there may be more of it.
        self._parts: dict[Place, list[Part]] = {}
        self._rows: dict[Place, int] = {}  # how many these have

    def taken(self, place: Place) -> Tensor | None:
        """Return what has come to a place, and forget it."""
        if place in self._parts:
            parts = self._parts.pop(place)
            if self._are_all(place, parts):
                return _joined([it.values for it in parts], parts[0].dim)
            self._write(place, parts)
        return self._sums.pop(place, None)

    def add(self, place: Place, grad: Tensor | Part) -> None:
        """Add what comes to a place."""
        if isinstance(grad, Part):
            self._add_part(place, grad)
            return
        if place in self._parts:
            self._write(place, self._parts.pop(place))
        before = self._sums.get(place)
        shape = self._forms[place].shape
        if grad.shape[1:] != shape:
            grad = _summed(grad, shape)
        if before is None:
            self._sums[place] = grad
        elif place in self._own:
            before.add_(grad)
        else:
            self._sums[place] = before + grad
            self._own.add(place)

    def _add_part(self, place: Place, part: Part) -> None:
        """Let a part wait for the others, while all are no more than the whole."""
        parts = self._parts.setdefault(place, [])
        parts.append(part)
        self._rows[place] = rows = self._rows.get(place, 0) + len(part.rows)
        if place in self._sums or rows > self._forms[place].shape[part.dim - 1]:
            self._write(place, self._parts.pop(place))

    def _are_all(self, place: Place, parts: list[Part]) -> bool:
        """Tell whether parts, which are put in order, are the whole, each row once."""
        parts.sort(key=lambda it: it.rows.start)
        dim, end = parts[0].dim, 0
        for part in parts:
            start, end = end, end + len(part.rows)
            if part.dim != dim or part.rows != range(start, end):
                return False
        return end == self._forms[place].shape[dim - 1]

    def _write(self, place: Place, parts: list[Part]) -> None:
        """Add parts to what has come."""
        whole = self._sums.get(place)
        if whole is None:
            shape = self._forms[place].shape
            whole = parts[0].values.new_zeros(self._count, *shape)
        elif place not in self._own:
            whole = whole.clone()
        self._own.add(place)
        self._sums[place] = whole
        for part in parts:
            part.of(whole).add_(part.values)


def _joined(parts: list[Tensor], dim: int) -> Tensor:
    """Return parts as one, laid out as is most likely of use.

    The batch is in front of what a function is given. Where parts are in front of it,
    somebody moved them there, as attention does with queries, keys and values, and the
    next step is to move them back.
    """
    if dim > 1:
        return torch.cat(parts, dim)
    return torch.cat([it.movedim(1, -2) for it in parts], -2).movedim(-2, 1)


def find(graph: Graph, plan: Plan) -> Stacked | None:
    """Return how to go back with several rows at once; ``None`` where it is not known.

    Args:
        graph: What the Jacobian is of.
        plan: How it would be computed otherwise.
    """
    rows = plan.counts["reverse"]
    if plan.mode != "reverse" or any(graph.shared) or not graph.batch:
        return None
    if not isinstance(rows, int) or rows < ROWS or plan.chunk < 2:
        return None
    if not _all_is_known(graph) or graph.is_packed:
        return None
    try:
        with torch.no_grad():
            chunk, each, slopes = _sizes(graph, plan)
            ways = None if chunk < 2 else _ways(graph)
    except RuntimeError:  # what a node has saved was overwritten, or is gone
        return None
    if ways is None:
        return None
    return Stacked(ways, graph.forms, chunk, each, slopes)


def _sizes(graph: Graph, plan: Plan) -> tuple[int, int, int]:
    """Return how many vectors go together, what each takes, and what all share.

    torch's kernels for attention keep no scores; here they are. And there are slopes,
    about as many as gradients.
    """
    scores = [
        _bytes_of_scores(node) for node in graph.way if "Attention" in node.name()
    ]
    slopes = sum(form.bytes for form in graph.forms.values()) + 2 * sum(scores)
    most = max(scores, default=0)
    each = plan.pass_bytes + most
    on_cpu = graph.points[0].device.type == "cpu"
    if on_cpu and most > plan.pass_bytes:  # its kernel is faster, vector by vector
        return 0, each, slopes
    room = plan.max_bytes - plan.result_bytes - slopes
    fitting = at_once(
        room, BATCHED * each, each, convolution=plan.convolution, on_cpu=on_cpu
    )
    return min(plan.chunk, fitting), each, slopes


def _bytes_of_scores(node: Any) -> int:
    query, key = node._saved_query, node._saved_key
    return query[..., 0].numel() * key.shape[-2] * query.element_size()


def _all_is_known(graph: Graph) -> bool:
    """Tell whether there is a rule for every node, and all is of one plain kind."""
    dtype, device = graph.roots[0].dtype, graph.roots[0].device
    if dtype not in DTYPES:
        return False
    for form in graph.kinds:
        if form.dtype != dtype or form.device != device or form.shape == ():
            return False
    for node, number in graph.forms:
        if number and node.name() not in SEVERAL:
            return False
    # What has come to an end goes nowhere from there.
    return not any(graph.way[node] for node, _ in graph.ends) and not any(
        node.name() not in RULES for node, places in graph.way.items() if places
    )


_FIRST = (0,)  # one for all: what there is less of is collected less often


def _ways(graph: Graph) -> list[Way] | None:
    """Return the way back from each place, if every rule knows one."""
    forms = graph.forms
    others: dict[Node, list[Place]] = defaultdict(list)
    for place in forms:
        if place[1]:
            others[place[0]].append(place)
    found: list[Way] = []
    for node, places in graph.way.items():
        if not places:
            continue
        before: Any = node.next_functions
        if len(before) == 1:  # as of most
            positions: Sequence[int] = _FIRST
            shapes = {0: forms[places[0]].shape}
        else:
            positions = [i for i, it in enumerate(before) if it in places]
            shapes = {i: forms[before[i]].shape for i in positions}
        rule = RULES[node.name()]
        for place in ((node, 0), *others.get(node, ())):
            if place not in forms:  # of several outputs some may be used
                continue
            back = rule(Operation(node, place[1], forms[place], shapes))
            if back is None:
                return None
            found.append((place, back, positions, places))
    return found


def _summed(grad: Tensor, shape: Sequence[int]) -> Tensor:
    """Sum up over what was broadcast to make more of it."""
    more = grad.dim() - 1 - len(shape)
    ones = [1 + more + i for i, size in enumerate(shape) if size == 1]
    grad = grad.sum([*range(1, 1 + more), *ones], keepdim=True)
    return grad.reshape(grad.size(0), *shape)
