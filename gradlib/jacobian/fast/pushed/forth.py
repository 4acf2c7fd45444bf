"""The JVP of an operation, for several vectors at once."""

from collections.abc import Callable, Mapping
from typing import TypeAlias

from torch import Tensor

Forth: TypeAlias = Callable[[Mapping[int, Tensor]], Tensor]
"""From the tangents of the inputs, ``(vectors, *in)``, by position, to that of the
output, ``(vectors, *out)``. Missing tangents are zero."""


def of_one(push: Callable[[Tensor], Tensor]) -> Forth:
    """Return the JVP of an operation with a single input."""
    return lambda given: push(given[0])


def as_samples(push: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """Return a function that passes all vectors to `push` as more samples."""

    def push_all(t: Tensor) -> Tensor:
        made = push(t.flatten(0, 1))
        return made.view(*t.shape[:2], *made.shape[1:])

    return push_all


def once(push: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """Return a function that calls `push` for one sample where all share a tangent.

    They do, with a stride of 0, until slopes that differ by sample enter.
    """

    def push_once(t: Tensor) -> Tensor:
        count = t.size(1)
        if t.stride(1) or count == 1:
            return push(t)
        made = push(t[:, :1])
        return made.expand(-1, count, *made.shape[2:])

    return push_once
