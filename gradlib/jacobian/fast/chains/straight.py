"""Chains found in a graph: one operation after the other, whatever code made it.

The nodes' saved values give the matrices and slopes of this very forward pass.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from gradlib.jacobian.drawing import Drawing, kept_for_each
from gradlib.jacobian.fast.chains import order as orders
from gradlib.jacobian.fast.chains.bends import Bend
from gradlib.jacobian.fast.chains.evaluate import in_parts
from gradlib.jacobian.fast.chains.layers import Layer
from gradlib.jacobian.fast.chains.mapped import is_plain
from gradlib.jacobian.fast.chains.pointwise import Pointwise, by_slope
from gradlib.jacobian.fast.chains.product import (
    Factors,
    is_by_columns,
    whole_product,
)
from gradlib.jacobian.fast.chains.result import in_caches
from gradlib.jacobian.fast.kernels import DTYPES
from gradlib.jacobian.fast.operation import operations
from gradlib.jacobian.fast.slopes import ELEMENTWISE, slopes
from gradlib.jacobian.graph import Graph
from gradlib.jacobian.pieces import Block
from gradlib.jacobian.plan import JacobianPlan

ROWS = 8
"""With fewer rows, reading the graph and a backward pass would take longer."""

_PRODUCTS = {"AddmmBackward0": 1, "MmBackward0": 0}
"""The nodes of products with a matrix, each with the position of the other factor."""

_PASSED_ON = ("CloneBackward0", "AliasBackward0")
_KNOWN = {*ELEMENTWISE, *_PRODUCTS, *_PASSED_ON, "ViewBackward0"}

KNOWN_SLOPE = Layer(
    None, Pointwise("mul", lambda _, x: x, by_slope(lambda _, slope: slope), "either")
)


class Straight(NamedTuple):
    """A chain in a graph.

    Attributes:
        factors: Its matrices, and the slopes between them.
        order: The order in which they are multiplied.
        bytes: How many bytes the products of one part take.
        needs_proof: False: an infinite factor cannot be hidden, as each entry of the
            result takes every factor.
    """

    factors: Factors
    order: orders.Order
    bytes: int

    needs_proof = False

    def blocks(
        self, graph: Graph, out: dict[Block, Tensor] | None = None
    ) -> dict[Block, Tensor]:
        """Return the blocks, written into the contiguous tensors of `out` if given."""
        shape = graph.shape(0, 0)
        made = in_parts(
            (graph.batch, graph.rows(0), graph.columns(0)),
            graph.points[0].detach(),
            _at_once(self.order, graph.points[0]),
            self._of,
            None if out is None else out[0, 0],
            columns=is_by_columns(self.order.tree),
        )
        return {(0, 0): made.view(shape)}

    def planned(self, plan: JacobianPlan) -> JacobianPlan:
        """Return the plan that takes this way."""
        return plan.shortened(
            "chain",
            "the Jacobian of each operation is known",
            f"products in the order {self.order.text()}",
            self.order.multiply_adds,
            self.bytes,
        )

    def _of(self, start: int, stop: int, into: Tensor) -> Tensor:
        bends = [[it.part(start, stop) for it in place] for place in self.factors.bends]
        with torch.no_grad():
            factors = Factors(self.factors.matrices, bends)
            return whole_product(factors, self.order.tree, into)


def find_straight(graph: Graph, plan: JacobianPlan) -> Straight | None:
    """Return the chain that a graph of one output and input is, or ``None``."""
    root, point = graph.roots[0], graph.points[0]
    if root.dim() != 2 or not root.numel() or not point.numel():
        return None
    if plan.rows_worth < ROWS or root.dtype not in DTYPES:
        return None
    if not _is_line(graph.drawing):
        return None
    factors = _read(graph)
    if factors is None:
        return None
    widths = [it.shape[1] for it in factors.matrices] + [root.shape[1]]
    bent = tuple(map(bool, factors.bends[1:]))
    order = orders.best(tuple(widths), bent, graph.batch)
    samples = min(graph.batch, _at_once(order, root))
    size = order.each * samples * root.element_size()
    if size > plan.max_bytes - plan.result_bytes:
        return None
    return Straight(factors, order, size)


@kept_for_each
def _is_line(drawing: Drawing) -> bool:
    """Tell whether a single way of known operations leads to the input."""
    pairs = zip(drawing.names, drawing.led, strict=True)
    return all(len(led) == 1 and name in _KNOWN for name, led in pairs if led)


def _at_once(order: orders.Order, like: Tensor) -> int:
    return max(1, in_caches(like) // max(1, order.each))


def _read(graph: Graph) -> Factors | None:
    """Return the factors from output to input; ``None`` where one is not known."""
    root, nodes = graph.roots[0], graph.nodes
    matrices: list[Tensor] = []
    bends: list[list[Bend]] = [[]]
    like = root.dtype, root.device
    for it in operations(graph.drawing):
        op = it.among(nodes)
        ((place, shape),) = it.shapes.items()
        if it.name in _PRODUCTS:
            matrix, scale = op.saved("mat2"), op.saved("alpha")
            is_left = place == _PRODUCTS[it.name] and scale in (None, 1)
            if not is_left or not is_plain(matrix, (shape[1], op.shape[1]), like):
                return None
            matrices.insert(0, matrix.t())
            bends.insert(0, [])
        elif it.name in ELEMENTWISE:
            slope = slopes(op).get(place)
            if slope is None or len(shape) != 2 or not is_plain(slope, shape, like):
                return None
            bends[0].insert(0, Bend(KNOWN_SLOPE, slope))
        elif shape[0] != op.shape[0]:  # a view that mixes the samples
            return None
        if len(matrices) > orders.MOST:
            return None
    return Factors(matrices, bends) if matrices else None
