"""Reverse: the Jacobian row by row, each a VJP with a unit vector.

For a tensor with a batch axis one vector asks for the same row of every sample. What
all samples share has a row for each sample and entry of its output.
"""

from collections.abc import Iterator

from gradlib.jacobian.graph import Graph
from gradlib.jacobian.passes import chunks, one_hot, pull
from gradlib.jacobian.pieces import EVERY_ROW, ROWS, Piece


def passes(graph: Graph) -> int:
    """Return how many rows there are to ask for."""
    counts = 0
    for root in range(len(graph.roots)):
        rows = graph.rows(root)
        counts += rows * (not all(graph.shared))
        counts += rows * graph.batch * any(graph.shared)
    return counts


def pieces(graph: Graph, chunk: int, *, create_graph: bool = False) -> Iterator[Piece]:
    """Return the Jacobian in chunks of rows.

    Args:
        graph: Where it comes from.
        chunk: How many rows a pass asks for.
        create_graph: Whether the pieces have a graph too.
    """
    own = [i for i, shared in enumerate(graph.shared) if not shared]
    common = [i for i, shared in enumerate(graph.shared) if shared]
    for root in range(len(graph.roots)):
        if own:
            yield from _rows_of_all(graph, root, own, chunk, create_graph)
        if common:
            yield from _rows_of_each(graph, root, common, chunk, create_graph)


def _rows_of_all(
    graph: Graph, root: int, points: list[int], chunk: int, create_graph: bool
) -> Iterator[Piece]:
    y, rows = graph.roots[root], graph.rows(root)
    for start, length in chunks(rows, chunk):
        v = one_hot(length, y, start, rows)[:, None].expand(-1, graph.batch, -1)
        found = pull(
            y,
            [graph.points[i] for i in points],
            v.reshape(length, *y.shape),
            create_graph=create_graph,
        )
        for i, grads in zip(points, found, strict=True):
            if grads is not None:
                grads = grads.reshape(length, graph.batch, graph.columns(i))
                grads = grads.movedim(0, 1)
            yield Piece((root, i), ROWS, start, length, grads)


def _rows_of_each(
    graph: Graph, root: int, points: list[int], chunk: int, create_graph: bool
) -> Iterator[Piece]:
    y, rows = graph.roots[root], graph.rows(root) * graph.batch
    for start, length in chunks(rows, chunk):
        found = pull(
            y,
            [graph.points[i] for i in points],
            one_hot(length, y, start, rows).view(length, *y.shape),
            create_graph=create_graph,
        )
        for i, grads in zip(points, found, strict=True):
            if grads is not None:
                grads = grads.reshape(length, graph.columns(i))
            yield Piece((root, i), EVERY_ROW, start, length, grads)
