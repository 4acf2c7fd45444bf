"""Keeping a tensor's value as it is now, at the price of a copy only if it changes."""

from torch import Tensor

from gradlib import private


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
    value = tensor.detach()
    try:
        return private.lazy_clone(value)
    except (RuntimeError, NotImplementedError):
        # Memory torch does not own (NumPy's, shared memory), and other layouts.
        return value.clone()
