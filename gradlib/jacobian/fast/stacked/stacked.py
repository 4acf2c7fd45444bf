"""Backward passes for several rows at once through known operations.

Each operation gets the rows of all vectors as if they were more samples, and goes back
with the kernel that it has for those. torch's own way to have several vectors in a pass
takes some operations one vector after the other, and others in many small steps.
"""

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from gradlib.jacobian import reverse
from gradlib.jacobian.chunk import at_once
from gradlib.jacobian.drawing import Drawing, Spot, kept_for_each
from gradlib.jacobian.fast.known import all_is_known
from gradlib.jacobian.fast.operation import Operation
from gradlib.jacobian.fast.stacked.back import Back, Part
from gradlib.jacobian.fast.stacked.rules import ASK_NOTHING, IN_PARTS, RULES, Rule
from gradlib.jacobian.form import Form
from gradlib.jacobian.fresh import keep_what_is_freed
from gradlib.jacobian.graph import Graph
from gradlib.jacobian.pieces import Block, written
from gradlib.jacobian.plan import BATCHED, Plan

ROWS = 8
"""How many rows there must be to make up for reading the graph, and a backward pass."""


Way: TypeAlias = tuple[
    Spot, Sequence[tuple[Back, int]], Back, Sequence[int], Sequence[Spot]
]
"""A spot; how to go back from there while there is one gradient, and which that is; the
step that makes more of it, or goes where others come; which of those matter, and where
each goes. It is no class: there are many, and each call makes them anew."""


@dataclass(frozen=True)
class Stacked:
    """How to go back through a graph.

    Attributes:
        ways: From where gradients meet or part, each before those that it leads to.
        drawing: Of the graph.
        chunk: How many vectors go together.
        vector_bytes: What is held for each of them, by our count.
        slope_bytes: What is held for all.
        needs_proof: Whether a finite result may be another than rows give, which they
            do not here: each vector takes the steps that it takes there.
    """

    ways: Sequence[Way]
    drawing: Drawing
    chunk: int
    vector_bytes: int
    slope_bytes: int

    needs_proof = False

    def planned(self, plan: Plan) -> Plan:
        """Return a plan to take it."""
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
        """Return the blocks, written into contiguous tensors where there are some."""
        keep_what_is_freed()
        with torch.no_grad():
            pieces = reverse.pieces(graph, self.chunk, go_back=self._way_back(graph))
            return written(graph, pieces, out)

    def _way_back(self, graph: Graph) -> reverse.GoBack:
        """Return what gives the VJPs of several vectors, as `passes.pull` does."""
        starts = dict(zip(map(id, graph.roots), self.drawing.roots, strict=True))
        return lambda output, _, vectors: self._go_back(starts[id(output)], vectors)

    def _go_back(self, start: Spot, vectors: Tensor) -> list[Tensor | None]:
        came = _Gradients(self.drawing.forms, len(vectors))
        came.add(start, vectors)
        for spot, straight, back, positions, led in self.ways:
            grad: Any = came.taken(spot)
            if grad is not None:
                for through, i in straight:
                    grad = through(grad)[i]
                grads = back(grad)
                for i, there in zip(positions, led, strict=True):
                    came.add(there, grads[i])
        return [came.taken(it) for it in self.drawing.ends if it is not None]


class _Gradients:
    """What has come to each spot so far, ``(vectors, *shape)``."""

    def __init__(self, forms: Mapping[Spot, Form], count: int) -> None:
        self._forms = forms
        self._count = count
        self._sums: dict[Spot, Tensor] = {}
        self._own: set[Spot] = set()  # whose memory nobody else has
        # What waits at spots that nothing else has come to: there may be more of it.
        self._parts: dict[Spot, list[Part]] = {}
        self._rows: dict[Spot, int] = {}  # how many these have

    def taken(self, spot: Spot) -> Tensor | None:
        """Return what has come to a spot, and forget it."""
        if spot in self._parts:
            parts = self._parts.pop(spot)
            if self._are_all(spot, parts):
                return _joined([it.values for it in parts], parts[0].dim)
            self._write(spot, parts)
        return self._sums.pop(spot, None)

    def add(self, spot: Spot, grad: Tensor | Part) -> None:
        """Add what comes to a spot."""
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
        """Let a part wait for the others, while all are no more than the whole."""
        parts = self._parts.setdefault(spot, [])
        parts.append(part)
        self._rows[spot] = rows = self._rows.get(spot, 0) + len(part.rows)
        if spot in self._sums or rows > self._forms[spot].shape[part.dim - 1]:
            self._write(spot, self._parts.pop(spot))

    def _are_all(self, spot: Spot, parts: list[Part]) -> bool:
        """Tell whether parts, which are put in order, are the whole, each row once."""
        parts.sort(key=lambda it: it.rows.start)
        dim, end = parts[0].dim, 0
        for part in parts:
            start, end = end, end + len(part.rows)
            if part.dim != dim or part.rows != range(start, end):
                return False
        return end == self._forms[spot].shape[dim - 1]

    def _write(self, spot: Spot, parts: list[Part]) -> None:
        """Add parts to what has come."""
        whole = self._sums.get(spot)
        if whole is None:
            shape = self._forms[spot].shape
            whole = parts[0].values.new_zeros(self._count, *shape)
        elif spot not in self._own:
            whole = whole.clone()
        self._own.add(spot)
        self._sums[spot] = whole
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


def find_stacked(graph: Graph, plan: Plan) -> Stacked | None:
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
    steps = _steps(graph.drawing)
    if steps is None or graph.is_packed:
        return None
    chunk, each, slopes = _sizes(graph, plan)
    ways = None if chunk < 2 else _ways(graph, steps)
    if ways is None:
        return None
    return Stacked(ways, graph.drawing, chunk, each, slopes)


def _sizes(graph: Graph, plan: Plan) -> tuple[int, int, int]:
    """Return how many vectors go together, what each takes, and what all share.

    torch's kernels for attention keep no scores; here they are. And there are slopes,
    about as many as gradients.
    """
    gradients, attentions = _bytes_of_gradients(graph.drawing)
    scores = [_bytes_of_scores(graph.nodes[it]) for it in attentions]
    slopes = gradients + 2 * sum(scores)
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


@kept_for_each
def _bytes_of_gradients(drawing: Drawing) -> tuple[int, list[int]]:
    """Return what all gradients take, and which nodes are those of attention."""
    attentions = [i for i, name in enumerate(drawing.names) if "Attention" in name]
    return sum(form.bytes for form in drawing.forms.values()), attentions


def _bytes_of_scores(node: Any) -> int:
    query, key = node._saved_query, node._saved_key
    return query[..., 0].numel() * key.shape[-2] * query.element_size()


class _Step(NamedTuple):
    """What is known of a way before its node is asked for what it has saved.

    Attributes:
        node: The number of the node.
        spot: Where it begins.
        rule: Gives the way back.
        back: The way itself, where the node is not asked.
        form: Of what comes in.
        shapes: Of what goes out, by position.
        positions: Those.
        led: Where each goes.
        goes_on: Whether there is one, a whole tensor, that the next step alone gets.
    """

    node: int
    spot: Spot
    rule: Rule
    back: Back | None
    form: Form
    shapes: dict[int, tuple[int, ...]]
    positions: Sequence[int]
    led: Sequence[Spot]
    goes_on: bool = False


@kept_for_each
def _steps(drawing: Drawing) -> list[_Step] | None:
    """Return a step for each spot that is passed.

    ``None`` where there is no rule for a node, or not all is of one plain kind.
    """
    if not all_is_known(drawing, RULES):
        return None
    spots: dict[int, list[Spot]] = defaultdict(list)
    for spot in sorted(drawing.forms):  # of several outputs some may be used
        spots[spot[0]].append(spot)
    found: list[_Step] = []
    for node, led in enumerate(drawing.led):
        if not led:
            continue
        name, positions = drawing.names[node], drawing.positions[node]
        rule = RULES[name]
        shapes = {
            i: drawing.forms[spot].shape for i, spot in zip(positions, led, strict=True)
        }
        for spot in spots[node]:
            form, back = drawing.forms[spot], None
            if name in ASK_NOTHING:
                back = rule(Operation(None, spot[1], form, shapes))
            step = _Step(node, spot, rule, back, form, shapes, positions, led)
            found.append(step)
    come = Counter(drawing.roots)
    come.update(spot for step in found for spot in step.led)
    for number, (step, after) in enumerate(pairwise(found)):
        one = step.led == (after.spot,) and come[after.spot] == 1
        if one and drawing.names[step.node] not in IN_PARTS:
            found[number] = step._replace(goes_on=True)
    return found


def _ways(graph: Graph, steps: Sequence[_Step]) -> list[Way] | None:
    """Return the way back from each spot, if every rule knows one."""
    nodes = graph.nodes
    found: list[Way] = []
    start: Spot = (0, 0)
    straight: list[tuple[Back, int]] = []
    for node, spot, rule, back, form, shapes, positions, led, goes_on in steps:
        if back is None:
            back = rule(Operation(nodes[node], spot[1], form, shapes))
            if back is None:
                return None
        if not straight:
            start = spot
        if goes_on:
            straight.append((back, positions[0]))
        else:
            found.append((start, straight, back, positions, led))
            straight = []
    return found
