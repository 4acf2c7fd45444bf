"""The result, put together from the pieces that a way of computing hands over."""

from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

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


def fill(graph: Graph, blocks: Mapping[Block, Tensor], pieces: Iterable[Piece]) -> None:
    """Write the pieces into blocks that are there already.

    Args:
        graph: What the blocks are of.
        blocks: A contiguous ``(batch, *out, *in)`` for each.
        pieces: In any order.
    """
    views = {block: _flat(graph, block, tensor) for block, tensor in blocks.items()}
    for piece in pieces:
        whole = views[piece.block]
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
        made[block] = torch.cat(found, axes[block]).reshape(graph.shape(*block))
    return made


def empty(graph: Graph) -> dict[Block, Tensor]:
    """Return blocks with nothing written in them."""
    return {
        block: graph.points[block[1]].detach().new_empty(graph.shape(*block))
        for block in graph.blocks()
    }


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
