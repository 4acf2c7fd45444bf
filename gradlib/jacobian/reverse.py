"""Reverse: the Jacobian row by row, each a VJP with a unit vector.

For a tensor with a batch axis, one VJP gives the same row of every sample. A tensor
that all samples share needs a VJP for each sample and output entry.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TypeAlias

from torch import Tensor

from gradlib.jacobian.graph import Graph
from gradlib.jacobian.passes import chunks, one_hot, one_hot_for_all, pull
from gradlib.jacobian.pieces import EVERY_ROW, ROWS, Piece

GoBack: TypeAlias = Callable[[Tensor, Sequence[Tensor], Tensor], list[Tensor | None]]
"""A function of an output, the inputs and vectors ``(count, *out)`` that gives VJPs."""


def count_rows(graph: Graph) -> int:
    """Return how many VJPs the whole Jacobian takes."""
    counts = 0
    for root in range(len(graph.roots)):
        rows = graph.rows(root)
        counts += rows * (not all(graph.shared))
        counts += rows * graph.batch * any(graph.shared)
    return counts


def pieces(
    graph: Graph,
    chunk: int,
    *,
    create_graph: bool = False,
    go_back: GoBack | None = None,
) -> Iterator[Piece]:
    """Return the Jacobian in chunks of rows.

    Args:
        graph: The graph of the forward pass.
        chunk: How many rows a pass computes.
        create_graph: Whether the pieces have a graph too.
        go_back: What computes VJPs in place of autograd.
    """
    go_back = go_back or partial(pull, create_graph=create_graph)
    own = [i for i, shared in enumerate(graph.shared) if not shared]
    common = [i for i, shared in enumerate(graph.shared) if shared]
    for root in range(len(graph.roots)):
        if own:
            yield from _rows_of_all(graph, root, own, chunk, go_back)
        if common:
            yield from _rows_of_each(graph, root, common, chunk, go_back)


def _rows_of_all(
    graph: Graph, root: int, points: list[int], chunk: int, go_back: GoBack
) -> Iterator[Piece]:
    y, rows = graph.roots[root], graph.rows(root)
    inputs = [graph.points[i] for i in points]
    for start, length in chunks(rows, chunk):
        vjps = go_back(y, inputs, one_hot_for_all(length, y, start, y.shape))
        for i, grads in zip(points, vjps, strict=True):
            rows = None if grads is None else grads.transpose(0, 1)
            yield Piece((root, i), ROWS, start, length, rows)


def _rows_of_each(
    graph: Graph, root: int, points: list[int], chunk: int, go_back: GoBack
) -> Iterator[Piece]:
    y, rows = graph.roots[root], graph.rows(root) * graph.batch
    inputs = [graph.points[i] for i in points]
    for start, length in chunks(rows, chunk):
        v = one_hot(length, y, start, rows).view(length, *y.shape)
        vjps = go_back(y, inputs, v)
        for i, grads in zip(points, vjps, strict=True):
            if grads is not None:
                grads = grads.reshape(length, graph.columns(i))
            yield Piece((root, i), EVERY_ROW, start, length, grads)
