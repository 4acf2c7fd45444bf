"""The tensors that one forward meets, each as it was at a moment."""

from collections.abc import Iterator
from typing import Any, NamedTuple

from torch import Tensor
from torch.autograd.graph import Node

from gradlib.private.nodes import CtcLoss
from gradlib.recorder.ends import End, end_of
from gradlib.recorder.tap import Tap
from gradlib.recorder.views import Region, base_of
from gradlib.recording.kept import UNKNOWN
from gradlib.values import Keep, copied, place_of, same_values


class Base(NamedTuple):
    """The base of a view."""

    tensor: Tensor
    end: End
    region: Region  # which part of it the view shows


NOT_KEPT = object()
"""Stands for what is kept of a value of which nothing is, so far."""


class Value:
    """A tensor with the value that it has in a forward until it is overwritten."""

    # Most values need none of these, so their defaults are attributes of the class.
    is_foreign = False  # as for `Values.of`
    base: Base | None = None
    # Its gradient, all uses together: `Grads`, or None until the tensor is hooked.
    grads: Any = None
    tap: Tap | None = None

    def __init__(
        self, tensor: Tensor, version: int, node: Node | None, kept: object
    ) -> None:
        """Take the tensor as it is now."""
        self.tensor = tensor
        self.version = version
        self.node = node
        self.kept = kept
        self.place = place_of(tensor)
        self.end: End = id(tensor) if node is None else (node, tensor.output_nr)
        if tensor._base is not None:
            # Once the tensor is overwritten, its gradient goes to its base.
            self.base = _base_of(tensor)

    def is_now(self, tensor: Tensor, version: int) -> bool:
        """Tell whether its tensor still has this value.

        The version alone does not tell: it stays the same where ``tensor.data`` or
        NumPy writes, and after ``detach_()``.
        """
        return (
            version == self.version != UNKNOWN
            and tensor.grad_fn is self.node
            and (place_of(tensor) == self.place or self._has_only_moved(tensor))
        )

    def _has_only_moved(self, tensor: Tensor) -> bool:
        """Tell whether a tensor whose memory has moved still has the value kept.

        What is kept shares the memory copy-on-write. A write moves the tensor, but so
        does merely asking for its pointer, as some convolutions do. On a GPU nothing is
        shared, so nothing moves.
        """
        kept = self.kept
        if tensor.is_cuda or not isinstance(kept, Tensor):
            return False
        if kept.device != tensor.device:
            return False
        if tensor.device.type == "cpu" and not same_values(tensor, kept):
            return False
        self.place = place_of(tensor)
        return True

    def overwritten(self) -> bool:
        """Tell whether the tensor was overwritten since."""
        return self.tensor._version != self.version


class Values:
    """The tensors met in one forward, each once.

    What one module returns, the next one takes: it is one value, unless the tensor was
    overwritten in between.
    """

    def __init__(self, keep: Keep) -> None:
        """Begin with none; `keep` returns what to keep of each."""
        self._keep = keep
        # By the id of the tensor, which its value keeps alive: else another may get it.
        self._known: dict[int, Value] = {}

    def of(self, tensor: Tensor, foreign: bool = False, keeps: bool = True) -> Value:
        """Return the value that `tensor` has now.

        Args:
            tensor: Any tensor.
            foreign: Whether it comes from outside the model. Then its memory may be
                written in ways that torch does not see, as by NumPy, so what is kept is
                copied at once.
            keeps: Whether to keep it, if that was not done before.
        """
        try:
            version = tensor._version
        except RuntimeError:
            version = UNKNOWN
        known = self._known.get(id(tensor))
        if known is not None and known.is_now(tensor, version):
            if keeps and known.kept is NOT_KEPT:
                known.kept = self._kept(tensor, known.is_foreign)
            return known
        kept = self._kept(tensor, foreign) if keeps else NOT_KEPT
        value = Value(tensor, version, tensor.grad_fn, kept)
        if foreign:
            value.is_foreign = True
        self._known[id(tensor)] = value
        return value

    def _kept(self, tensor: Tensor, foreign: bool) -> object:
        node = tensor.grad_fn
        copy_now = foreign and node is None and not tensor.is_cuda
        copy_now = copy_now or node.__class__ is CtcLoss
        return self._keep(copied(tensor) if copy_now else tensor)

    def __iter__(self) -> Iterator[Value]:
        """Yield the values met."""
        return iter(self._known.values())

    def clear(self) -> None:
        """Forget the tensors of the forward that ended."""
        self._known.clear()


def _base_of(tensor: Tensor) -> Base | None:
    found = base_of(tensor)
    return found and Base(found[0], end_of(found[0]), found[1])
