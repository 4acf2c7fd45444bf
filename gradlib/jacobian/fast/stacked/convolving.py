"""The backward of convolutions, by the fastest of torch's kernels."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from gradlib.jacobian.fast.chains.convolutions import is_plain_back
from gradlib.jacobian.fast.convolution import (
    Convolution,
    around_reversed,
    left_over,
    plain_back,
)
from gradlib.jacobian.fast.kernels import INPUT_ALONE, aten
from gradlib.jacobian.fast.operation import Operation, of_each_axis
from gradlib.jacobian.fast.stacked.back import Back
from gradlib.jacobian.fast.stacked.mixing import is_of_input_alone

LITTLE = 24
"""Plain products take less time than the library where each entry of the output's
gradient adds to at most this many entries of the input's, for each place of a stride.

They took a fifth to nearly all of it with torch 2.13, on a core of an AMD EPYC: with 2
to 128 input channels, 8 to 64 output channels, 1 to 5 taps along each axis, a stride of
2 and 3, and 64 images.
"""


def convolution(op: Operation) -> Back | None:
    """A convolution, or a transposed one."""
    if not is_of_input_alone(op):
        return None
    shape: Sequence[int] = op.shapes[0]
    pull = way_back(read(op, shape[1:]))

    def back(grad: Tensor) -> dict[int, Tensor]:
        return {0: pull(grad.flatten(0, 1)).view(grad.size(0), *shape)}

    return back


def read(op: Operation, size: Sequence[int]) -> Convolution:
    """Return the convolution that an operation is.

    Args:
        op: The operation.
        size: The shape of a sample of its input.
    """
    weight = op.saved("weight")
    axes = weight.dim() - 2
    return Convolution(
        weight,
        size,
        of_each_axis(op.saved("stride"), axes),
        of_each_axis(op.saved("padding"), axes),
        of_each_axis(op.saved("dilation"), axes),
        op.saved("transposed"),
        of_each_axis(op.saved("output_padding"), axes),
        op.saved("groups"),
    )


def way_back(it: Convolution) -> Callable[[Tensor], Tensor]:
    """Return the function from the output's gradient to the input's."""
    if it.weight.device.type == "cpu" and not it.transposed:
        if len(it.stride) == 2 and (is_plain_back(it) or _adds_little(it)):
            return lambda grad: plain_back(it, it.size, grad)
        if _may_be_turned(it):
            return _turned(it)
        if _is_faster_transposed(it):
            return lambda grad: _transposed(it, grad)
    return lambda grad: _as_torch_does(it, grad)


def _adds_little(it: Convolution) -> bool:
    """Tell whether plain products are faster than the library, for a strided one."""
    if not _is_strided(it) or max(it.dilation) > 1:
        return False
    taps = math.prod(it.kernel_size)
    return taps == 1 or it.in_channels * taps <= LITTLE * math.prod(it.stride)


def _is_faster_transposed(it: Convolution) -> bool:
    """Tell whether a transposed convolution, with channels last in memory, is faster.

    With torch 2.13, on a core of an AMD EPYC, the changes of layout included, it took a
    quarter to all of the time: with 8 to 128 channels, 2 to 5 taps along each axis, a
    stride of 2 and 3, and 64 images. With groups it took up to twice as long.
    """
    return len(it.stride) == 2 and _is_strided(it)


def _is_strided(it: Convolution) -> bool:
    is_single = it.weight.dtype == torch.float32  # the library has no other dtype
    return max(it.stride) > 1 and it.groups == 1 and is_single


def _transposed(it: Convolution, grad: Tensor) -> Tensor:
    last = grad.contiguous(memory_format=torch.channels_last)
    left = left_over(it, it.size[1:])
    how: list[Any] = [it.stride, it.padding, left, it.groups, it.dilation]
    return F.conv_transpose2d(last, it.weight, None, *how).contiguous()


def _may_be_turned(it: Convolution) -> bool:
    """Tell whether to go back by a convolution with the taps reversed.

    The library has its best code for convolutions. With torch 2.13, on one core and on
    two of an AMD EPYC, one took a twentieth to all of the time of the library's own
    backward: with 1 to 512 channels, 1, 8 and 24 groups, 3 and 5 taps along one axis,
    two and three. In float64 the library has none, and it took up to twice as long.
    """
    is_single = it.weight.dtype == torch.float32
    return is_single and max(it.stride) == 1 and min(around_reversed(it)) >= 0


def _turned(it: Convolution) -> Callable[[Tensor], Tensor]:
    outs, ins, *taps = it.weight.shape
    weight = it.weight.reshape(it.groups, outs // it.groups, ins, *taps)
    weight = weight.transpose(1, 2).reshape(-1, outs // it.groups, *taps)
    weight = weight.flip(*range(2, weight.dim())).contiguous()
    how: list[Any] = [it.stride, around_reversed(it), it.dilation]
    how += [False, [0] * len(taps), it.groups]
    return lambda grad: torch.convolution(grad, weight, None, *how)


def _as_torch_does(it: Convolution, grad: Tensor) -> Tensor:
    # Of the input only the size is read.
    x = it.weight.new_empty(()).expand(grad.shape[0], *it.size)
    how = (
        it.stride,
        it.padding,
        it.dilation,
        it.transposed,
        it.output_padding,
        it.groups,
    )
    return aten.convolution_backward(grad, x, it.weight, None, *how, INPUT_ALONE)[0]
