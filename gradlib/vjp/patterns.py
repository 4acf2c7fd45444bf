"""Which entries of a Jacobian are not zero: on a diagonal, one in each column, ..."""

from enum import Enum

from torch import Tensor

from gradlib.plain_tensors import wide
from gradlib.vjp.product import Product


class Pattern(Enum):
    """Where a block of J, dy/dx, is not zero at one x; the value says it in words."""

    UNKNOWN = "not computed"
    ZERO = "zero"
    DIAGONAL = "diagonal"
    ONE_PER_COLUMN = "no column with two nonzero entries"
    PER_SAMPLE = "block diagonal"
    FULL = ""
    HIDDEN = "with nan or inf"
    DOUBTFUL = "in doubt"

    @property
    def sums_one_entry(self) -> bool:
        """Whether the sum of each column has at most one nonzero term."""
        return self in (Pattern.ZERO, Pattern.DIAGONAL, Pattern.ONE_PER_COLUMN)


def patterns_of(product: Product) -> list[list[Pattern]]:
    """Return the pattern of each block of J, by output and by input."""
    if isinstance(product.jacobian, str):
        return [[Pattern.UNKNOWN] * len(product.results) for _ in product.v]
    if not product.jacobian.agrees:
        return [[Pattern.DOUBTFUL] * len(product.results) for _ in product.v]
    return [
        [_pattern_of(block, v.ndim) for block in row]
        for v, row in zip(product.v, product.jacobian.blocks, strict=True)
    ]


def _pattern_of(block: Tensor, axes: int) -> Pattern:
    """Return the pattern of a block, ``(*out, *in)``, where `out` has `axes` axes."""
    out, in_ = block.shape[:axes], block.shape[axes:]
    filled = wide(block).reshape(out.numel(), in_.numel()) != 0
    if not filled.any():
        return Pattern.ZERO
    if len(filled) == 1:
        return Pattern.FULL  # a single row is described without its pattern
    if out == in_ and _is_diagonal(filled):
        return Pattern.DIAGONAL
    if (filled.sum(0) <= 1).all():
        return Pattern.ONE_PER_COLUMN
    if out and in_ and out[0] == in_[0] > 1:
        samples = filled.reshape(out[0], -1, in_[0], in_[1:].numel())
        if _is_diagonal(samples.any(3).any(1)):
            return Pattern.PER_SAMPLE
    # A row is computed with a one-hot v, whose 0 times infinity is nan.
    return Pattern.FULL if wide(block).isfinite().all() else Pattern.HIDDEN


def _is_diagonal(filled: Tensor) -> bool:
    return not (filled & ~filled.diag().diag()).any()
