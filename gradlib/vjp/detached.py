"""The tensors that detached ones were made from: they have the same memory."""

from collections.abc import Sequence
from types import FrameType
from typing import Any

from torch import Tensor

from gradlib.vjp.connection import unconnected
from gradlib.vjp.tensor_names import named_tensors


def original_of(
    tensor: Tensor, frames: Sequence[FrameType], of: Sequence[Any] = ()
) -> str:
    """Return the name of the tensor that `tensor` is a detached view of, or ``""``.

    Args:
        tensor: The tensor that may be detached.
        frames: Where to look for the name.
        of: Outputs that the original has to lead to; any will do if empty.
    """
    for name, it in named_tensors(frames):
        is_original = it.requires_grad and have_same_memory(it, tensor)
        if is_original and not (of and unconnected(of, [it])):
            return name
    return ""


def have_same_memory(one: Tensor, other: Tensor) -> bool:
    """Tell whether two tensors have the same values in the same memory."""
    view = view_of(one)
    return view is not None and view == view_of(other)


def view_of(tensor: Tensor) -> tuple[Any, ...] | None:
    """Return how a tensor views memory: from where, which entries, and as what.

    Returns:
        ``None`` where it has no memory of its own: sparse, or a stand-in.
    """
    try:
        start, entries = tensor.data_ptr(), (tensor.shape, tensor.stride())
    except RuntimeError:
        return None
    as_what = tensor.dtype, tensor.is_conj(), tensor.is_neg()
    return (start, *entries, *as_what) if start else None
