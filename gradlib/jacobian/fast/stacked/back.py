"""What a rule gives: the way back through an operation, for several vectors at once."""

from collections.abc import Callable
from typing import NamedTuple, TypeAlias

from torch import Tensor


class Part(NamedTuple):
    """A gradient that is zero but for a part.

    Attributes:
        region: Gives that part of a tensor like the gradient, as a view.
        values: What is there.
    """

    region: Callable[[Tensor], Tensor]
    values: Tensor


Back: TypeAlias = Callable[[Tensor], dict[int, Tensor | Part]]
"""From the gradients of what came out, ``(vectors, *out)``, to those of what went in,
by position. Where that was broadcast they are not summed up yet."""


def times(*scales: float) -> Back:
    """Return the way back to what has the same entries, times a number for each."""

    def back(grad: Tensor) -> dict[int, Tensor | Part]:
        return {
            i: grad if scale == 1 else grad * scale for i, scale in enumerate(scales)
        }

    return back
