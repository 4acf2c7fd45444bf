"""What in-place operations do to views, and how to see past it.

When a view is overwritten in place, autograd drops the view's node from the graph and
with it every hook on the view. The gradient then goes to the view's base directly; the
view's own gradient is the part of it that the view showed.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Region:
    """The part of its base that a view shows."""

    base_size: torch.Size
    base_stride: tuple[int, ...]
    size: torch.Size
    stride: tuple[int, ...]
    offset: int

    def of(self, gradient: Tensor) -> Tensor:
        """Return the part of the base's gradient that belongs to the view."""
        if gradient.stride() != self.base_stride:
            alike = torch.empty_strided(
                self.base_size,
                self.base_stride,
                dtype=gradient.dtype,
                device=gradient.device,
            )
            gradient = alike.copy_(gradient)
        offset = gradient.storage_offset() + self.offset
        return gradient.as_strided(self.size, self.stride, offset)

    def alone(self, gradient: Tensor) -> Tensor:
        """Return the base's gradient with zeros around the part of the view."""
        part = self.of(gradient)
        made = torch.empty_strided(
            self.base_size, self.base_stride, dtype=part.dtype, device=part.device
        ).zero_()
        self.of(made).copy_(part)
        return made


def base_of(view: Tensor) -> tuple[Tensor, Region] | None:
    """Return what `view` is a view of, and which part of it; ``None`` for no view."""
    base = view._base
    if base is None or not base.requires_grad:
        return None
    offset = int(view.storage_offset() - base.storage_offset())
    shown = Region(base.size(), base.stride(), view.size(), view.stride(), offset)
    return base, shown


def watch(tensor: Tensor) -> Callable[[], bool]:
    """Return a function that tells whether `tensor` was overwritten since.

    It keeps none of the tensor's memory alive.
    """
    probe = tensor.detach()
    probe.data = torch.empty(0)  # the version counter stays the tensor's
    version = probe._version
    return lambda: probe._version != version
