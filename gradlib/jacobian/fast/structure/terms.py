"""A Jacobian as a sum of products of small tensors, before they are computed."""

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
    """A product of factors: dY/dH for a tensor H, or one term of it.

    It is zero where two entries differ along an axis that Y and H both have: a token
    depends on itself only. Axes that neither has are summed over.

    Attributes:
        factors: Tensors, or sums, with their axes.
        dims: The axes of H.
        scale: A number that multiplies the product.
    """

    factors: tuple["Factor", ...]
    dims: Dims
    scale: float = 1


@dataclass(frozen=True, eq=False)
class Sum:
    """A sum of terms at the same tensor H, with common axes.

    Attributes:
        terms: The terms.
        dims: The axes of H in the sum.
    """

    terms: tuple[Term, ...]
    dims: Dims

    def as_term(self, rows: Sequence[Axis]) -> Term:
        """Return a term with this sum as its only factor."""
        mine = dict.fromkeys(flat(self.dims)) | dict.fromkeys(resolved(rows))
        return Term(((self, tuple(it for it in mine if self.has(it))),), self.dims)

    def has(self, axis: Axis) -> bool:
        """Return whether the sum needs an axis; the identity along one needs none."""
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
    """Carry a term through an operation, to one of its inputs.

    Args:
        term: A term at the operation's output.
        back: The map to the input.
        shape: The shape of the input.
        rows: The axes of Y.

    Returns:
        The term at the input, and the multiply-adds of a backward pass; ``None`` where
        the map cannot be applied.
    """
    step = back(term.dims)
    if step is None:
        return None
    dims = step.dims[len(step.dims) - len(shape) :]
    # An input that was broadcast is summed over.
    dims = tuple(
        () if size == 1 else axes for size, axes in zip(shape, dims, strict=True)
    )
    if any(length(axes) != size for axes, size in zip(dims, shape, strict=True)):
        return None
    factors = term.factors + tuple(view_of(*factor) for factor in step.factors)
    kept = set(flat(dims)) | set(resolved(rows))
    scale = term.scale * step.scale
    had = set(resolved(it for _, axes in factors for it in axes))
    came = set(flat(term.dims)).union(*(flat(given) for _, given in step.factors))
    for axis in came - kept - had:
        scale *= axis.size
    return Term(factors, dims, scale), step.work


def added(
    terms: Sequence[Term], rows: Sequence[Axis], batch: Sequence[Axis] | None = None
) -> Sum | None:
    """Return the sum of terms at one tensor H.

    Args:
        terms: The terms.
        rows: The axes of Y.
        batch: Where H is X, the axes of the batch, which must be those of its first
            dimension; X gets new axes for the others that Y has too.

    Returns:
        ``None`` where the axes of the terms do not fit together.
    """
    dims: list[tuple[Axis, ...]] = []
    columns: list[list[tuple[Axis, ...]]] = []
    for place in range(len(terms[0].dims)):
        several = aligned([term.dims[place] for term in terms])
        if several is None:
            return None
        columns.append(several)
    of_y = set(resolved(rows))
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
            same = all(it is one for it in others)
            if not same or (batch is not None and one in of_y):
                (new,) = fresh([one.size])
                axes += new
            else:
                axes.append(one)
        dims.append(tuple(axes))
    return Sum(tuple(terms), tuple(dims))


def settle(total: Sum) -> bool:
    """Split axes until this sum, and each sum in it, agrees with its terms.

    A view may have split an axis of a sum later, but not the axes of its terms that
    correspond to it.

    Returns:
        Whether they can agree.
    """
    sums = [total]
    for each in sums:  # the list grows meanwhile
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
