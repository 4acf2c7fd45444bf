"""How operations that move entries do so, read from their nodes."""

import math
from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor
from torch.autograd.graph import Node

from gradlib.jacobian.fast.operation import Operation, dim_of, signed
from gradlib.jacobian.form import form_at

RESHAPED = (
    "ViewBackward0",
    "UnsafeViewBackward0",
    "ReshapeAliasBackward0",
    "SqueezeBackward0",
    "SqueezeBackward1",
    "SqueezeBackward2",
    "UnsqueezeBackward0",
)
"""The nodes of views that keep the order of entries."""

UNCHANGED = ("AddBackward1", "CloneBackward0", "AliasBackward0", "ExpandBackward0")
"""The nodes that keep or repeat entries; the shapes tell how often."""

PERMUTED = ("PermuteBackward0", "TransposeBackward0", "TBackward0")
"""The nodes that give dimensions another order."""

SELECTED = ("SelectBackward0", "UnbindBackward0")
"""The nodes that take one row of a dimension."""

SLICED = ("SliceBackward0", "SplitBackward0", "SplitWithSizesBackward0")
"""The nodes that take some rows of a dimension."""

SUMMED = ("MeanBackward1", "SumBackward1")
"""The nodes of sums and means over dimensions."""

SEVERAL = ("UnbindBackward0", "SplitBackward0", "SplitWithSizesBackward0")
"""The nodes whose outputs all have a rule; of other nodes only the first output has."""


class Rows(NamedTuple):
    """Some rows of a dimension: which dimension, and which rows."""

    dim: int
    rows: range


def order(op: Operation) -> list[int]:
    """Return for each dimension of a permutation's output that of its input."""
    count = len(op.shape)
    if (dims := op.saved("dims")) is not None:
        return [dim_of(it, count) for it in dims]
    order = [*range(count)]
    if op.saved("dim0") is None:  # of a matrix, or of a vector, which stays as it is
        return order[::-1]
    one, other = op.dim("dim0"), op.dim("dim1")
    order[one], order[other] = other, one
    return order


def row(op: Operation) -> tuple[int, int]:
    """Return the dimension that one row was taken of, and the row's index."""
    dim, index = dim_of(op.saved("dim"), len(op.shapes[0])), op.saved("index")
    if index is None:  # unbind: each row is an output
        return dim, op.number
    return dim, dim_of(index, op.shapes[0][dim])


def sliced(op: Operation) -> Rows:
    """Return the rows of its input that a slice takes, or an output of a split."""
    dim = op.dim()
    if op.node.name() == "SliceBackward0":
        saved = (op.saved(it) for it in ("start", "end", "step"))
        # TorchScript saves None for an end that is not written out.
        picked = slice(*(None if it is None else signed(it) for it in saved))
        return Rows(dim, range(op.shapes[0][dim])[picked])
    size, sizes = op.saved("split_size"), op.saved("split_sizes")
    start = int(op.number * size if sizes is None else sum(sizes[: op.number]))
    return Rows(dim, range(start, start + op.shape[dim]))


def rows_of(tensor: Tensor, dim: int, rows: range) -> Tensor:
    """Return some rows of a dimension, as a view."""
    picked = slice(rows.start, rows.stop, rows.step)
    return tensor[(slice(None),) * dim + (picked,)]


def joined(op: Operation) -> dict[int, Rows]:
    """Return for each input of a concatenation its rows in the output, if known."""
    dim = op.dim()
    # An input that needs no gradient has no node to tell its size.
    sizes = [_size(place, dim) for place in op.node.next_functions]
    if sizes.count(None) == 1:
        rest = op.shape[dim] - sum(it for it in sizes if it is not None)
        sizes = [rest if it is None else it for it in sizes]
    rows: dict[int, Rows] = {}
    start = 0
    for i, size in enumerate(sizes):
        if size is None:
            return {}
        if i in op.shapes:
            rows[i] = Rows(dim, range(start, start + size))
        start += size
    return rows


def reduced(op: Operation) -> tuple[Sequence[int], float]:
    """Return the dimensions that are reduced, and the factor of each entry in a sum."""
    shape, over = op.shapes[0], op.saved("dim")
    if isinstance(over, int):
        over = [over]
    gone = range(len(shape)) if not over else [dim_of(it, len(shape)) for it in over]
    count = math.prod(shape[i] for i in gone)
    return gone, 1 / max(1, count) if op.node.name() == "MeanBackward1" else 1


def _size(place: tuple[Node | None, int], dim: int) -> int | None:
    node, number = place
    if node is None:
        return None
    shape = form_at((node, number)).shape
    # torch concatenates an empty vector with anything.
    return shape[dim] if dim < len(shape) else 0
