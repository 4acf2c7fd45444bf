"""Pools of images in a chain, forward and back.

They go by torch's kernels, as functions that the user's code does not call may be
replaced.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from gradlib.jacobian.fast.chains.shapes import pair
from gradlib.jacobian.fast.kernels import aten
from gradlib.private.modes import grad_is_enabled


class Averaged(NamedTuple):
    """A mean over all places, or over those of each window.

    Attributes:
        size: How many places the input has along each axis.
        windows: The arguments of torch's kernel: kernel size, stride, padding,
            ceil_mode, count_include_pad and divisor_override. ``None`` for a single
            window over all places.
    """

    size: torch.Size
    windows: tuple[Any, ...] | None

    def pull(self, v: Tensor, _ours: bool) -> tuple[Tensor, bool]:
        """Go back. For a single window all places share memory."""
        if self.windows is None:
            v = v / self.size.numel()
            return v.expand(*v.shape[:3], *self.size), False
        made = _unaveraged(v.flatten(0, 1), self.size, self.windows)
        return made.view(*v.shape[:3], *self.size), True


class Picked(NamedTuple):
    """The largest entry of each window.

    Attributes:
        places: The flat place of each, ``(batch, 1, windows, channels)``.
        size: How many places the input has along each axis.
    """

    places: Tensor
    size: torch.Size

    def part(self, start: int, stop: int) -> "Picked":
        """Return the step for some samples."""
        return Picked(self.places[start:stop], self.size)

    def pull(self, v: Tensor, _ours: bool) -> tuple[Tensor, bool]:
        """Go back. Windows may overlap."""
        batch, count, channels = v.shape[:3]
        made = v.new_zeros(batch, count, self.size.numel(), channels)
        flat = v.movedim(2, -1).reshape(batch, count, -1, channels)
        made = made.scatter_add(2, self.places.expand_as(flat), flat)
        made = made.view(batch, count, *self.size, channels)
        return made.movedim(-1, 2), True


def averaged(module: nn.AvgPool2d, x: Tensor) -> tuple[Averaged, Tensor]:
    """Return the step back through an average pool, and its output."""
    moves = pair(module.kernel_size), pair(module.stride), pair(module.padding)
    windows = *moves, False, module.count_include_pad, None
    is_all = moves[0] == x.shape[2:] and moves[2] == (0, 0)
    step = Averaged(x.shape[2:], None if is_all else windows)
    return step, aten.avg_pool2d.default(x, *windows)


def averaged_in_parts(
    module: nn.AdaptiveAvgPool2d, x: Tensor
) -> tuple[Averaged, Tensor]:
    """Do the same for a pool to a given size, which divides that of its input."""
    parts, size = pair(module.output_size), x.shape[2:]
    window = [it // count for it, count in zip(size, parts, strict=True)]
    windows = window, window, (0, 0), False, True, None
    step = Averaged(size, None if parts == (1, 1) else windows)
    return step, aten.adaptive_avg_pool2d.default(x, parts)


def picked(module: nn.MaxPool2d, x: Tensor) -> tuple[Picked, Tensor]:
    """Do the same for the largest entry of each window."""
    y, places = aten.max_pool2d_with_indices.default(
        x,
        pair(module.kernel_size),
        pair(module.stride),
        pair(module.padding),
        pair(module.dilation),
    )
    places = places.movedim(1, -1).flatten(1, 2).unsqueeze(1)
    return Picked(places, x.shape[2:]), y


def _unaveraged(v: Tensor, size: torch.Size, windows: tuple[Any, ...]) -> Tensor:
    """Return the VJPs of vectors through an average pool, in the same memory layout."""
    last = v.is_contiguous(memory_format=torch.channels_last)
    # Where channels are last, a GPU's kernel forgets the padding: pytorch#188344.
    forgets = v.device.type != "cpu" and windows[2] != (0, 0)
    made = torch.empty(
        v.shape[:2] + size,
        dtype=v.dtype,
        device=v.device,
        memory_format=torch.channels_last
        if last and not forgets
        else torch.contiguous_format,
    )
    # Of its second argument the kernel reads only the size and the layout.
    if grad_is_enabled():
        return aten.avg_pool2d_backward.default(v, made, *windows)
    return aten.avg_pool2d_backward.grad_input(v, made, *windows, grad_input=made)
