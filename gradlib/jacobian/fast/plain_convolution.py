"""Convolutions by kernels that multiply plain matrices, and where these are faster."""

import math
from functools import lru_cache

import torch
from torch import Tensor

from gradlib.jacobian.fast.convolution import Convolution
from gradlib.jacobian.fast.kernels import INPUT_ALONE, aten
from gradlib.private.modes import grad_is_enabled

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

FEW = 4
"""With at most this many input channels, the convolution library is slow to go back.

With strides it takes as long as without. There plain products took an eighth to nearly
all of its time on a core of an AMD EPYC with torch 2.13, and up to a quarter more on
two: with 3 x 3 and 5 x 5 taps a stride of 2 apart, 1 to 4 input and 8 or 24 output
channels, and 8 to 160 images.
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

MANY = 2**12
"""With at least this many places of the output, all vectors together, and as few input
channels, going back by shifts is faster.

That takes some time for each tap of the kernel. With 3 x 3 and 5 x 5 taps and 16
channels, on a core of an AMD EPYC with torch 2.13, both were even at that many.
"""

LITTLE = 24
"""Plain products take less time than the library where each entry of the output's
gradient adds to at most this many entries of the input's, for each place of a stride.

They took a fifth to nearly all of it with torch 2.13, on a core of an AMD EPYC: with 2
to 128 input channels, 8 to 64 output channels, 1 to 5 taps along each axis, a stride of
2 and 3, and 64 images.
"""


def small_images(it: Convolution, *, forth: bool = False) -> int:
    """Return for how many images at most the library's time is that to start.

    Args:
        it: The convolution, of images.
        forth: Whether going forward; otherwise back.
    """
    if it.in_channels > CHANNELS:
        return 0
    form = it.weight.shape, *map(tuple, (it.size, it.stride, it.padding, it.dilation))
    return _small_images(*form, forth)


@lru_cache(2**10)  # as this is asked twice in each call, and takes some microseconds
def _small_images(
    weight: torch.Size,
    size: tuple[int, ...],
    stride: tuple[int, ...],
    padding: tuple[int, ...],
    dilation: tuple[int, ...],
    forth: bool,
) -> int:
    moves = zip(size[1:], padding, dilation, weight[2:], stride, strict=True)
    places = math.prod(
        (places + 2 * added - apart * (count - 1) - 1) // step + 1
        for places, added, apart, count, step in moves
    )
    taps = math.prod(weight[1:])  # of all channels that each output sees
    most = APART if forth and max(stride) > 1 else PATCHES
    products = max(places, PLACES) * taps * weight[0]
    return min(IMAGES, most // (places * taps), PRODUCTS // products)


def plain_images(it: Convolution, *, forth: bool = False) -> int:
    """Return for how many images at most plain products are faster than the library.

    Args:
        it: The convolution, of images.
        forth: Whether going forward; otherwise back.
    """
    can_be_plain = it.groups == 1 == max(it.dilation)
    return small_images(it, forth=forth) if can_be_plain else 0


def is_few(images: Tensor, most: int) -> bool:
    """Tell whether there are few images, so that plain products may be used.

    Not for `create_graph`: the derivatives of their kernels are not tested here.
    """
    on_cpu = images.device.type == "cpu"
    return images.shape[0] <= most and on_cpu and not grad_is_enabled()


def is_plain_forth(it: Convolution, x: Tensor) -> bool:
    """Tell whether plain products are faster forward.

    Args:
        it: The convolution, of images.
        x: Its input.
    """
    return x.shape[0] <= IMAGES and is_few(x, plain_images(it, forth=True))


def plain_back(it: Convolution, grad: Tensor) -> Tensor | None:
    """Go back by plain products, where these are faster than the library.

    Args:
        it: The convolution, of images on a CPU.
        grad: The output's gradient, ``(images, channels, height, width)``.

    Returns:
        The input's gradient, or ``None``.
    """
    if _is_for_kernel(it, grad):
        return _by_kernel(it, grad)
    if goes_by_shifts(it) and grad.numel() >= MANY * it.out_channels:
        return _by_shifts(it, grad)
    return None


def _is_for_kernel(it: Convolution, grad: Tensor) -> bool:
    """Tell whether torch's kernel of plain products is the fastest."""
    if it.groups > 1 or max(it.dilation) > 1:
        return False
    if grad.shape[0] <= IMAGES and grad.shape[0] <= small_images(it):
        return True
    if max(it.stride) > 1:
        return _has_few_channels(it) or _adds_little(it)
    return goes_by_shifts(it) and grad.numel() <= BACK * torch.get_num_threads()


def goes_by_shifts(it: Convolution) -> bool:
    """Tell whether the taps are few enough to multiply by all at once, going back."""
    if not _has_few_channels(it) or max(it.stride) > 1:
        return False
    return it.in_channels**2 * math.prod(it.kernel_size) <= TALL * it.out_channels


def _has_few_channels(it: Convolution) -> bool:
    """Tell whether the library may be slow to go back through a convolution."""
    is_narrow = it.in_channels <= FEW and it.groups == 1
    return is_narrow and max(it.kernel_size) > 1


def _adds_little(it: Convolution) -> bool:
    """Tell whether each entry of the output's gradient adds to few of the input's."""
    if it.weight.dtype is not torch.float32:  # the library has no other dtype
        return False
    taps = math.prod(it.kernel_size)
    return taps == 1 or it.in_channels * taps <= LITTLE * math.prod(it.stride)


def plain_forth(it: Convolution, x: Tensor, bias: Tensor | None) -> Tensor:
    """Go forward by plain products."""
    given = x.contiguous(), it.weight, it.kernel_size, bias, it.stride, it.padding
    return aten._slow_conv2d_forward.default(*given)


def _by_kernel(it: Convolution, grad: Tensor) -> Tensor:
    made, _, _ = aten._slow_conv2d_backward.output_mask(
        grad.contiguous(),
        grad.new_empty(grad.shape[0], *it.size),  # only its size is read
        it.weight,
        it.kernel_size,
        it.stride,
        it.padding,
        INPUT_ALONE,
    )
    return made


def _by_shifts(it: Convolution, grad: Tensor) -> Tensor:
    """Go back by shifts: multiply by all weights at once, then add up the taps."""
    (channels, height, width), (up, left) = it.size, it.padding
    count, _, rows, columns = grad.shape
    weight = it.weight.flatten(1)  # (outs, channels * taps)
    flat = grad.movedim(1, -1).reshape(-1, grad.shape[1])
    taps = (weight.t() @ flat.t()).view(channels, -1, count, rows, columns)
    made = grad.new_zeros(count, channels, height + 2 * up, width + 2 * left)
    across = it.kernel_size[1]
    for number in range(taps.shape[1]):
        top = number // across * it.dilation[0]
        first = number % across * it.dilation[1]
        made[:, :, top : top + rows, first : first + columns] += taps[
            :, number
        ].transpose(0, 1)
    return made[:, :, up : up + height, left : left + width]
