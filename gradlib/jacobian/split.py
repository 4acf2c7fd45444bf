"""Split: from the narrowest tensor h outwards, dY/dX = dY/dH · dH/dX.

The part before h goes in reverse and the part after it forward, so each takes as many
passes as h has entries per sample, and one batched product joins them. The first axis
of h may be as long as the batch and yet not be the samples: a VJP from some samples
then reaches rows of others, which is checked.
"""

from collections.abc import Iterator
from itertools import islice

import torch
from torch import Tensor

from gradlib.errors import NoSuchWayError
from gradlib.jacobian.chance import Chance
from gradlib.jacobian.cut import Cut, narrowest
from gradlib.jacobian.forward import NO_COLUMNS, Linearized
from gradlib.jacobian.graph import Graph
from gradlib.jacobian.look import Look, every_pair, vectors_in
from gradlib.jacobian.passes import chunks, one_hot_for_all, pull
from gradlib.jacobian.pieces import SAMPLES, Piece

PRODUCT = 2**23
"""How many bytes of the product a piece has at most on a CPU."""

FILLING = 2**28
"""The same on other devices, which work best on much at once. Not measured on a GPU."""

HALVES = 2
"""From how many subsets of the samples to go back, to see whether h has their rows."""


def find(graph: Graph) -> Cut | str:
    """Return the tensor to split at, or why there is none."""
    if len(graph.roots) > 1:
        return f"fn has {len(graph.roots)} outputs, and a split takes one"
    if any(graph.shared):
        return "all samples share what is differentiated for"
    if not graph.batch:
        return "there are no samples"
    return narrowest(graph) or "no tensor inside that all pass"


def require(graph: Graph) -> Cut:
    """Return the tensor to split at.

    Raises:
        NoSuchWayError: There is none.
    """
    cut = find(graph)
    if isinstance(cut, str):
        raise NoSuchWayError(f'There is nothing to split at: {cut}. Use mode="auto".')
    return cut


def pieces(graph: Graph, chunk: int, *, create_graph: bool = False) -> Iterator[Piece]:
    """Return the Jacobian as the product of two.

    Args:
        graph: The graph of the forward pass.
        chunk: How many rows, or columns, a pass computes.
        create_graph: Whether the pieces have a graph too.

    Raises:
        NoSuchWayError: There is no tensor to split at.
    """
    cut = require(graph)
    linear = _after(graph, cut)
    before = _rows_before(graph, cut, chunk, create_graph)
    after = _columns_after(graph, cut, linear, chunk, create_graph)
    for i, part in enumerate(before):
        if part is None:
            yield Piece((0, i), SAMPLES, 0, graph.batch, None)
            continue
        size = graph.rows(0) * graph.columns(i) * part.element_size()
        most = PRODUCT if part.device.type == "cpu" else FILLING
        for start, length in chunks(graph.batch, max(1, most // max(1, size))):
            ours = slice(start, start + length)
            product = after[ours].to(part) @ part[ours]
            yield Piece((0, i), SAMPLES, start, length, product)


def _after(graph: Graph, cut: Cut) -> Linearized:
    """Return the part after h as a linear map, from rows that are the samples.

    This is exact. Comparing the product afterwards is not: where derivatives are small,
    a product over another axis may differ from the truth by no more than rounding.

    Raises:
        NoSuchWayError: The rows of h are not the samples.
    """
    chance, linear = Chance(), None
    for half in islice(every_pair(graph.batch), HALVES):
        if linear is None:  # the pass that columns come from shows the first half too
            vectors = vectors_in(half, chance, graph.roots)
            linear = Linearized(graph.roots, cut.edge, vectors)
            look = Look(vectors, [linear.vjp])
        else:
            look = Look.at(chance, graph.roots, [cut.edge], half)
        if look.coupled(half, 1) is not None:
            raise NoSuchWayError(
                f"The narrowest tensor that all pass, of shape {list(cut.shape)}, has "
                "another first axis than the samples, though it is as long, or samples "
                'influence each other. Use mode="reverse": with check=True it says of '
                "samples that do what mixes them. Where none do, another number of "
                "samples can be split."
            )
    return linear or Linearized(graph.roots, cut.edge)


def _rows_before(
    graph: Graph, cut: Cut, chunk: int, create_graph: bool
) -> list[Tensor | None]:
    """Return dH/dX of each X, ``(batch, h, in)``."""
    passes: list[list[Tensor | None]] = []
    for start, length in chunks(cut.width, chunk):
        v = _units(cut, start, length)
        passes.append(pull(cut.edge, graph.points, v, create_graph=create_graph))
    parts: list[Tensor | None] = []
    for i, grads in enumerate(zip(*passes, strict=True)):
        if grads[0] is None:
            parts.append(None)
            continue
        rows = torch.cat([it for it in grads if it is not None])
        rows = rows.reshape(cut.width, graph.batch, graph.columns(i))
        parts.append(rows.movedim(0, 1))
    return parts


def _columns_after(
    graph: Graph, cut: Cut, linear: Linearized, chunk: int, create_graph: bool
) -> Tensor:
    """Return dY/dH, ``(batch, out, h)``."""
    columns: list[Tensor] = []
    for start, length in chunks(cut.width, chunk):
        u = _units(cut, start, length)
        (tangents,) = linear.push(u, create_graph)
        if tangents is None:
            raise NoSuchWayError(NO_COLUMNS)
        columns.append(tangents.reshape(length, graph.batch, graph.rows(0)))
    return torch.cat(columns).movedim(0, 2)


def _units(cut: Cut, start: int, count: int) -> Tensor:
    """Return unit vectors of h, ``(count, batch, *h)``."""
    like = torch.empty((), dtype=cut.dtype, device=cut.device)
    return one_hot_for_all(count, like, start, cut.shape)
