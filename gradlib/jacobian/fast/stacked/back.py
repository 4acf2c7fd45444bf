"""The backward of an operation, for several vectors at once, as rules give it."""

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, TypeAlias

from torch import Tensor


class Part(NamedTuple):
    """A gradient that is zero but for some rows of a dimension.

    Attributes:
        dim: The dimension, counting that of the vectors.
        rows: Which rows.
        values: The gradient in these rows.
    """

    dim: int
    rows: range
    values: Tensor


Back: TypeAlias = Callable[[Tensor], Mapping[int, Tensor | Part]]
"""From the gradients of the output, ``(vectors, *out)``, to those of the inputs, by
position: ``(vectors, *in)``."""


Scale: TypeAlias = Callable[[Tensor], dict[int, Tensor]]


def times(*scales: float) -> Scale:
    """Return the backward to inputs with the output's entries, each with a factor."""

    def back(grad: Tensor) -> dict[int, Tensor]:
        return {
            i: grad if scale == 1 else grad * scale for i, scale in enumerate(scales)
        }

    return back


def sum_to_shape(grad: Tensor, shape: Sequence[int]) -> Tensor:
    """Sum a gradient over the axes that the input was broadcast along.

    Args:
        grad: The gradients of the broadcast input, ``(vectors, *out)``.
        shape: The shape of the input.

    Returns:
        ``(vectors, *shape)``.
    """
    if grad.shape[1:] == shape:
        return grad
    more = grad.dim() - 1 - len(shape)
    count = grad.size(0)
    return grad.sum_to_size(count, *[1] * more, *shape).reshape(count, *shape)
