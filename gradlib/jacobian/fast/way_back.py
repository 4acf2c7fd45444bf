"""The fastest way back through a convolution: by which of torch's kernels, and how."""

from collections.abc import Callable
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.nn import functional as F

from gradlib.jacobian.fast.convolution import Convolution
from gradlib.jacobian.fast.kernels import INPUT_ALONE, aten
from gradlib.jacobian.fast.layouts import channels_last, in_layout, laid_out
from gradlib.jacobian.fast.plain_convolution import CHANNELS, IMAGES, plain_back
from gradlib.private.modes import grad_is_enabled

Pull: TypeAlias = Callable[[Tensor], Tensor]
"""A function from the output's gradient, ``(images, channels, *places)``, to the
input's."""

TURNED = 8
"""With at most this many output channels, and channels first in memory, the library's
backward is slow. A convolution with the taps reversed is not.

With 8 or 32 input channels, 3 x 3 and 5 x 5 taps, 8 x 8 to 32 x 32 places, and 2 to 160
images that took a quarter to nine tenths of the time on one core and on two of an AMD
EPYC with torch 2.13; with 16 output channels up to a third more than all of it. With
channels last it took a tenth to three quarters for a single output channel, and up to a
fifth more than all of it for 2 to 8.
"""


def way_back(it: Convolution, *, last: bool = False) -> Pull:
    """Return the function from the output's gradient to the input's.

    Args:
        it: The convolution, or a transposed one.
        last: Whether the gradients, of images, have channels last in memory, as is
            faster for most chains of convolutions on a CPU; else both are contiguous.
    """
    on_cpu = it.weight.device.type == "cpu"
    is_of_images = len(it.stride) == 2 and not it.transposed
    library: list[Pull] = []  # filled at its first use, as it may turn the weights

    def back(grad: Tensor) -> Tensor:
        made = None
        # The derivatives of these kernels are not tested here.
        if is_of_images and on_cpu and not grad_is_enabled():
            made = plain_back(it, grad)
        if made is None:
            if not library:
                library.append(_by_library(it, last=last))
            made = library[0](grad)
        return in_layout(made, last=last)

    return back


def _by_library(it: Convolution, *, last: bool) -> Pull:
    """Return the same function, by the convolution library."""
    if _may_be_turned(it, last=last):
        return _turned(it, last=last)
    if last or _is_faster_transposed(it):
        return partial(_transposed, it, last)
    return partial(_as_torch_does, it)


def _may_be_turned(it: Convolution, *, last: bool) -> bool:
    """Tell whether to go back by a convolution with the taps reversed.

    The library has its best code for convolutions. With torch 2.13, on one core and on
    two of an AMD EPYC, one took a twentieth to all of the time of the library's own
    backward: with 1 to 512 channels, 1, 8 and 24 groups, 3 and 5 taps along one axis,
    two and three. In float64 the library has none, and it took up to twice as long.
    """
    if not _is_single_on_cpu(it) or max(it.stride) > 1 or min(it.around_reversed()) < 0:
        return False
    if len(it.stride) != 2 or it.groups > 1 or max(it.kernel_size) == 1:
        return True
    return it.out_channels <= (1 if last else TURNED)


def _is_faster_transposed(it: Convolution) -> bool:
    """Tell whether a transposed convolution is faster than the library's backward.

    With strides it is where channels are last in memory. With torch 2.13, on a core of
    an AMD EPYC, the changes of layout included, it took a quarter to all of the time:
    with 8 to 128 channels, 2 to 5 taps along each axis, a stride of 2 and 3, and 64
    images. With groups it took up to twice as long.
    """
    return _is_single_on_cpu(it) and len(it.stride) == 2 and it.groups == 1


def _is_single_on_cpu(it: Convolution) -> bool:
    """Tell whether the library has code of its own, and it is no transposed one."""
    on_cpu = it.weight.device.type == "cpu"
    return on_cpu and it.weight.dtype is torch.float32 and not it.transposed


def _transposed(it: Convolution, last: bool, grad: Tensor) -> Tensor:
    left = it.left_over()
    apart = any(left) and _are_zeros_apart(it, grad)
    how: list[Any] = [it.stride, it.padding, [0, 0] if apart else left]
    how += [it.groups, it.dilation]
    last = last or max(it.stride) > 1
    images = laid_out(it, channels_last(grad) if last else grad, last=last)
    made = F.conv_transpose2d(images, it.weight, None, *how)
    below, right = left
    return F.pad(made, (0, right, 0, below)) if apart else made


def _are_zeros_apart(it: Convolution, grad: Tensor) -> bool:
    """Tell whether to append the zeros of places that strides leave over afterwards.

    Without padding no tap has seen these places. With few channels, the library takes
    up to five times as long with them for some sizes, and two thirds as long at least
    for others: so on one core and on two of an AMD EPYC with torch 2.13, with 8
    channels in 1 and 2 groups, 3 x 3 taps a stride of 2 apart, 10 x 10 to 28 x 28
    places, and 40 and 160 images.
    """
    many = grad.shape[0] > IMAGES and grad.device.type == "cpu"
    return many and it.in_channels <= CHANNELS and max(it.padding) == 0


def _turned(it: Convolution, *, last: bool) -> Pull:
    outs, ins, *taps = it.weight.shape
    weight = it.weight.flip(*range(2, it.weight.dim()))
    if it.groups > 1:
        weight = weight.view(it.groups, outs // it.groups, ins, *taps)
        weight = weight.transpose(1, 2).reshape(-1, outs // it.groups, *taps)
    else:
        weight = weight.transpose(0, 1).contiguous()
    how: list[Any] = [it.stride, it.around_reversed(), it.dilation]
    how += [False, [0] * len(taps), it.groups]

    def pull(grad: Tensor) -> Tensor:
        return torch.convolution(laid_out(it, grad, last=last), weight, None, *how)

    return pull


def _as_torch_does(it: Convolution, grad: Tensor) -> Tensor:
    # Of the input only the size is read.
    x = it.weight.new_empty(()).expand(grad.shape[0], *it.size)
    how = it.stride, it.padding, it.dilation, it.transposed, it.output_padding
    given = grad, x, it.weight, None, *how, it.groups, INPUT_ALONE
    return aten.convolution_backward(*given)[0]
