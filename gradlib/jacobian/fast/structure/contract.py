"""Products of tensors with named axes, and the cheapest order of several."""

import math
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from functools import cache, lru_cache
from typing import TypeAlias

import torch
from torch import Tensor

from gradlib.jacobian.fast.structure.named_axes import Axis

Axes: TypeAlias = tuple[Axis, ...]

ENTRY = 16
"""How many multiply-adds take as long as reading or writing an entry."""


@lru_cache(maxsize=4096)
def order(
    factors: tuple[int, ...], sizes: tuple[int, ...], kept: int
) -> tuple[tuple[int, int], ...]:
    """Return the cheapest order in which to multiply factors, two by two.

    Args:
        factors: The axes of each factor, as bits.
        sizes: The size of each axis.
        kept: The axes of the product, as bits; all others are summed over.

    Returns:
        The pairs to multiply, by position: each product is appended to the factors.
    """
    count = len(factors)
    every = (1 << count) - 1
    union = _unions(factors)

    @cache
    def volume(axes: int) -> float:
        return math.prod((it for i, it in enumerate(sizes) if axes >> i & 1), start=1.0)

    # The axes of each subset's product: those kept, and those of factors outside.
    left = [union[it] & (kept | union[every ^ it]) for it in range(every + 1)]
    for i in range(count):
        left[1 << i] = factors[i]
    best: list[float] = [0.0] * (every + 1)
    cut = [0] * (every + 1)
    for subset in range(1, every + 1):
        if not subset & (subset - 1):
            continue
        mine = ENTRY * volume(left[subset])
        cheapest = float("inf")
        part = (subset - 1) & subset
        while part:
            other = subset ^ part
            if part > other:
                one, two = left[part], left[other]
                cost = best[part] + best[other] + mine + volume(one | two)
                cost += ENTRY * (volume(one) + volume(two))
                if cost < cheapest:
                    cheapest, cut[subset] = cost, part
            part = (part - 1) & subset
        best[subset] = cheapest
    return _pairs(cut, count)


def _unions(factors: tuple[int, ...]) -> list[int]:
    """Return the axes of each subset of factors, all as bits."""
    union = [0] * (1 << len(factors))
    for subset in range(1, len(union)):
        low = subset & -subset
        union[subset] = union[subset ^ low] | factors[low.bit_length() - 1]
    return union


def _pairs(cut: list[int], count: int) -> tuple[tuple[int, int], ...]:
    """Return the pairs to multiply, in order.

    Args:
        cut: For each subset of factors, as bits, the subset that is the first of the
            two to multiply last.
        count: How many factors there are.
    """
    pairs: list[tuple[int, int]] = []

    def walk(subset: int) -> int:
        if not subset & (subset - 1):
            return subset.bit_length() - 1
        one, two = walk(cut[subset]), walk(subset ^ cut[subset])
        pairs.append((one, two))
        return count + len(pairs) - 1

    walk(len(cut) - 1)
    return tuple(pairs)


class Room:
    """Reuses memory: writing to fresh pages costs more than products do."""

    def __init__(self, like: Tensor) -> None:
        """Take a tensor of the dtype and device."""
        self._like = like
        self._free: dict[int, list[Tensor]] = {}

    def take(self, shape: Sequence[int]) -> Tensor:
        """Return a contiguous tensor with undefined values."""
        free = self._free.get(math.prod(shape))
        return free.pop().view(shape) if free else self._like.new_empty(shape)

    def give(self, tensor: Tensor) -> None:
        """Take back a tensor that is not read any more."""
        self._free.setdefault(tensor.numel(), []).append(tensor)


Product: TypeAlias = Callable[[Tensor, Tensor, Room], Tensor]


def product(one: Axes, two: Axes, kept: set[Axis]) -> tuple[Axes, Product]:
    """Return the axes of a product of two tensors, and the function that computes it.

    Args:
        one: The axes of the first.
        two: The axes of the second.
        kept: The axes that are not summed over.
    """
    shared = [axis for axis in one if axis in two]
    inner = [axis for axis in shared if axis not in kept]
    if not inner:
        return _elementwise(one, two)
    batch = [axis for axis in shared if axis in kept]
    rows = [axis for axis in one if axis not in two]
    columns = [axis for axis in two if axis not in one]
    first = _order_of(one, (*batch, *rows, *inner))
    second = _order_of(two, (*batch, *inner, *columns))
    b, r, i, c = len(batch), len(rows), len(inner), len(columns)

    def compute(x: Tensor, y: Tensor, room: Room) -> Tensor:
        x, y = x.permute(first), y.permute(second)
        made = room.take((*x.shape[: b + r], *y.shape[b + i :]))
        with (
            _matrices(x, (b, r, i), room) as left,
            _matrices(y, (b, i, c), room) as right,
        ):
            torch.bmm(left, right, out=_viewed(made, (b, r, c)))
        return made

    return (*batch, *rows, *columns), compute


@contextmanager
def _matrices(tensor: Tensor, counts: Sequence[int], room: Room) -> Generator[Tensor]:
    """Give a tensor as a batch of matrices; `counts` says how dimensions are merged."""
    try:
        matrices = _viewed(tensor, counts)
    except RuntimeError:  # no view: a copy is needed
        copy = room.take(tensor.shape).copy_(tensor)
        yield _viewed(copy, counts)
        room.give(copy)
    else:
        yield matrices


def _viewed(tensor: Tensor, counts: Sequence[int]) -> Tensor:
    shape: list[int] = []
    start = 0
    for count in counts:
        shape.append(tensor.shape[start : start + count].numel())
        start += count
    return tensor.view(shape)


def _elementwise(one: Axes, two: Axes) -> tuple[Axes, Product]:
    """Return the same for a product in which no axis is summed over."""
    axes = (*one, *(axis for axis in two if axis not in one))
    second = _order_of(two, tuple(axis for axis in axes if axis in two))
    holes = tuple(slice(None) if axis in two else None for axis in axes)
    more = len(axes) - len(one)

    def compute(x: Tensor, y: Tensor, room: Room) -> Tensor:
        x = x[(..., *[None] * more)]
        y = y.permute(second)[holes]
        made = room.take([max(it) for it in zip(x.shape, y.shape, strict=True)])
        return torch.mul(x, y, out=made)

    return axes, compute


def _order_of(axes: Axes, wanted: Sequence[Axis]) -> list[int]:
    return [axes.index(axis) for axis in wanted]
