"""A way forward through an operation, for several vectors at once."""

from collections.abc import Callable, Mapping
from typing import TypeAlias

from torch import Tensor

Forth: TypeAlias = Callable[[Mapping[int, Tensor]], Tensor]
"""From the tangents of what went in, ``(vectors, *in)``, by position, to that of what
came out, ``(vectors, *out)``. Some may be missing: they are zero."""


def of_one(push: Callable[[Tensor], Tensor]) -> Forth:
    """Return the way from what went in alone."""
    return lambda given: push(given[0])


def as_samples(push: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """Return the way of all vectors, as if they were more samples."""

    def go(t: Tensor) -> Tensor:
        made = push(t.flatten(0, 1))
        return made.view(*t.shape[:2], *made.shape[1:])

    return go


def once(push: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """Return a way that is gone once for all samples, where their tangents are one.

    So they are as far as no slope of a sample's own has come into them.
    """

    def go(t: Tensor) -> Tensor:
        count = t.size(1)
        if t.stride(1) or count == 1:
            return push(t)
        made = push(t[:, :1])
        return made.expand(-1, count, *made.shape[2:])

    return go
