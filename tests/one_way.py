"""A function of which one argument gets no gradient."""

from typing import Any, cast

import torch
from torch import Tensor


class OneWay(torch.autograd.Function):
    """A product whose second factor gets no gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor) -> Tensor:
        ctx.save_for_backward(y)
        return x * y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return grads[0] * ctx.saved_tensors[0], None


def one_way(x: Tensor, y: Tensor) -> Tensor:
    """Return the product."""
    return cast(Any, OneWay.apply)(x, y)
