"""Convolutions of a chain, forward and back."""

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gradlib.jacobian.fast.chains.shapes import size_after
from gradlib.jacobian.fast.convolution import (
    Taps,
    around_reversed,
    left_over,
    plain_back,
)
from gradlib.jacobian.fast.kernels import aten
from gradlib.private.modes import grad_is_enabled

FEW = 4
"""With at most this many input channels, the convolution library is slow to go back.

With strides it takes as long as without. There plain products took an eighth to nearly
all of its time on a core of an AMD EPYC with torch 2.13, and up to a quarter more on
two: with 3 x 3 and 5 x 5 taps a stride of 2 apart, 1 to 4 input and 8 or 24 output
channels, and 8 to 160 images.
"""

MANY = 2**12
"""With at least this many places of the output, all vectors together, and as few input
channels, going back by shifts is faster.

That takes some time for each tap of the kernel. With 3 x 3 and 5 x 5 taps and 16
channels, on a core of an AMD EPYC with torch 2.13, both were even at that many.
"""

TALL = 7
"""The most taps for each output channel with which shifts are faster, times the square
of the number of input channels. Measured with 1 to 4 input channels, 8 to 64 output
channels, 3 x 3 to 7 x 7 taps, on a core of an Intel Xeon; 1 x 1 was always slower.
"""

BACK = 2**19
"""With at most this many entries of all vectors, for each thread, plain products are
faster than shifts: threads share them image by image, but badly the one large product
that shifts take.

With 1 to 3 input channels, 8 to 24 output channels and 12 x 12 to 32 x 32 places, on
cores of an AMD EPYC with torch 2.13, whole networks took up to a sixth less time than
with half as many on one core, and up to a third less than with a quarter on two.
"""

WIDE = 2**19
"""With at least this many weights, the library is slow with channels last in memory.

With 3 x 3 taps and 2 x 2 to 12 x 12 places, on a core of an Intel Xeon with torch 2.13,
256 channels take up to twice as long and more, 512 up to three times; 128 are even.
With a single tap, channels last are faster.
"""

IMAGES, CHANNELS = 8, 8
"""With at most this many images and input channels, plain products may be faster than
the library, which takes 20 to 60 µs to start."""

PATCHES, PRODUCTS, PLACES = 5 * 2**13, 2**19, 64
"""For plain products of few images, the most entries in all windows of taps, and the
most multiply-adds; an image's output of fewer places takes as long as one of `PLACES`.

With 1 to 5 taps across, on a core of an AMD EPYC with torch 2.13, plain products took
half the time going back and three quarters going forward; and, with 4 and 8 images, a
fifth to five sixths either way on a core of an older generation.
"""

APART = 2**14
"""The most entries in all windows for plain products forward with strides.

On the older core, plain products took more time than the library at twice as many.
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

FLIPPED = 8
"""With at most this many output channels, and channels first in memory, the library's
backward is slow. A forward convolution with the taps reversed is not.

With 8 or 32 input channels, 3 x 3 and 5 x 5 taps, 8 x 8 to 32 x 32 places, and 2 to 160
images that took a quarter to nine tenths of the time on one core and on two of an AMD
EPYC with torch 2.13; with 16 output channels up to a third more than all of it.
"""


class Convolved(NamedTuple):
    """A convolution at its place in a chain.

    Attributes:
        module: The convolution.
        shape: The shape of a sample of its input.
        last: Whether its input and output have channels last in memory.
        plain_images: With at most this many images, plain products are faster back.
    """

    module: nn.Conv2d
    shape: torch.Size
    last: bool
    plain_images: int

    def pull(self, v: Tensor, _ours: bool) -> tuple[Tensor, bool]:
        """Go back."""
        made = _pulled(self, v.flatten(0, 1))
        return made.view(*v.shape[:2], *made.shape[1:]), True


def convolved(
    module: nn.Conv2d, x: Tensor, *, last: bool = True
) -> tuple[Convolved, Tensor]:
    """Return the step back through a convolution, and its output.

    Args:
        module: The convolution.
        x: Its input, ``(batch, channels, height, width)``.
        last: Whether channels are to be last in memory, as is faster for most.
    """
    shape = x.shape[1:]
    back = plain_images(module, shape) if x.shape[0] <= IMAGES else 0
    if is_few(x, back) and is_few(x, plain_images(module, shape, forth=True)):
        y = aten._slow_conv2d_forward.default(
            x.contiguous(),
            module.weight,
            module.kernel_size,
            module.bias,
            module.stride,
            module.padding,
        )
    else:
        y = F.conv2d(
            _laid_out(module, x, last=last),
            module.weight,
            module.bias,
            module.stride,
            module.padding,
            module.dilation,
            module.groups,
        )
    y = channels_last(y) if last else y.contiguous()
    return Convolved(module, shape, last, back), y


def channels_last(x: Tensor) -> Tensor:
    """Return images with channels last in memory on a CPU, where that is faster."""
    on_cpu = x.device.type == "cpu"
    return x.contiguous(memory_format=torch.channels_last) if on_cpu else x


def plain_images(module: nn.Conv2d, size: Sequence[int], *, forth: bool = False) -> int:
    """Return for how many images at most plain products are faster than the library.

    Args:
        module: The convolution.
        size: Channels, height and width of its input.
        forth: Whether going forward; otherwise back.
    """
    can_be_plain = module.groups == 1 == max(module.dilation)
    return small_images(module, size, forth=forth) if can_be_plain else 0


def small_images(module: nn.Conv2d, size: Sequence[int], *, forth: bool = False) -> int:
    """Return for how many images at most the library's time is that to start.

    Args:
        module: The convolution.
        size: Channels, height and width of its input.
        forth: Whether going forward; otherwise back.
    """
    channels, after = size[0], size_after(module, size)
    if channels > CHANNELS or after is None:
        return 0
    places = math.prod(after[1:])
    taps = channels // module.groups * math.prod(module.kernel_size)
    most = APART if forth and max(module.stride) > 1 else PATCHES
    products = max(places, PLACES) * taps * module.out_channels
    return min(IMAGES, most // (places * taps), PRODUCTS // products)


def is_few(images: Tensor, most: int) -> bool:
    """Tell whether there are few images, so that plain products may be used.

    Not for `create_graph`: the derivatives of their kernels are not tested here.
    """
    on_cpu = images.device.type == "cpu"
    return images.shape[0] <= most and on_cpu and not grad_is_enabled()


def _is_plain_back(module: nn.Conv2d, v: Tensor) -> bool:
    """Tell whether plain products are faster back, also for many images."""
    if v.device.type != "cpu" or grad_is_enabled() or not is_plain_back(module):
        return False
    return max(module.stride) > 1 or v.numel() <= BACK * torch.get_num_threads()


def is_plain_back(taps: Taps) -> bool:
    """Tell whether plain products are faster back, as to few input channels."""
    if max(taps.dilation) > 1:
        return False
    if max(taps.stride) > 1:  # the library takes as long as without
        return _has_few_channels(taps)
    return goes_by_shifts(taps)


def goes_by_shifts(taps: Taps) -> bool:
    """Tell whether to go back by shifts: multiply by all taps at once, then add up."""
    if not _has_few_channels(taps) or max(taps.stride) > 1:
        return False
    each = math.prod(taps.kernel_size)
    return taps.in_channels**2 * each <= TALL * taps.out_channels


def _has_few_channels(taps: Taps) -> bool:
    """Tell whether the library may be slow to go back through a convolution."""
    is_narrow = taps.in_channels <= FEW and taps.groups == 1
    return is_narrow and max(taps.kernel_size) > 1


def _laid_out(module: nn.Conv2d, x: Tensor, *, last: bool) -> Tensor:
    """Return images in the memory layout that the library is fastest with.

    Args:
        module: The convolution.
        x: Its input, or the gradient that goes back.
        last: Whether channels are last where both layouts are as fast.
    """
    if last:
        return x.contiguous() if _is_wide(module, x) else x
    return channels_last(x) if _is_half_empty(module) else x


def _is_wide(module: nn.Conv2d, x: Tensor) -> bool:
    """Tell whether the library is slow with channels last in memory."""
    is_large = module.weight.numel() >= WIDE and max(module.kernel_size) > 1
    return is_large and x.device.type == "cpu"


def _is_half_empty(module: nn.Conv2d) -> bool:
    """Tell whether the library is slow with channels first, as blocks are not full.

    With few channels it makes no blocks.
    """
    ins, outs = module.in_channels, module.out_channels
    if min(ins, outs) <= BLOCK or not _has_blocks(module):
        return False
    return ins * outs <= HALF * _in_blocks(ins) * _in_blocks(outs)


def _in_blocks(channels: int) -> int:
    return math.ceil(channels / BLOCK) * BLOCK


def _is_faster_flipped(module: nn.Conv2d) -> bool:
    """Tell whether a forward convolution with reversed taps is the faster backward."""
    if module.out_channels > FLIPPED or not _has_blocks(module):
        return False
    return min(around_reversed(module)) >= 0


def _has_blocks(module: nn.Conv2d) -> bool:
    """Tell whether the library takes channels in blocks, for the kinds measured."""
    apart = max(*module.stride, *module.dilation) > 1 or module.groups > 1
    is_float = module.weight.dtype is torch.float32
    return is_float and max(module.kernel_size) > 1 and not apart


def _pulled_flipped(module: nn.Conv2d, v: Tensor) -> Tensor:
    """Go back by a forward convolution with the taps reversed."""
    weight = module.weight.flip(2, 3).transpose(0, 1).contiguous()
    return F.conv2d(v, weight, None, 1, around_reversed(module))


def _pulled(convolved: Convolved, v: Tensor) -> Tensor:
    module, shape, last, most = convolved
    if is_few(v, most) or _is_plain_back(module, v):
        made = plain_back(module, shape, v)
        return channels_last(made) if last else made
    many = v.device.type == "cpu" and v.numel() >= MANY * v.shape[1]
    if last and many and goes_by_shifts(module) and not grad_is_enabled():
        return _pulled_by_shifts(convolved, v)
    if not last and _is_faster_flipped(module):
        return _pulled_flipped(module, v)
    left = left_over(module, shape[1:])
    apart = any(left) and _are_zeros_apart(module, v)
    made = F.conv_transpose2d(
        _laid_out(module, v, last=last),
        module.weight,
        None,
        module.stride,
        _pair(module.padding),
        (0, 0) if apart else left,
        module.groups,
        module.dilation,
    )
    if apart:
        below, right = left
        made = F.pad(made, (0, right, 0, below))
    return channels_last(made) if last else made.contiguous()


def _are_zeros_apart(module: nn.Conv2d, v: Tensor) -> bool:
    """Tell whether to append the zeros of places that strides leave over afterwards.

    Without padding no tap has seen these places. With few channels, the library takes
    up to five times as long with them for some sizes, and two thirds as long at least
    for others: so on one core and on two of an AMD EPYC with torch 2.13, with 8
    channels in 1 and 2 groups, 3 x 3 taps a stride of 2 apart, 10 x 10 to 28 x 28
    places, and 40 and 160 images.
    """
    many = v.shape[0] > IMAGES and v.device.type == "cpu"
    return many and module.in_channels <= CHANNELS and max(_pair(module.padding)) == 0


def _pulled_by_shifts(convolved: Convolved, v: Tensor) -> Tensor:
    """Go back by shifts: multiply by all weights at once, then add up the taps."""
    module, (channels, height, width), *_ = convolved
    count, _, rows, columns = v.shape
    weight = module.weight.flatten(1)  # (outs, channels * taps)
    flat = v.movedim(1, -1).reshape(-1, v.shape[1])
    taps = (weight.t() @ flat.t()).view(channels, -1, count, rows, columns)
    up, left = _pair(module.padding)
    made = v.new_zeros(count, channels, height + 2 * up, width + 2 * left)
    across = module.kernel_size[1]
    for number in range(taps.shape[1]):
        top = number // across * module.dilation[0]
        first = number % across * module.dilation[1]
        made[:, :, top : top + rows, first : first + columns] += taps[
            :, number
        ].transpose(0, 1)
    return made[:, :, up : up + height, left : left + width]


def _pair(padding: str | tuple[int, ...]) -> tuple[int, int]:
    assert not isinstance(padding, str), "a chain has numbers only"
    return padding[0], padding[1]
