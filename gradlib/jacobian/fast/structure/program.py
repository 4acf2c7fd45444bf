"""The products and sums that a Jacobian is computed by, in order."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

from gradlib.jacobian.fast.structure.contract import (
    ENTRY,
    Axes,
    Room,
    order,
    product,
)
from gradlib.jacobian.fast.structure.named_axes import Axis, flat, length, resolved
from gradlib.jacobian.fast.structure.terms import Sum, Term

Slices: TypeAlias = dict[Axis, tuple[int, int]]
"""The current rows: for each sliced axis of Y the start and length of the slice."""


@dataclass(frozen=True)
class Now:
    """The context that a value is computed in.

    Attributes:
        slices: The current rows.
        room: Gives the memory.
        mine: For each part of the value whether it may be overwritten.
        into: The tensor to write the value to; ``None`` for new memory.
    """

    slices: Slices
    room: Room
    mine: tuple[bool, ...]
    into: Tensor | None


Compute: TypeAlias = Callable[[list[Tensor], Now], Tensor]


@dataclass(eq=False)
class Value:
    """A tensor with named axes that is computed from others.

    Attributes:
        axes: Its axes, in order.
        parts: The values it is computed from.
        compute: Computes it from the tensors of its parts.
        work: How many multiply-adds that takes.
    """

    axes: Axes
    parts: tuple["Value", ...]
    compute: Compute
    work: float = 0


class Builder:
    """Turns sums into values, each made once and after its parts."""

    def __init__(self, rows: Axes, like: Tensor) -> None:
        """Take the axes of Y, and a tensor of the dtype and device."""
        self.rows = rows
        self.values: list[Value] = []
        self._made: dict[Sum, Value] = {}
        self._constants: list[Tensor] = []
        self._one = torch.ones((), dtype=like.dtype, device=like.device)

    def of_sum(self, total: Sum, *, whole: bool = False) -> Value:
        """Return the value of a sum.

        Args:
            total: The sum.
            whole: Whether it must have all axes of Y and X, in order, even those that
                it does not depend on.
        """
        if total not in self._made:
            self._made[total] = self._sum(total, whole)
        return self._made[total]

    def are_finite(self) -> Tensor:
        """Return whether all constants are finite: zero times infinity would be NaN."""
        # aminmax() takes a tenth of isfinite()'s time; a GPU is waited for once.
        ends = [end for it in self._constants if it.numel() for end in it.aminmax()]
        return torch.stack([self._one, *ends]).isfinite().all()

    def _sum(self, total: Sum, whole: bool) -> Value:
        dims = flat(total.dims)
        if whole:
            axes = (*self.rows, *(it for it in dims if it not in self.rows))
        else:
            axes = resolved(total.as_term(self.rows).factors[0][1])
        given = [(self._term(term), term) for term in total.terms]
        # Products come first: no other value uses them, so terms can be added to them.
        given.sort(key=lambda it: len(it[1].factors) < 2)
        parts = [
            _Part(value, term.scale, _places(value.axes, term, dims, self.rows))
            for value, term in given
        ]
        # Before all comes a part that has every axis, if there is one.
        parts.sort(key=lambda part: not part.covers(axes))
        if not whole and parts[0].covers(axes):
            axes = tuple(axis for (axis,) in parts[0].places)
        work = ENTRY * 2 * length(axes)
        made = self._kept(Value(axes, (parts[0].value,), _start(axes, parts[0]), work))
        for part in parts[1:]:
            values = (made, part.value)
            made = self._kept(Value(axes, values, _adder(axes, part), work))
        return made

    def _term(self, term: Term) -> Value:
        factors = {
            i: self.of_sum(source)
            if isinstance(source, Sum)
            else self._constant(source, resolved(axes))
            for i, (source, axes) in enumerate(term.factors)
        }
        if not factors:
            return self._constant(self._one, ())
        kept = set(self.rows) | set(flat(term.dims))
        pairs = _pairs([it.axes for it in factors.values()], kept)
        for number, (one, two) in enumerate(pairs, len(factors)):
            first, second = factors.pop(one), factors.pop(two)
            wanted = kept.union(*(value.axes for value in factors.values()))
            factors[number] = self._product(first, second, wanted)
        (value,) = factors.values()
        return self._summed(value, kept)

    def _product(self, first: Value, second: Value, wanted: set[Axis]) -> Value:
        if length(second.axes) > length(first.axes):
            first, second = second, first
        one = self._summed(first, wanted.union(second.axes))
        two = self._summed(second, wanted.union(first.axes))
        axes, multiply = product(one.axes, two.axes, wanted)
        sizes = (length(it) for it in (axes, one.axes, two.axes))
        work = length({*one.axes, *two.axes}) + ENTRY * sum(sizes)

        def compute(given: list[Tensor], now: Now) -> Tensor:
            return multiply(given[0], given[1], now.room)

        return self._kept(Value(axes, (one, two), compute, work))

    def _summed(self, value: Value, wanted: set[Axis]) -> Value:
        gone = [i for i, axis in enumerate(value.axes) if axis not in wanted]
        if not gone:
            return value
        axes = tuple(axis for axis in value.axes if axis in wanted)
        work = ENTRY * length(value.axes)
        return self._kept(Value(axes, (value,), _summer(gone), work))

    def _constant(self, tensor: Tensor, axes: Axes) -> Value:
        whole = tensor.view([axis.size for axis in axes])
        self._constants.append(whole)
        return self._kept(Value(axes, (), lambda _, __: whole))

    def _kept(self, value: Value) -> Value:
        self.values.append(value)
        return value


def _summer(gone: list[int]) -> Compute:
    """Return the function that sums a value over some axes."""

    def compute(given: list[Tensor], now: Now) -> Tensor:
        shape = [it for i, it in enumerate(given[0].shape) if i not in gone]
        return torch.sum(given[0], gone, out=now.room.take(shape))

    return compute


def _pairs(factors: Sequence[Axes], kept: set[Axis]) -> Sequence[tuple[int, int]]:
    """Return the pairs of factors to multiply, in the cheapest order."""
    numbers: dict[Axis, int] = {}
    for axes in factors:
        for axis in axes:
            numbers.setdefault(axis, len(numbers))
    bits = tuple(sum(1 << numbers[it] for it in axes) for axes in factors)
    keep = sum(1 << number for axis, number in numbers.items() if axis in kept)
    return order(bits, tuple(axis.size for axis in numbers), keep)


@dataclass(frozen=True)
class _Part:
    """A term of a sum.

    Attributes:
        value: Its value.
        scale: The factor of the value.
        places: For each axis of the value those of the sum that it runs along. There
            are more places than axes where the term has a factor of the identity.
    """

    value: Value
    scale: float
    places: list[Axes]

    def covers(self, axes: Axes) -> bool:
        """Return whether the term has an entry for every entry of the sum."""
        return len(self.places) == len(axes)

    def like(self, tensor: Tensor, axes: Axes) -> Tensor:
        """Return its value's tensor with the axes in the order of the sum's."""
        return tensor.permute([self.places.index((axis,)) for axis in axes])


def _places(value: Axes, term: Term, dims: Axes, rows: Axes) -> list[Axes]:
    """Return for each axis of a term those of the sum that it runs along.

    An axis of Y runs along two, a diagonal, where the sum has another axis for H: the
    term has them tied. Diagonals along which the term has no entries come last.
    """
    mine = flat(term.dims)
    new = dict(zip(mine, dims, strict=True))

    def place(axis: Axis) -> Axes:
        target = new.get(axis, axis)
        return (axis, target) if axis in rows and target is not axis else (target,)

    more = [it for it in mine if it not in value and len(place(it)) > 1]
    return [place(axis) for axis in (*value, *more)]


def _start(axes: Axes, part: _Part) -> Compute:
    """Return the function that starts a sum with its first term."""

    def compute(given: list[Tensor], now: Now) -> Tensor:
        if part.covers(axes):
            start = part.like(given[0], axes)
            if now.into is None and now.mine[0]:
                return start if part.scale == 1 else start.mul_(part.scale)
            total = now.room.take(start.shape) if now.into is None else now.into
            return torch.mul(start, part.scale, out=total)
        slices = now.slices
        shape = [slices[it][1] if it in slices else it.size for it in axes]
        total = now.room.take(shape) if now.into is None else now.into
        _add(total.zero_(), axes, part, given[0], slices)
        return total

    return compute


def _adder(axes: Axes, part: _Part) -> Compute:
    """Return the function that adds another term to a sum."""

    def compute(given: list[Tensor], now: Now) -> Tensor:
        total, tensor = given
        if now.into is not None:
            total = now.into.copy_(total)
        elif not now.mine[0]:
            total = now.room.take(total.shape).copy_(total)
        _add(total, axes, part, tensor, now.slices)
        return total

    return compute


def _add(
    total: Tensor, axes: Axes, part: _Part, tensor: Tensor, slices: Slices
) -> None:
    """Add a term to a sum, on its diagonals where it has some."""
    strides = dict(zip(axes, total.stride(), strict=True))
    sizes = dict(zip(axes, total.shape, strict=True))
    offset = total.storage_offset()
    shape: list[int] = []
    steps: list[int] = []
    for place in part.places:
        shape.append(sizes[place[0]])
        steps.append(sum(strides[axis] for axis in place))
        if len(place) > 1 and place[0] in slices:
            offset += slices[place[0]][0] * strides[place[1]]
    covered = {axis for place in part.places for axis in place}
    for axis in axes:
        if axis not in covered:  # the term is constant along it
            shape.append(sizes[axis])
            steps.append(strides[axis])
    holes = len(shape) - tensor.dim()
    tensor = tensor[(..., *[None] * holes)]
    total.as_strided(shape, steps, offset).add_(tensor, alpha=part.scale)
