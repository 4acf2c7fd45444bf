"""What a rule says of an operation."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

from torch import Tensor

from gradlib.jacobian.fast.structure.named_axes import Dims


@dataclass(frozen=True)
class Step:
    """From what came out of an operation to one thing that went in.

    Attributes:
        dims: The axes of what went in.
        factors: Tensors with the axes of theirs. The derivative is their product, and
            zero where two entries differ along an axis that both sides have.
        scale: A number it is multiplied by too.
        work: The multiply-adds that a backward pass takes here.
    """

    dims: Dims
    factors: tuple[tuple[Tensor, Dims], ...] = ()
    scale: float = 1
    work: int = 0


Back: TypeAlias = Callable[[Dims], Step | None]
"""From the axes of what came out of an operation."""


def same(*scales: float) -> dict[int, Back]:
    """Return maps to what has the same axes, times a number for each."""

    def back(scale: float) -> Back:
        return lambda dims: Step(dims, scale=scale)

    return {i: back(scale) for i, scale in enumerate(scales)}
