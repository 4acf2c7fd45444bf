"""Keeping a tensor's value as it is now, at the price of a copy only if it changes."""

from collections.abc import Callable
from typing import Any, TypeAlias

import torch
from torch import Tensor

from gradlib import private

Keep: TypeAlias = Callable[[Tensor], Any]
"""A function that gives what to keep of a tensor."""


def keep(tensor: Tensor) -> Tensor:
    """Return a detached tensor that keeps the value `tensor` has now.

    Later in-place operations on `tensor`, or on a view of it, do not reach the result.

    Args:
        tensor: Any tensor.

    Returns:
        A tensor of the same shape, dtype and device, without autograd history. It
        shares memory with `tensor` until one of the two is written to, where torch can
        do that, and is a copy otherwise.
    """
    value = tensor.detach() if tensor.requires_grad else tensor
    try:
        return private.lazy_clone(value)
    except (RuntimeError, NotImplementedError):
        # Memory torch does not own (NumPy's, shared memory), and other layouts.
        return value.clone()


def keeper(
    reduce: Callable[[Tensor], Any] | None, device: torch.device | str | int | None
) -> Keep:
    """Return the function that gives what to keep of a tensor.

    Args:
        reduce: Whose result is kept instead of the tensor.
        device: Where the tensors go that are kept.
    """
    if reduce is None and device is None:
        return keep

    def kept(tensor: Tensor) -> Any:
        result: Any = keep(tensor)
        if reduce is not None:
            result = reduce(result)
        if device is not None and isinstance(result, Tensor):
            result = result.to(device, non_blocking=True)
        return result

    return kept
