"""A Jacobian as a sum of products of small tensors, none of them computed yet."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

from torch import Tensor

from gradlib.jacobian.fast.structure.named_axes import (
    Axis,
    Dims,
    aligned,
    flat,
    fresh,
    length,
    resolved,
    view_of,
)
from gradlib.jacobian.fast.structure.rules import Back


@dataclass(frozen=True)
class Term:
    """A product: dY/dH of one tensor H, or a part of it.

    It is zero where two entries differ along an axis that Y and H both have: a token is
    a function of itself only. Axes that neither has are summed over.

    Attributes:
        factors: Tensors, or sums, with their axes.
        dims: The axes of H.
        scale: A number it is multiplied by too.
    """

    factors: tuple["Factor", ...]
    dims: Dims
    scale: float = 1


@dataclass(frozen=True, eq=False)
class Sum:
    """What terms add up to, with the same axes for all of them.

    Attributes:
        terms: At the same tensor H.
        dims: The axes of H here.
    """

    terms: tuple[Term, ...]
    dims: Dims

    def as_term(self, rows: Sequence[Axis]) -> Term:
        """Return it as one factor."""
        mine = dict.fromkeys(flat(self.dims)) | dict.fromkeys(resolved(rows))
        return Term(((self, tuple(it for it in mine if self.has(it))),), self.dims)

    def has(self, axis: Axis) -> bool:
        """Return whether it has an axis, and is not just zero off the diagonal."""
        for term in self.terms:
            for mine, theirs in zip(flat(term.dims), flat(self.dims), strict=True):
                if mine is not theirs and axis in (mine, theirs):
                    return True
            if any(axis in resolved(axes) for _, axes in term.factors):
                return True
        return False


Factor: TypeAlias = tuple[Tensor | Sum, tuple[Axis, ...]]


def through(
    term: Term, back: Back, shape: Sequence[int], rows: Sequence[Axis]
) -> tuple[Term, int] | None:
    """Carry a term through an operation, to something that went in.

    Args:
        term: Of what came out.
        back: The map.
        shape: Of what went in.
        rows: The axes of Y.

    Returns:
        The term, and the multiply-adds of a backward pass; ``None`` where the map does
        not know what to do.
    """
    step = back(term.dims)
    if step is None:
        return None
    dims = step.dims[len(step.dims) - len(shape) :]
    # What was broadcast is summed over.
    dims = tuple(
        () if size == 1 else axes for size, axes in zip(shape, dims, strict=True)
    )
    if any(length(axes) != size for axes, size in zip(dims, shape, strict=True)):
        return None
    factors = term.factors + tuple(view_of(*factor) for factor in step.factors)
    kept = set(flat(dims)) | set(resolved(rows))
    scale = term.scale * step.scale
    had = set(resolved(it for _, axes in factors for it in axes))
    came = set(flat(term.dims))
    for _, given in step.factors:
        came |= set(flat(given))
    for axis in came - kept - had:
        scale *= axis.size
    return Term(factors, dims, scale), step.work


def added(
    terms: Sequence[Term], rows: Sequence[Axis], batch: Sequence[Axis] | None = None
) -> Sum | None:
    """Return what terms at one tensor add up to.

    Args:
        terms: The terms.
        rows: The axes of Y.
        batch: Where H is what Y is differentiated for: the batch, which must be the
            axes of its first dimension; all others become its own.

    Returns:
        ``None`` where their axes do not fit to each other.
    """
    dims: list[tuple[Axis, ...]] = []
    columns: list[list[tuple[Axis, ...]]] = []
    for place in range(len(terms[0].dims)):
        several = aligned([term.dims[place] for term in terms])
        if several is None:
            return None
        columns.append(several)
    of_y = set(resolved(rows))
    used: set[Axis] = set()
    for place, given in enumerate(columns):
        several = [resolved(axes) for axes in given]
        if len({tuple(it.size for it in axes) for axes in several}) > 1:
            return None  # the dimensions after this one have split an axis here
        if batch is not None and place == 0:
            if any(axes != resolved(batch) for axes in several):
                return None
            dims.append(resolved(batch))
            continue
        axes: list[Axis] = []
        for one, *others in zip(*several, strict=True):
            same = all(it is one for it in others) and one not in used
            if not same or (batch is not None and one in of_y):
                (found,) = fresh([one.size])
                axes += found
            else:
                axes.append(one)
                used.add(one)
        dims.append(tuple(axes))
    return Sum(tuple(terms), tuple(dims))


def settle(total: Sum) -> bool:
    """Split axes until all sums, this and those in it, have those of their terms.

    A view that comes later may have split an axis of a sum, which its terms have under
    another name.

    Returns:
        Whether that can be.
    """
    sums = [total]
    for each in sums:  # it grows
        for term in each.terms:
            sums += [it for it, _ in term.factors if isinstance(it, Sum)]
    sums = list(dict.fromkeys(sums))
    count = -1
    while count != (count := sum(_axes(each) for each in sums)):
        for each in sums:
            for places in zip(each.dims, *(it.dims for it in each.terms), strict=True):
                if aligned(places) is None:
                    return False
    return True


def _axes(total: Sum) -> int:
    return len(flat(total.dims)) + sum(len(flat(term.dims)) for term in total.terms)
