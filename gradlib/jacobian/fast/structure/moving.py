"""Rules of operations that move, pick, join, sum or repeat entries."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from gradlib.jacobian.fast import moves
from gradlib.jacobian.fast.operation import Operation
from gradlib.jacobian.fast.structure.named_axes import Dims, fresh, regrouped
from gradlib.jacobian.fast.structure.step import Back, Step


def reshaped(op: Operation) -> dict[int, Back]:
    """A view that keeps the order of entries."""

    def back(dims: Dims) -> Step | None:
        before = regrouped(dims, op.shapes[0])
        return None if before is None else Step(before)

    return {0: back}


def permuted(op: Operation) -> dict[int, Back]:
    """Dimensions in another order."""
    order = moves.order(op)
    return {0: lambda dims: Step(tuple(dims[order.index(i)] for i in range(len(dims))))}


def selected(op: Operation) -> dict[int, Back]:
    """One row of a dimension."""
    dim, index = moves.row(op)
    unit = _unit(op, op.shapes[0][dim], index)

    def back(dims: Dims) -> Step:
        (mine,) = fresh(unit.shape)
        return Step((*dims[:dim], mine, *dims[dim:]), ((unit, (mine,)),))

    return {0: back}


def sliced(op: Operation) -> dict[int, Back]:
    """Some rows of a dimension."""
    return {0: _picked(op, *moves.sliced(op), out=False)}


def concatenated(op: Operation) -> dict[int, Back]:
    """Several tensors, one after the other."""
    return {i: _picked(op, *rows, out=True) for i, rows in moves.joined(op).items()}


def stacked(op: Operation) -> dict[int, Back]:
    """Several tensors, along a new dimension."""
    dim = op.dim()

    def back(i: int) -> Back:
        unit = _unit(op, op.shape[dim], i)
        return lambda dims: Step(
            (*dims[:dim], *dims[dim + 1 :]), ((unit, (dims[dim],)),)
        )

    return {i: back(i) for i in op.shapes}


def summed(op: Operation) -> dict[int, Back]:
    """A sum or mean over dimensions."""
    shape = op.shapes[0]
    gone, scale = moves.reduced(op)

    def back(dims: Dims) -> Step:
        left = list(dims)
        if op.saved("keepdim") is True:
            left = [axes for i, axes in enumerate(dims) if i not in gone]
        axes = fresh(shape)
        before = tuple(axes[i] if i in gone else left.pop(0) for i in range(len(shape)))
        return Step(before, scale=scale, work=math.prod(shape))

    return {0: back}


def _picked(op: Operation, dim: int, rows: Sequence[int], *, out: bool) -> Back:
    """Return the map between two dimensions, of which one is some rows of the other.

    Args:
        op: The operation.
        dim: The dimension.
        rows: Which rows of the longer one.
        out: Whether the output has the longer one.
    """
    size = len(rows) if out else op.shapes[0][dim]
    # All rows: they may be the samples, and must keep their axis.
    if size == op.shape[dim]:
        return Step
    matrix = torch.zeros(op.shape[dim] if out else len(rows), size, **op.like)
    ours = range(len(rows))
    matrix[(rows, ours) if out else (ours, rows)] = matrix.new_ones(())

    def back(dims: Dims) -> Step:
        (mine,) = fresh([size])
        before = (*dims[:dim], mine, *dims[dim + 1 :])
        return Step(before, ((matrix, (dims[dim], mine)),))

    return back


def _unit(op: Operation, size: int, index: int) -> Tensor:
    unit = torch.zeros(size, **op.like)
    unit[index].fill_(1)  # assigning a number would wait for the GPU
    return unit
