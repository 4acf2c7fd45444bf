"""Numbers that sum up tensors."""

import math
from collections.abc import Iterable
from typing import Any, cast

import torch
from torch import Tensor


def norm(tensors: Iterable[Tensor]) -> float:
    """Return the Euclidean norm over all entries of all tensors.

    Args:
        tensors: Tensors of any shape and dtype, on any device. Sparse ones count too.

    Returns:
        The square root of the sum of squared magnitudes; 0 without tensors; NaN where
        there are no values, as on the meta device. Everything narrower than float32,
        integers included, is summed in float32.
    """
    return math.hypot(*map(_norm, tensors))


def _norm(tensor: Tensor) -> float:
    if tensor.is_meta:
        return math.nan
    values = tensor if tensor.layout == torch.strided else tensor.to_dense()
    wide = values.to(torch.promote_types(values.dtype, torch.float32))
    return cast(Any, torch.linalg).vector_norm(wide).item()
