"""What in-place operations do to views, and how to see past it.

When a view is overwritten in place, autograd drops the view's node from the graph and
with it every hook on the view. The gradient then goes to the view's base directly; the
view's own gradient is the part of it that the view showed.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.autograd.graph import Node

from gradlib.edges import Edge
from gradlib.private.modes import no_classes_of_tensors, unseen
from gradlib.private.nodes import CopySlices, sequence_number
from gradlib.private.tensors import negative_view


@dataclass(frozen=True)
class Region:
    """The part of its base that a view shows.

    Attributes:
        base_size: The base's size.
        base_stride: The base's strides.
        size: The view's size.
        stride: The view's strides.
        offset: Where the view begins in the base, in entries of the view.
        dtype: The view's dtype: it may be real where the base's is complex, or reverse.
        conjugate: Whether the view shows the conjugate.
        negative: Whether it shows the negative, as a conjugate's imaginary part does.
    """

    base_size: torch.Size
    base_stride: tuple[int, ...]
    size: torch.Size
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype
    conjugate: bool
    negative: bool

    def of(self, gradient: Tensor) -> Tensor:
        """Return the part of the base's gradient that belongs to the view."""
        with unseen():
            gradient = gradient.resolve_conj().resolve_neg()
            if gradient.stride() != self.base_stride:
                gradient = self._room(gradient).copy_(gradient)
            return self._seen(gradient)

    def alone(self, gradient: Tensor) -> Tensor:
        """Return the base's gradient, with zeros outside of the view's part."""
        with unseen():
            made = self._room(gradient).zero_()
            self._seen(made).copy_(self.of(gradient))
            return made

    def _room(self, like: Tensor) -> Tensor:
        """Return memory for a gradient of the base, laid out as the base was."""
        return like.new_empty_strided(self.base_size, self.base_stride)

    def _seen(self, base: Tensor) -> Tensor:
        """Return the view of a base whose memory is laid out as the base's was."""
        offset = int(base.storage_offset())
        if base.dtype == self.dtype:
            seen = base.as_strided(self.size, self.stride, offset + self.offset)
        else:
            offset = offset * base.itemsize // self.dtype.itemsize
            seen = torch.empty(0, dtype=self.dtype, device=base.device).set_(
                base.untyped_storage(), offset + self.offset, self.size, self.stride
            )
        seen = seen.conj() if self.conjugate else seen
        return negative_view(seen) if self.negative else seen


def base_of(view: Tensor) -> tuple[Tensor, Region] | None:
    """Return what `view` is a view of, and which part of it; ``None`` for no view."""
    base = view._base
    if base is None or not base.requires_grad:
        return None
    begins = int(base.storage_offset()) * base.itemsize // view.itemsize
    shown = Region(
        base.size(),
        base.stride(),
        view.size(),
        view.stride(),
        int(view.storage_offset()) - begins,
        view.dtype,
        view.is_conj() != base.is_conj(),
        view.is_neg() != base.is_neg(),
    )
    return base, shown


def watch(tensor: Tensor) -> Callable[[], bool]:
    """Return a function that tells whether `tensor` was overwritten since.

    It keeps none of the tensor's memory alive.
    """
    with unseen(), no_classes_of_tensors():
        probe = tensor.detach()
        nothing = torch.empty(0, dtype=probe.dtype, device=probe.device)
        probe.data = nothing  # the version counter stays the tensor's
    version = probe._version
    return lambda: probe._version != version


def overwriting(base: Tensor, end: Edge) -> list[Node]:
    """Return the nodes through which views of a tensor were overwritten.

    Args:
        base: The tensor, as it is now.
        end: Where its gradient went before it was overwritten.
    """
    found: list[Node] = []
    seen: set[Node] = set()
    stack = [base.grad_fn]
    while stack:
        node = stack.pop()
        if (
            node is None
            or node in seen
            or sequence_number(node) < sequence_number(end[0])
        ):
            continue
        seen.add(node)
        edges = node.next_functions
        if type(node) is CopySlices and edges[0] == end:
            found.append(node)
        stack += [target for target, _ in edges]
    return found
