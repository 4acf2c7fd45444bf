"""The memory layouts in which torch's convolutions are fastest on a CPU."""

import math

import torch
from torch import Tensor

from gradlib.jacobian.fast.convolution import Convolution

WIDE = 2**19
"""With at least this many weights, the library is slow with channels last in memory.

With 3 x 3 taps and 2 x 2 to 12 x 12 places, on a core of an Intel Xeon with torch 2.13,
256 channels take up to twice as long and more, 512 up to three times; 128 are even.
With a single tap, channels last are faster.
"""

BLOCK, HALF = 16, 9 / 16
"""How many channels the library takes at a time, a block, where channels are first in
memory; and up to which filled part of all blocks it is faster to put channels last, and
first again afterwards.

With 3 x 3 taps, 17 to 24 and 33 to 40 channels, 8 x 8 to 32 x 32 places, and 2 to 48
images that took two fifths of the time to all of it, and a sixth more at most, on one
core and on two of an AMD EPYC with torch 2.13; with fuller blocks, up to three fifths
more.
"""


def in_layout(x: Tensor, *, last: bool) -> Tensor:
    """Return images with channels last in memory, if that is asked for, or first."""
    return channels_last(x) if last else x.contiguous()


def channels_last(x: Tensor) -> Tensor:
    """Return images with channels last in memory on a CPU, where that is faster."""
    on_cpu = x.device.type == "cpu"
    return x.contiguous(memory_format=torch.channels_last) if on_cpu else x


def laid_out(it: Convolution, x: Tensor, *, last: bool) -> Tensor:
    """Return images in the memory layout that the library is fastest with.

    Args:
        it: The convolution.
        x: Its input, or the gradient that goes back.
        last: Whether channels are last where both layouts are as fast.
    """
    if last:
        return x.contiguous() if _is_wide(it) else x
    return channels_last(x) if _is_half_empty(it) else x


def _is_wide(it: Convolution) -> bool:
    """Tell whether the library is slow with channels last in memory."""
    is_large = it.weight.numel() >= WIDE and max(it.kernel_size) > 1
    return is_large and it.weight.device.type == "cpu"


def _is_half_empty(it: Convolution) -> bool:
    """Tell whether the library is slow with channels first, as blocks are not full.

    With few channels it makes no blocks.
    """
    ins, outs = it.in_channels, it.out_channels
    if len(it.stride) != 2 or min(ins, outs) <= BLOCK or not _has_blocks(it):
        return False
    return ins * outs <= HALF * _in_blocks(ins) * _in_blocks(outs)


def _has_blocks(it: Convolution) -> bool:
    """Tell whether the library takes channels in blocks, for the kinds measured."""
    apart = max(*it.stride, *it.dilation) > 1 or it.groups > 1
    is_float = it.weight.dtype is torch.float32
    return is_float and max(it.kernel_size) > 1 and not apart


def _in_blocks(channels: int) -> int:
    return math.ceil(channels / BLOCK) * BLOCK
