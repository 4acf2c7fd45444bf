"""Backward passes for several rows at once through known operations.

Each operation gets the rows of all vectors as if they were more samples, and goes back
with the kernel that it has for those. torch's own way to have several vectors in a pass
takes some operations one vector after the other, and others in many small steps.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import Node

from gradlib.jacobian import reverse
from gradlib.jacobian.fast.moves import SEVERAL
from gradlib.jacobian.fast.operation import Operation
from gradlib.jacobian.fast.stacked.back import Back, Part
from gradlib.jacobian.fast.stacked.rules import RULES
from gradlib.jacobian.form import Form
from gradlib.jacobian.graph import Graph
from gradlib.jacobian.look import Look
from gradlib.jacobian.pieces import Block, collected, fill
from gradlib.jacobian.plan import BATCHED, Plan, at_once
from gradlib.vjp.connection import Place, place_of

ROWS = 8
"""How many rows there must be to make up for reading the graph, and a backward pass."""

DTYPES = (torch.float32, torch.float64)
"""Others are rounded so much that other kernels would give another answer."""


class Way(NamedTuple):
    """How to go back from a place.

    Attributes:
        back: The rule's answer.
        led: Which of the gradients it gives matter, and where each goes.
    """

    back: Back
    led: list[tuple[int, Place]]


@dataclass(frozen=True)
class Stacked:
    """How to go back through a graph.

    Attributes:
        ways: For each place that is passed, each before those that it leads to.
        forms: Of these, and those where it ends.
        chunk: How many vectors go together.
        vector_bytes: What is held for each of them, by our count.
        slope_bytes: What is held for all.
    """

    ways: Mapping[Place, Way]
    forms: Mapping[Place, Form]
    chunk: int
    vector_bytes: int
    slope_bytes: int

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
        for place, (back, led) in self.ways.items():
            grad = came.taken(place)
            if grad is not None:
                grads = back(grad)
                for i, there in led:
                    came.add(there, grads[i])
        return [came.taken(place_of(it)) for it in inputs]


class _Gradients:
    """What has come to each place so far, ``(vectors, *shape)``."""

    def __init__(self, forms: Mapping[Place, Form], count: int) -> None:
        self._forms = forms
        self._count = count
        self._sums: dict[Place, Tensor] = {}
        self._own: set[Place] = set()  # whose memory nobody else has

    def taken(self, place: Place) -> Tensor | None:
        """Return what has come to a place, and forget it."""
        return self._sums.pop(place, None)

    def add(self, place: Place, grad: Tensor | Part) -> None:
        """Add what comes to a place."""
        before = self._sums.get(place)
        if isinstance(grad, Part):
            whole = self._writable(place, before, grad.values)
            grad.region(whole).add_(grad.values)
            return
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

    def _writable(self, place: Place, before: Tensor | None, like: Tensor) -> Tensor:
        if before is None:
            before = like.new_zeros(self._count, *self._forms[place].shape)
        elif place not in self._own:
            before = before.clone()
        self._own.add(place)
        self._sums[place] = before
        return before


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
    for (node, number), form in graph.forms.items():
        if form.dtype != dtype or form.device != device or form.shape == ():
            return False
        if number and node.name() not in SEVERAL:
            return False
    # What has come to an end goes nowhere from there.
    return not any(graph.way[node] for node, _ in graph.ends) and not any(
        node.name() not in RULES for node, places in graph.way.items() if places
    )


def _ways(graph: Graph) -> dict[Place, Way] | None:
    """Return the way back from each place, if every rule knows one."""
    forms = graph.forms
    outputs: dict[Node, list[int]] = defaultdict(list)
    for node, number in forms:
        outputs[node].append(number)
    found: dict[Place, Way] = {}
    for node, places in graph.way.items():
        if not places:
            continue
        before: Any = enumerate(node.next_functions)
        led = [(i, it) for i, it in before if it in places]
        shapes = {i: forms[it].shape for i, it in led}
        rule = RULES[node.name()]
        for number in outputs[node]:
            form = forms[node, number]
            back = rule(Operation(node, number, form, shapes))
            if back is None:
                return None
            found[node, number] = Way(back, led)
    return found


def _summed(grad: Tensor, shape: Sequence[int]) -> Tensor:
    """Sum up over what was broadcast to make more of it."""
    more = grad.dim() - 1 - len(shape)
    ones = [1 + more + i for i, size in enumerate(shape) if size == 1]
    grad = grad.sum([*range(1, 1 + more), *ones], keepdim=True)
    return grad.reshape(grad.size(0), *shape)
