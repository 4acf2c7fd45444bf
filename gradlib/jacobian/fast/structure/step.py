"""The derivative of an operation by one input, in named axes."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

from torch import Tensor

from gradlib.jacobian.fast.structure.named_axes import Dims


@dataclass(frozen=True)
class Step:
    """The derivative of an operation's output by one of its inputs.

    Attributes:
        dims: The axes of the input.
        factors: Tensors with their axes. The derivative is their product, and zero
            where two entries differ along an axis that output and input both have.
        scale: A number that multiplies the product.
        work: How many multiply-adds a backward pass takes here.
    """

    dims: Dims
    factors: tuple[tuple[Tensor, Dims], ...] = ()
    scale: float = 1
    work: int = 0


Back: TypeAlias = Callable[[Dims], Step | None]
"""From the axes of an operation's output to the step; ``None`` where there is none."""


def same(*scales: float) -> dict[int, Back]:
    """Return maps to inputs with the output's axes, each with a factor."""

    def back(scale: float) -> Back:
        return lambda dims: Step(dims, scale=scale)

    return {i: back(scale) for i, scale in enumerate(scales)}
