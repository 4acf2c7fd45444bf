"""Axes that have an identity, so that equal sizes mean nothing.

A tensor's dimension is a product of axes, in the order of its entries: one axis for
most, batch and token where a view has put them together, none where its size is 1.
"""

import math
from collections.abc import Iterable, Sequence
from typing import TypeAlias

import torch
from torch import Tensor


class Axis:
    """One axis. Splitting it splits it wherever it is."""

    __slots__ = ("parts", "size")

    def __init__(self, size: int) -> None:
        """Make an axis that is no other."""
        self.size = size
        self.parts: tuple[Axis, ...] = ()

    def split(self, outer: int) -> None:
        """Make it the product of two, of which the first has `outer` entries."""
        self.parts = (Axis(outer), Axis(self.size // outer))


Dims: TypeAlias = tuple[tuple[Axis, ...], ...]
"""Of a tensor: the axes of each of its dimensions."""


def fresh(shape: Iterable[int]) -> Dims:
    """Return axes of their own for each dimension of a shape."""
    return tuple((Axis(size),) if size > 1 else () for size in shape)


def resolved(axes: Iterable[Axis]) -> tuple[Axis, ...]:
    """Return the axes that these are made of by now."""
    found: list[Axis] = []
    for axis in axes:
        found += resolved(axis.parts) if axis.parts else (axis,)
    return tuple(found)


def flat(dims: Dims) -> tuple[Axis, ...]:
    """Return all axes of a tensor, in the order of its entries."""
    return resolved(axis for axes in dims for axis in axes)


def length(axes: Iterable[Axis]) -> int:
    """Return how many entries they have together."""
    return math.prod(axis.size for axis in axes)


def regrouped(dims: Dims, shape: Sequence[int]) -> Dims | None:
    """Return the dimensions of what a view with entries in the same order was made of.

    Args:
        dims: Of the view.
        shape: The other shape.

    Returns:
        ``None`` where a dimension ends inside an axis that cannot be split there.
    """
    ahead = list(reversed(flat(dims)))
    found: list[tuple[Axis, ...]] = []
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
        found.append(tuple(axes))
    return tuple(found)


def aligned(several: Sequence[tuple[Axis, ...]]) -> list[tuple[Axis, ...]] | None:
    """Split the axes of one dimension, named more than once, until they are alike.

    Returns:
        Those of each, as many and as long as the others'; ``None`` if that cannot be.
    """
    ahead = [list(reversed(resolved(axes))) for axes in several]
    found: list[list[Axis]] = [[] for _ in several]
    while all(ahead):
        size = min(stack[-1].size for stack in ahead)
        for stack, axes in zip(ahead, found, strict=True):
            axis = stack.pop()
            if axis.parts:  # another one has split it meanwhile
                stack += reversed(resolved(axis.parts))
                axis = stack.pop()
            if axis.size % size:
                return None
            if axis.size > size:
                axis.split(size)
                axis, rest = axis.parts
                stack.append(rest)
            axes.append(axis)
    return None if any(ahead) else [resolved(axes) for axes in found]


def view_of(tensor: Tensor, dims: Dims) -> tuple[Tensor, tuple[Axis, ...]]:
    """Return a tensor with one dimension for each axis, and those axes.

    A dimension along which every entry is the same one in memory is left out.
    """
    kept: list[tuple[Axis, ...]] = []
    for place in reversed(range(tensor.dim())):
        if not dims[place] or tensor.stride(place) == 0:
            tensor = tensor.select(place, 0)
        else:
            kept.append(dims[place])
    axes = resolved(axis for group in reversed(kept) for axis in group)
    return tensor.view(torch.Size(axis.size for axis in axes)), axes
