"""torch's kernels, and the calls of them that several files share."""

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor

aten = cast(Any, torch.ops.aten)

DTYPES = (torch.float32, torch.float64)
"""In narrower dtypes another order of operations would change the result visibly."""

INPUT_ALONE = [True, False, False]
"""The output mask of a backward kernel: the gradient of the input, none of weights."""


def plain_conv2d_back(
    grad: Tensor, size: Sequence[int], weight: Tensor, *how: Any
) -> Tensor:
    """Go back through a convolution by the kernel that multiplies plain matrices.

    Args:
        grad: The output's gradient, ``(batch, channels, height, width)``.
        size: The input's shape without the batch.
        weight: The filters, ``(outs, ins, height, width)``.
        how: Kernel size, stride and padding.
    """
    made, _, _ = aten._slow_conv2d_backward.output_mask(
        grad.contiguous(),
        grad.new_empty(grad.shape[0], *size),  # only its size is read
        weight,
        *how,
        INPUT_ALONE,
    )
    return made
