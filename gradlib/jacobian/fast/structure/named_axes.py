"""Axes with an identity: two of the same size are still different axes.

A tensor's dimension is a product of axes, in the order of its entries: a single axis
for most, batch and token where a view has merged them, none where the size is 1.
"""

import math
from collections.abc import Iterable, Sequence
from typing import TypeAlias

import torch
from torch import Tensor


class Axis:
    """One axis. Where it is split, it is split in every tensor that has it."""

    __slots__ = ("parts", "size")

    def __init__(self, size: int) -> None:
        """Make a new axis."""
        self.size = size
        self.parts: tuple[Axis, ...] = ()

    def split(self, outer: int) -> None:
        """Split the axis in two, of which the first has `outer` entries."""
        self.parts = (Axis(outer), Axis(self.size // outer))


Dims: TypeAlias = tuple[tuple[Axis, ...], ...]
"""The axes of each dimension of a tensor."""


def fresh(shape: Iterable[int]) -> Dims:
    """Return a new axis for each dimension of a shape, none for one of size 1."""
    return tuple((Axis(size),) if size > 1 else () for size in shape)


def resolved(axes: Iterable[Axis]) -> tuple[Axis, ...]:
    """Return the axes with split ones replaced by their parts."""
    unsplit: list[Axis] = []
    for axis in axes:
        unsplit += resolved(axis.parts) if axis.parts else (axis,)
    return tuple(unsplit)


def flat(dims: Dims) -> tuple[Axis, ...]:
    """Return all axes of a tensor, in the order of its entries."""
    return resolved(axis for axes in dims for axis in axes)


def length(axes: Iterable[Axis]) -> int:
    """Return how many entries axes have together."""
    return math.prod(axis.size for axis in axes)


def regrouped(dims: Dims, shape: Sequence[int]) -> Dims | None:
    """Return the dimensions of a tensor from those of a view of it.

    Args:
        dims: The axes of the view, which keeps the order of entries.
        shape: The shape of the tensor.

    Returns:
        Its axes; ``None`` where a dimension ends inside an axis that cannot be split
        there.
    """
    ahead = list(reversed(flat(dims)))
    groups: list[tuple[Axis, ...]] = []
    for size in shape:
        axes: list[Axis] = []
        while size > 1:
            axis = ahead.pop()
            if axis.size > size:
                if axis.size % size:
                    return None
                axis.split(size)
                axis, rest = axis.parts
                ahead.append(rest)
            if size % axis.size:
                return None
            axes.append(axis)
            size //= axis.size
        groups.append(tuple(axes))
    return tuple(groups)


def aligned(several: Sequence[tuple[Axis, ...]]) -> list[tuple[Axis, ...]] | None:
    """Split several lists of axes of one dimension until they agree in sizes.

    Returns:
        The lists, with as many axes as long as each other's; ``None`` if no split does
        that.
    """
    ahead = [list(reversed(resolved(axes))) for axes in several]
    agreed: list[list[Axis]] = [[] for _ in several]
    while all(ahead):
        size = min(stack[-1].size for stack in ahead)
        for stack, axes in zip(ahead, agreed, strict=True):
            axis = stack.pop()
            if axis.parts:  # another list has split it meanwhile
                stack += reversed(resolved(axis.parts))
                axis = stack.pop()
            if axis.size % size:
                return None
            if axis.size > size:
                axis.split(size)
                axis, rest = axis.parts
                stack.append(rest)
            axes.append(axis)
    return [resolved(axes) for axes in agreed]


def view_of(tensor: Tensor, dims: Dims) -> tuple[Tensor, tuple[Axis, ...]]:
    """Return a tensor viewed with one dimension for each axis, and those axes.

    A dimension of stride 0, along which entries repeat, is left out.
    """
    kept: list[tuple[Axis, ...]] = []
    for place in reversed(range(tensor.dim())):
        if not dims[place] or tensor.stride(place) == 0:
            tensor = tensor.select(place, 0)
        else:
            kept.append(dims[place])
    axes = resolved(axis for group in reversed(kept) for axis in group)
    return tensor.view(torch.Size(axis.size for axis in axes)), axes
