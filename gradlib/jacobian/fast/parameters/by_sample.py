"""The Jacobian with respect to parameters from backward passes of all samples at once.

Where samples are apart, one pass takes the same row of every sample to where a
parameter is used. What came in there, times that gradient, is the parameter's row for
each sample: no pass goes on to what all of them share.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node

from gradlib.jacobian import work
from gradlib.jacobian.chance import Chance
from gradlib.jacobian.chunk import at_once
from gradlib.jacobian.fast.kernels import DTYPES
from gradlib.jacobian.fast.parameters.rules import COLUMNS, Write, products, writer
from gradlib.jacobian.fast.parameters.use import Samples, Use
from gradlib.jacobian.fast.parameters.uses import find_uses, places_of_samples
from gradlib.jacobian.form import form_at
from gradlib.jacobian.graph import Graph
from gradlib.jacobian.look import Look
from gradlib.jacobian.nodes import nodes_of
from gradlib.jacobian.passes import chunks, one_hot_for_all, pull
from gradlib.jacobian.pieces import Block, empty
from gradlib.jacobian.plan import BATCHED, Plan

WORTH = 1.3
"""How many times fewer rows it must ask for."""

LEAST = 2**22
"""How many bytes of gradients other passes must hold for a look to be worth it."""


@dataclass(frozen=True)
class Part:
    """What a parameter's part of the Jacobian is made of."""

    use: Use
    samples: Samples
    write: Write


@dataclass(frozen=True)
class BySample:
    """How to compute the Jacobian.

    Attributes:
        chunk: How many rows a pass asks for.
        bytes: What is held at most, besides the result.
        needs_proof: Whether a finite result may be another than rows give: what was
            computed from parameters before may have hooks that nobody sees.
    """

    chunk: int
    bytes: int
    _graph: Graph
    _parts: list[Part]

    needs_proof = True

    def planned(self, plan: Plan) -> Plan:
        """Return a plan to take it."""
        return plan.shortened(
            "by sample",
            "each parameter is used once, where samples are apart",
            f"{_rows(self._graph)}, each of all samples at once",
            self._multiply_adds(),
            self.bytes,
        )

    def blocks(
        self, graph: Graph, out: dict[Block, Tensor] | None = None
    ) -> dict[Block, Tensor]:
        """Return the blocks, written into contiguous tensors where there are some."""
        made = empty(graph) if out is None else out
        parts = {
            block: tensor.view(
                graph.batch, graph.rows(block[0]), *graph.points[block[1]].shape
            )
            for block, tensor in made.items()
        }
        with torch.no_grad():
            try:
                self._write(parts, self.chunk)
            except RuntimeError:
                if self.chunk == 1:
                    raise
                self._write(parts, 1)  # not every node can work on batched values
        return made

    def _write(self, blocks: dict[Block, Tensor], chunk: int) -> None:
        used = {part.use.point for part in self._parts}
        for (_, point), block in blocks.items():
            if point not in used:
                block.zero_()
        nodes = _nodes(part.use for part in self._parts)
        for root, rows, grads in _passes(self._graph, nodes, chunk):
            for part in self._parts:
                into, grad = blocks[root, part.use.point][:, rows], grads[part.use.node]
                if grad is None:
                    into.zero_()
                else:
                    part.write(part.samples.first(grad, 1), into)

    def _multiply_adds(self) -> int:
        graph, uses = self._graph, [part.use for part in self._parts]
        ones = [torch.ones_like(it) for it in graph.roots]
        once = work.of_pass(graph.roots, _edges(_nodes(uses)), ones)
        once += sum(products(use, graph.points[use.point]) for use in uses)
        return _rows(graph) * once


def find_by_sample(graph: Graph, plan: Plan) -> BySample | None:
    """Return how to compute a Jacobian with respect to parameters, or ``None``.

    Args:
        graph: What it is of.
        plan: How it would be computed otherwise.

    Returns:
        ``None`` where a parameter is used twice, or by an operation that is not known,
        where samples are not apart there, and where it would not take less.
    """
    if not graph.size():
        return None
    rows = plan.rows_worth
    if rows < WORTH * _rows(graph) or rows * plan.pass_bytes < LEAST:
        return None
    # What torch gets wrong for several rows at once it gets wrong for all samples' too.
    if not all(map(_is_plain, graph.points)) or nodes_of(graph).wrong_at_once:
        return None
    uses = find_uses(graph)
    if not uses:
        return None
    return _found(graph, plan, uses)


def _found(graph: Graph, plan: Plan, uses: list[Use]) -> BySample | None:
    samples = _samples(graph, uses)
    if samples is None:
        return None
    parts: list[Part] = []
    for use in uses:
        at = samples[use.node]
        write = writer(use, at, graph.points[use.point].detach())
        if write is None:
            return None
        parts.append(Part(use, at, write))
    # What passes end with waits for the last of it, and is changed one after the other;
    # what came in may be kept in another form.
    sizes = [_size(node) for node in samples]
    each = BATCHED * plan.pass_bytes + sum(sizes) + 2 * max(sizes)
    room = plan.max_bytes - plan.result_bytes - 2 * sum(sizes) - COLUMNS
    on_cpu = graph.points[0].device.type == "cpu"
    chunk = at_once(
        room, each, plan.pass_bytes, convolution=plan.convolution, on_cpu=on_cpu
    )
    chunk = max(1, min(chunk, *map(graph.rows, range(len(graph.roots)))))
    if chunk * each > room:
        return None
    held = chunk * each + 2 * sum(sizes) + COLUMNS
    return BySample(chunk, held, graph, parts)


def _samples(graph: Graph, uses: list[Use]) -> dict[Node, Samples] | None:
    """Return where the samples are at each operation.

    A pass whose vectors are zero for some samples tells where those are: there nothing
    comes of it. ``None`` where something does everywhere, as samples are not apart.
    """
    found = {use.node: places_of_samples(use, graph.batch) for use in uses}
    chance = Chance()
    half = chance.half(graph.batch)
    seen = Look.at(chance, graph.roots, _edges(list(found)), half)
    for node, grad in zip(found, seen.grads, strict=True):
        found[node] = [
            it
            for it in found[node]
            if grad is None or not it.first(grad)[~half.to(grad.device)].any()
        ]
    if not all(found.values()):
        return None
    return {node: places[0] for node, places in found.items()}


def _passes(
    graph: Graph, nodes: list[Node], chunk: int
) -> Iterator[tuple[int, slice, dict[Node, Tensor | None]]]:
    """Go back with the same rows of all samples, some rows at a time.

    Returns:
        Of which output, which rows, and the gradients of what came out of the nodes.
    """
    for root, y in enumerate(graph.roots):
        rows = graph.rows(root)
        for start, length in chunks(rows, chunk):
            v = one_hot_for_all(length, y, start, y.shape)
            found = pull(y, _edges(nodes), v)
            ours = slice(start, start + length)
            yield root, ours, dict(zip(nodes, found, strict=True))


def _edges(nodes: list[Node]) -> list[GradientEdge]:
    return [GradientEdge(node, 0) for node in nodes]


def _nodes(uses: Iterable[Use]) -> list[Node]:
    return list(dict.fromkeys(use.node for use in uses))


def _rows(graph: Graph) -> int:
    return sum(map(graph.rows, range(len(graph.roots))))


def _is_plain(point: Tensor) -> bool:
    kinds = (Tensor, torch.nn.Parameter)
    return type(point) in kinds and point.dtype in DTYPES


def _size(node: Node) -> int:
    return form_at((node, 0)).bytes
