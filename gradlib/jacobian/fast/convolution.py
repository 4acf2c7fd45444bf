"""The sizes of convolutions, of modules and of nodes, and what follows from them."""

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor


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

    def left_over(self) -> list[int]:
        """Return how many places strides leave over at the far end of each axis."""
        pairs = zip(self._reach(), self.stride, strict=True)
        return [reach % stride for reach, stride in pairs]

    def around_reversed(self) -> list[int]:
        """Return the padding of a gradient that goes back through the taps reversed.

        It is negative where the input has more zeros around it than the taps reach.
        """
        reaches = zip(self.dilation, self.kernel_size, self.padding, strict=True)
        return [apart * (count - 1) - added for apart, count, added in reaches]

    def _reach(self) -> list[int]:
        """Return how far the taps can move along each axis, in places."""
        sizes = zip(self.size[1:], self.padding, self.around_reversed(), strict=True)
        return [size + added - around - 1 for size, added, around in sizes]
