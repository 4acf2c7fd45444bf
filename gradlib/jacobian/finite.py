"""Whether numbers are finite: of others, zero times them is NaN."""

import math
from collections.abc import Iterable

from torch import Tensor


def are_finite(tensors: Iterable[Tensor]) -> bool:
    """Tell whether all entries are finite, and so are their sums, which are soon had.

    Args:
        tensors: Of any dtype. On a GPU each is waited for.
    """
    return all(math.isfinite(it.sum().item()) for it in tensors)
