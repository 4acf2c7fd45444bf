"""The Jacobian with respect to parameters, from backward passes of all samples at once.

Where samples do not mix, one pass gives the gradient of the same row of every sample at
the operation that uses a parameter. The operation's input times that gradient is the
parameter's row, for each sample: no pass goes on to the parameter that all share.
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
from gradlib.jacobian.fast.parameters.rules import COLUMNS, KNOWN, Write, products
from gradlib.jacobian.fast.parameters.use import Samples, Use
from gradlib.jacobian.fast.parameters.uses import find_uses, places_of_samples
from gradlib.jacobian.form import form_at
from gradlib.jacobian.graph import Graph
from gradlib.jacobian.look import Look
from gradlib.jacobian.nodes import nodes_of
from gradlib.jacobian.passes import chunks, one_hot_for_all, pull
from gradlib.jacobian.pieces import Block, empty
from gradlib.jacobian.plan import BATCHED, JacobianPlan

WORTH = 1.3
"""How many times fewer rows this way must take."""

LEAST = 2**22
"""How many bytes of gradients other passes must have for a search to be worth it."""


@dataclass(frozen=True)
class Part:
    """How to compute the blocks of one parameter."""

    use: Use
    samples: Samples
    write: Write


@dataclass(frozen=True)
class BySample:
    """How to compute the Jacobian.

    Attributes:
        chunk: How many rows a pass computes.
        bytes: How many bytes are held at most, besides the result.
        needs_proof: Whether to compare the result with a VJP: tensors computed from
            parameters before the call may have hooks, which a graph does not show.
    """

    chunk: int
    bytes: int
    _graph: Graph
    _parts: list[Part]

    needs_proof = True

    def planned(self, plan: JacobianPlan) -> JacobianPlan:
        """Return the plan that takes this way."""
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
        """Return the blocks, written into the contiguous tensors of `out` if given."""
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


def find_by_sample(graph: Graph, plan: JacobianPlan) -> BySample | None:
    """Return how to compute a Jacobian with respect to parameters, or ``None``.

    Returns:
        ``None`` where a parameter is used twice, or by an operation that is not known,
        where samples mix, or where this would not take less.
    """
    if not graph.size():
        return None
    rows = plan.rows_worth
    if rows < WORTH * _rows(graph) or rows * plan.pass_bytes < LEAST:
        return None
    # A node that torch gets wrong for several rows at once is wrong here too.
    if not all(map(_is_plain, graph.points)) or nodes_of(graph).wrong_at_once:
        return None
    uses = find_uses(graph)
    if not uses:
        return None
    return _found(graph, plan, uses)


def _found(graph: Graph, plan: JacobianPlan, uses: list[Use]) -> BySample | None:
    samples = _samples(graph, uses)
    if samples is None:
        return None
    parts: list[Part] = []
    for use in uses:
        of_use = samples[use.node]
        rule = KNOWN[use.node.name()][use.index]
        write = rule(use, of_use, graph.points[use.point].detach())
        if write is None:
            return None
        parts.append(Part(use, of_use, write))
    # The gradients at all uses are held until a pass ends, and are then processed one
    # by one; the operations' inputs may be kept in another layout.
    sizes = [_size(node) for node in samples]
    each = BATCHED * plan.pass_bytes + sum(sizes) + 2 * max(sizes)
    room = plan.max_bytes - plan.result_bytes - 2 * sum(sizes) - COLUMNS
    chunk = at_once(
        room,
        each,
        plan.pass_bytes,
        convolution=plan.convolution,
        on_cpu=graph.on_cpu,
    )
    chunk = max(1, min(chunk, *map(graph.rows, range(len(graph.roots)))))
    if chunk * each > room:
        return None
    held = chunk * each + 2 * sum(sizes) + COLUMNS
    return BySample(chunk, held, graph, parts)


def _samples(graph: Graph, uses: list[Use]) -> dict[Node, Samples] | None:
    """Return the layout of the samples at each operation; ``None`` where they mix.

    A VJP whose vectors are zero for some samples must be zero at these samples: of the
    layouts that fit the shapes, those are dropped where it is not.
    """
    fitting = {use.node: places_of_samples(use, graph.batch) for use in uses}
    chance = Chance()
    half = chance.half(graph.batch)
    look = Look.at(chance, graph.roots, _edges(list(fitting)), half)
    for node, grad in zip(fitting, look.grads, strict=True):
        fitting[node] = [
            it
            for it in fitting[node]
            if grad is None or not it.first(grad)[~half.to(grad.device)].any()
        ]
    if not all(fitting.values()):
        return None
    return {node: layouts[0] for node, layouts in fitting.items()}


def _passes(
    graph: Graph, nodes: list[Node], chunk: int
) -> Iterator[tuple[int, slice, dict[Node, Tensor | None]]]:
    """Go back with the same rows of all samples, some rows at a time.

    Yields:
        The output's number, the rows, and the gradient of each node's output.
    """
    for root, y in enumerate(graph.roots):
        rows = graph.rows(root)
        for start, length in chunks(rows, chunk):
            v = one_hot_for_all(length, y, start, y.shape)
            grads = pull(y, _edges(nodes), v)
            ours = slice(start, start + length)
            yield root, ours, dict(zip(nodes, grads, strict=True))


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
