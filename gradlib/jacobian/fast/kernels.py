"""torch's kernels as they are, and how several files call them."""

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor

aten = cast(Any, torch.ops.aten)

DTYPES = (torch.float32, torch.float64)
"""Others are rounded so much that another order would give another answer."""

INPUT_ALONE = [True, False, False]
"""Which gradients a kernel is to compute: of its input, and of no weight."""


def plain_conv2d_back(
    grad: Tensor, size: Sequence[int], weight: Tensor, *how: Any
) -> Tensor:
    """Go back through a convolution by the kernel that multiplies plain matrices.

    Args:
        grad: Of what came out, ``(batch, channels, height, width)``.
        size: Of what went in, without the batch.
        weight: The filters.
        how: The size of their windows, their strides, and the padding.
    """
    made, _, _ = aten._slow_conv2d_backward.output_mask(
        grad.contiguous(),
        grad.new_empty(grad.shape[0], *size),  # of which it takes no more than the size
        weight,
        *how,
        INPUT_ALONE,
    )
    return made
