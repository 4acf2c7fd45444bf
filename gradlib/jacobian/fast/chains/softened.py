"""The softmax that a chain may end with: it mixes the entries of a sample's output."""

import torch
from torch import Tensor, nn


def softened(
    softmax: nn.Softmax | nn.LogSoftmax,
    y: Tensor,
    jacobian: Tensor,
    into: Tensor | None,
) -> Tensor:
    """Return the Jacobian of a softmax of y, or of its logarithm.

    Args:
        softmax: Which of the two it is.
        y: What it is given, ``(batch, outs)``.
        jacobian: Of y: ``(batch, outs, ins)``, or ``(outs, ins)`` if all samples share
            it.
        into: Where to write it; ``None`` for memory of its own.
    """
    p = y.softmax(1)
    # First the difference from 1: where that is small, it is exact.
    slope = torch.eye(p.shape[1], dtype=p.dtype, device=p.device) - p.unsqueeze(1)
    if type(softmax) is nn.Softmax:
        slope = slope * p.unsqueeze(2)
    return torch.matmul(slope, jacobian, out=into)
