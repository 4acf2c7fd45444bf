"""What a rule gives: the way back through an operation, for several vectors at once."""

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import NamedTuple, TypeAlias

from torch import Tensor


class Part(NamedTuple):
    """A gradient that is zero but for some rows of a dimension.

    Attributes:
        dim: Which dimension, the vectors' included.
        rows: Which rows.
        values: What is there.
    """

    dim: int
    rows: range
    values: Tensor

    def of(self, whole: Tensor) -> Tensor:
        """Return that part of a tensor, as a view."""
        picked = slice(self.rows.start, self.rows.stop, self.rows.step)
        return whole[(slice(None),) * self.dim + (picked,)]


Back: TypeAlias = Callable[[Tensor], Mapping[int, Tensor | Part]]
"""From the gradients of what came out, ``(vectors, *out)``, to those of what went in,
by position: ``(vectors, *in)``."""


Scale: TypeAlias = Callable[[Tensor], dict[int, Tensor]]


@lru_cache(maxsize=64)
def times(*scales: float) -> Scale:
    """Return the way back to what has the same entries, times a number for each."""

    def back(grad: Tensor) -> dict[int, Tensor]:
        return {
            i: grad if scale == 1 else grad * scale for i, scale in enumerate(scales)
        }

    return back


def sum_to_shape(grad: Tensor, shape: Sequence[int]) -> Tensor:
    """Sum up over what was broadcast to make more of it.

    Args:
        grad: ``(vectors, *out)``.
        shape: Of what went in. If nothing was, it is that of what came out.
    """
    if grad.shape[1:] == shape:
        return grad
    more = grad.dim() - 1 - len(shape)
    count = grad.size(0)
    return grad.sum_to_size(count, *[1] * more, *shape).reshape(count, *shape)
