"""The result, put together from the pieces that a way of computing hands over."""

import math
from collections import defaultdict
from collections.abc import Iterable
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from gradlib.jacobian import fresh
from gradlib.jacobian.graph import Graph

Block: TypeAlias = tuple[int, int]
"""Which output, and which of the tensors that are differentiated for."""

SAMPLES, ROWS, COLUMNS = range(3)
"""The axes of a block that is seen as ``(batch, rows, columns)``."""

EVERY_ROW = -1
"""The axis of a block that is seen as ``(batch * rows, columns)``."""


class Piece(NamedTuple):
    """A part of one block.

    Attributes:
        block: Which one.
        axis: Along which axis it is a part.
        start: Where on that axis it begins.
        length: How long it is there.
        values: What is in it; ``None`` for zeros.
    """

    block: Block
    axis: int
    start: int
    length: int
    values: Tensor | None


def detached(piece: Piece) -> Piece:
    """Return a piece without the graph that computing it has left."""
    values = piece.values
    return piece if values is None else piece._replace(values=values.detach())


def written(
    graph: Graph, pieces: Iterable[Piece], out: dict[Block, Tensor] | None
) -> dict[Block, Tensor]:
    """Return the blocks, written into tensors that are there already, if some are.

    Args:
        graph: What the blocks are of.
        pieces: In any order.
        out: A contiguous ``(batch, *out, *in)`` for each block.
    """
    if out is None:
        return collected(graph, pieces)
    views = {block: _flat(graph, block, tensor) for block, tensor in out.items()}
    for piece in pieces:
        _write(piece, views[piece.block])
    return out


def collected(graph: Graph, pieces: Iterable[Piece]) -> dict[Block, Tensor]:
    """Return the blocks; a piece that is a whole one is taken as it is.

    Args:
        graph: What the blocks are of.
        pieces: In any order.
    """
    found: dict[Block, Tensor] = {}
    views: dict[Block, Tensor] = {}
    taken: set[int] = set()  # whose memory is: x + y has one gradient for both
    for piece in pieces:
        block, values = piece.block, piece.values
        if block not in found:
            if values is not None and _is_whole(graph, piece, values, taken):
                taken.add(values.untyped_storage().data_ptr())
                found[block] = values.detach().reshape(graph.shape(*block))
                continue
            found[block] = _empty(graph, block)
            views[block] = _flat(graph, block, found[block])
        _write(piece, views[block])
    for block in graph.blocks():
        if block not in found:  # what has no entries has no pieces
            found[block] = _empty(graph, block)
    return found


def _is_whole(graph: Graph, piece: Piece, values: Tensor, taken: set[int]) -> bool:
    """Tell whether a piece is a block, in memory that is nobody else's.

    What a single vector gives may be: a backward pass may return what it has saved.
    """
    memory = values.untyped_storage()
    return (
        piece.length > 1
        and 0 < values.numel() == math.prod(graph.shape(*piece.block))
        and values.dtype == graph.points[piece.block[1]].dtype
        and values.numel() * values.element_size() == memory.nbytes()
        and memory.data_ptr() not in taken
    )


def _write(piece: Piece, whole: Tensor) -> None:
    """Write a piece to its place in a block seen as ``(batch, rows, columns)``."""
    if piece.axis == EVERY_ROW:
        part = whole.flatten(0, 1).narrow(0, piece.start, piece.length)
    else:
        part = whole.narrow(piece.axis, piece.start, piece.length)
    if piece.values is None:
        part.zero_()
    else:
        part.copy_(piece.values.detach())


def joined(graph: Graph, pieces: Iterable[Piece]) -> dict[Block, Tensor]:
    """Return the blocks, through which gradients flow.

    Args:
        graph: What the blocks are of.
        pieces: Those of one block in their order, along one axis.
    """
    parts: dict[Block, list[Tensor]] = defaultdict(list)
    axes: dict[Block, int] = {}
    for piece in pieces:
        axes[piece.block] = max(piece.axis, 0)
        parts[piece.block].append(_or_zeros(graph, piece))
    made = empty(graph)  # what has no entries has no pieces
    for block, found in parts.items():
        whole = torch.cat(found, axes[block]).reshape(graph.shape(*block))
        made[block] = whole.to(graph.points[block[1]].dtype)
    return made


def empty(graph: Graph) -> dict[Block, Tensor]:
    """Return blocks with nothing written in them."""
    return {block: _empty(graph, block) for block in graph.blocks()}


def _empty(graph: Graph, block: Block) -> Tensor:
    return fresh.empty(graph.shape(*block), graph.points[block[1]])


def _flat(graph: Graph, block: Block, tensor: Tensor) -> Tensor:
    root, point = block
    return tensor.view(graph.batch, graph.rows(root), graph.columns(point))


def _or_zeros(graph: Graph, piece: Piece) -> Tensor:
    if piece.values is not None:
        return piece.values
    root, point = piece.block
    sizes = [graph.batch, graph.rows(root), graph.columns(point)]
    if piece.axis == EVERY_ROW:
        sizes = sizes[1:]
    sizes[max(piece.axis, 0)] = piece.length
    return graph.points[point].new_zeros(sizes)
