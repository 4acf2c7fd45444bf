"""Puts the Jacobian together from the pieces that a mode computes."""

import math
from collections import defaultdict
from collections.abc import Iterable
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from gradlib.jacobian import fresh
from gradlib.jacobian.graph import Graph

Block: TypeAlias = tuple[int, int]
"""The number of an output, and of the tensor that its Jacobian is with respect to."""

SAMPLES, ROWS, COLUMNS = range(3)
"""The axes of a block viewed as ``(batch, rows, columns)``."""

EVERY_ROW = -1
"""The first axis of a block viewed as ``(batch * rows, columns)``."""


class Piece(NamedTuple):
    """A part of one block.

    Attributes:
        block: The block.
        axis: The axis that it is a part along.
        start: Where it begins on that axis.
        length: Its length on that axis.
        values: Its entries, of the block's columns or of ``*in``; ``None`` for zeros.
    """

    block: Block
    axis: int
    start: int
    length: int
    values: Tensor | None


def detached(piece: Piece) -> Piece:
    """Return a piece without the graph that it was computed with."""
    values = piece.values
    return piece if values is None else piece._replace(values=values.detach())


def written(
    graph: Graph, pieces: Iterable[Piece], out: dict[Block, Tensor] | None
) -> dict[Block, Tensor]:
    """Return the blocks, written into `out` where it is given.

    Args:
        graph: The graph of the forward pass.
        pieces: The pieces, in any order.
        out: A tensor ``(batch, *out, *in)`` for each block, or ``None``.
    """
    if out is None:
        return _collected(graph, pieces)
    if not all(it.is_contiguous() for it in out.values()):
        for block, tensor in _collected(graph, pieces).items():
            out[block].copy_(tensor)
        return out
    views = {block: _flat(graph, block, tensor) for block, tensor in out.items()}
    for piece in pieces:
        _write(piece, views[piece.block])
    return out


def _collected(graph: Graph, pieces: Iterable[Piece]) -> dict[Block, Tensor]:
    """Return the blocks; a piece that is a whole block is used without a copy."""
    blocks: dict[Block, Tensor] = {}
    views: dict[Block, Tensor] = {}
    taken: set[int] = set()  # memory in use: for x + y both have one gradient
    for piece in pieces:
        block, values = piece.block, piece.values
        if block not in blocks:
            if values is not None and _is_whole(graph, piece, values, taken):
                taken.add(values.untyped_storage().data_ptr())
                blocks[block] = values.detach().reshape(graph.shape(*block))
                continue
            blocks[block] = _empty(graph, block)
            views[block] = _flat(graph, block, blocks[block])
        _write(piece, views[block])
    for block in graph.blocks():
        if block not in blocks:  # a block without entries has no pieces
            blocks[block] = _empty(graph, block)
    return blocks


def _is_whole(graph: Graph, piece: Piece, values: Tensor, taken: set[int]) -> bool:
    """Tell whether a piece is a whole block, in memory that nothing else uses.

    The VJP of a single vector does not count: a backward pass may return a tensor that
    it has saved.
    """
    memory = values.untyped_storage()
    return (
        piece.length > 1
        and 0 < values.numel() == math.prod(graph.shape(*piece.block))
        and values.dtype == graph.points[piece.block[1]].dtype
        and values.numel() * values.element_size() == memory.nbytes()
        and 0 not in values.stride()  # else entries share memory
        and memory.data_ptr() not in taken
    )


def _write(piece: Piece, whole: Tensor) -> None:
    """Write a piece to its place in a block viewed as ``(batch, rows, columns)``."""
    if piece.axis == EVERY_ROW:
        part = whole.flatten(0, 1).narrow(0, piece.start, piece.length)
    else:
        part = whole.narrow(piece.axis, piece.start, piece.length)
    if piece.values is None:
        part.zero_()
    else:
        part.view(piece.values.shape).copy_(piece.values.detach())


def joined(graph: Graph, pieces: Iterable[Piece]) -> dict[Block, Tensor]:
    """Return the blocks with a graph, so that gradients flow through them.

    Args:
        graph: The graph of the forward pass.
        pieces: The pieces; those of one block are in order, along one axis.
    """
    parts: dict[Block, list[Tensor]] = defaultdict(list)
    axes: dict[Block, int] = {}
    for piece in pieces:
        axes[piece.block] = max(piece.axis, 0)
        parts[piece.block].append(_or_zeros(graph, piece))
    blocks = empty(graph)  # a block without entries has no pieces
    for block, values in parts.items():
        whole = torch.cat(values, axes[block]).reshape(graph.shape(*block))
        blocks[block] = whole.to(graph.points[block[1]].dtype)
    return blocks


def empty(graph: Graph) -> dict[Block, Tensor]:
    """Return blocks without values."""
    return {block: _empty(graph, block) for block in graph.blocks()}


def _empty(graph: Graph, block: Block) -> Tensor:
    return fresh.empty(graph.shape(*block), graph.points[block[1]])


def _flat(graph: Graph, block: Block, tensor: Tensor) -> Tensor:
    root, point = block
    return tensor.view(graph.batch, graph.rows(root), graph.columns(point))


def _or_zeros(graph: Graph, piece: Piece) -> Tensor:
    root, point = piece.block
    sizes = [graph.batch, graph.rows(root), graph.columns(point)]
    if piece.axis == EVERY_ROW:
        sizes = sizes[1:]
    sizes[max(piece.axis, 0)] = piece.length
    if piece.values is not None:
        return piece.values.reshape(sizes)
    return graph.points[point].new_zeros(sizes)
