"""The sizes of convolutions, of modules and of nodes, and what follows from them."""

from collections.abc import Sequence
from typing import Any, NamedTuple, TypeAlias, cast

from torch import Tensor, nn

from gradlib.jacobian.fast.kernels import INPUT_ALONE, aten


class Convolution(NamedTuple):
    """A convolution, or a transposed one, without its bias.

    Attributes:
        weight: ``(outs, ins / groups, *taps)``, or ``(ins, outs / groups, *taps)`` if
            it is transposed.
        size: The shape of a sample of its input, ``(ins, *places)``.
        stride: The stride along each axis.
        padding: How many zeros are added on each side, along each axis.
        dilation: The distance of neighbouring taps, along each axis.
        transposed: Whether it is a transposed one.
        output_padding: How many more places a transposed one's output has.
        groups: The number of groups of channels that do not mix.
    """

    weight: Tensor
    size: Sequence[int]
    stride: Sequence[int]
    padding: Sequence[int]
    dilation: Sequence[int]
    transposed: bool
    output_padding: Sequence[int]
    groups: int

    @property
    def in_channels(self) -> int:
        """How many channels the input has."""
        return self.size[0]

    @property
    def out_channels(self) -> int:
        """How many channels the output has, if the convolution is not transposed."""
        return self.weight.shape[0]

    @property
    def kernel_size(self) -> Sequence[int]:
        """The number of taps along each axis."""
        return self.weight.shape[2:]

    def turned_back(self, size: Sequence[int]) -> "Convolution":
        """Return the convolution whose backward this transposed one is.

        Args:
            size: The shape of a sample of its input: of this one's output.
        """
        none = [0] * len(self.stride)
        return self._replace(size=size, transposed=False, output_padding=none)


Taps: TypeAlias = nn.Conv2d | Convolution
"""What has the sizes of a convolution."""


def plain_back(taps: Taps, size: Sequence[int], grad: Tensor) -> Tensor:
    """Go back through a convolution by the kernel that multiplies plain matrices.

    Args:
        taps: The convolution.
        size: The input's shape without the batch.
        grad: The output's gradient, ``(batch, channels, height, width)``.
    """
    made, _, _ = aten._slow_conv2d_backward.output_mask(
        grad.contiguous(),
        grad.new_empty(grad.shape[0], *size),  # only its size is read
        taps.weight,
        taps.kernel_size,
        taps.stride,
        taps.padding,
        INPUT_ALONE,
    )
    return made


def around_reversed(taps: Taps) -> list[int]:
    """Return the padding of a gradient that goes back through the taps reversed.

    It is negative where the input has more zeros around it than the taps reach.
    """
    padding = cast(Any, taps.padding)  # a chain has numbers only
    reaches = zip(taps.dilation, taps.kernel_size, padding, strict=True)
    return [apart * (count - 1) - added for apart, count, added in reaches]


def left_over(taps: Taps, sides: Sequence[int]) -> tuple[int, ...]:
    """Return how many places strides leave over at the far edges: below, right.

    Args:
        taps: The sizes of the convolution.
        sides: How many places there are along each axis, without padding.
    """
    if max(taps.stride) == 1:
        return (0,) * len(sides)
    padding = cast(Any, taps.padding)
    moves = zip(
        sides, padding, taps.dilation, taps.kernel_size, taps.stride, strict=True
    )
    return tuple(
        (size + 2 * added - dilation * (kernel - 1) - 1) % stride
        for size, added, dilation, kernel, stride in moves
    )
