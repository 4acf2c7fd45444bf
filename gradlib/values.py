"""Keeping a tensor's value as it is now, at the price of a copy only if it changes."""

from typing import Any

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


class KeptValues:
    """The tensors kept in one forward, each once.

    What one module returns the next one takes: it is the same value, unless somebody
    overwrote the tensor in between.
    """

    def __init__(self) -> None:
        """Begin with none."""
        # The tensor is held too: its id is its own only while it lives.
        self._known: dict[int, tuple[Tensor, int, Tensor]] = {}

    def of(self, leaf: Any, *, foreign: bool = False) -> Any:
        """Return `leaf`, kept if it is a tensor.

        Args:
            leaf: Anything.
            foreign: Whether the tensor comes from outside the model. Then somebody may
                write to its memory in ways torch does not see, as NumPy does, and its
                value is copied at once.
        """
        if not isinstance(leaf, Tensor):
            return leaf
        if leaf.is_inference():
            return keep(leaf)  # has no version to tell whether it was overwritten
        version = leaf._version
        known = self._known.get(id(leaf))
        if known is not None and known[1] == version:
            return known[2]
        copy_now = foreign and leaf.grad_fn is None
        kept = leaf.detach().clone() if copy_now else keep(leaf)
        self._known[id(leaf)] = leaf, version, kept
        return kept

    def clear(self) -> None:
        """Forget the tensors of the forward that ended."""
        self._known.clear()
