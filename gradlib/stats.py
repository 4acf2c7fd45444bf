"""Numbers that sum up tensors."""

import math
from collections.abc import Iterable
from typing import Any, cast

import torch
from torch import Tensor


def norm(tensors: Iterable[Tensor]) -> float:
    """Return the Euclidean norm over all entries of all tensors.

    Args:
        tensors: Tensors of any shape, dtype and device.

    Returns:
        The square root of the sum of squared magnitudes; 0 without tensors. Halves and
        integers are summed in float32, everything else in its own precision.
    """
    return math.hypot(*map(_norm, tensors))


def _norm(tensor: Tensor) -> float:
    dtype = torch.promote_types(tensor.dtype, torch.float32)
    return cast(Any, torch.linalg).vector_norm(tensor, dtype=dtype).item()
