"""Convolutions of a chain, forward and back."""

from collections.abc import Sequence
from typing import Any, NamedTuple, cast

from torch import Tensor, nn
from torch.nn import functional as F

from gradlib.jacobian.fast.convolution import Convolution
from gradlib.jacobian.fast.layouts import in_layout, laid_out
from gradlib.jacobian.fast.plain_convolution import is_plain_forth, plain_forth
from gradlib.jacobian.fast.way_back import way_back


class Convolved(NamedTuple):
    """A convolution at its place in a chain.

    Attributes:
        it: The convolution.
        last: Whether its input and output have channels last in memory.
    """

    it: Convolution
    last: bool

    def pull(self, v: Tensor, _ours: bool) -> tuple[Tensor, bool]:
        """Go back."""
        made = way_back(self.it, last=self.last)(v.flatten(0, 1))
        return made.view(*v.shape[:2], *made.shape[1:]), True


def convolution_of(module: nn.Conv2d, size: Sequence[int]) -> Convolution:
    """Return the convolution that a module of a chain is.

    Args:
        module: The module.
        size: The shape of a sample of its input.
    """
    padding = cast(Any, module.padding)  # a chain has numbers only
    how = module.stride, padding, module.dilation
    return Convolution(module.weight, size, *how, False, (0, 0), module.groups)


def convolved(
    module: nn.Conv2d, x: Tensor, *, last: bool = True
) -> tuple[Convolved, Tensor]:
    """Return the step back through a convolution, and its output.

    Args:
        module: The convolution.
        x: Its input, ``(batch, channels, height, width)``.
        last: Whether channels are to be last in memory, as is faster for most.
    """
    it = convolution_of(module, x.shape[1:])
    if is_plain_forth(it, x):
        y = plain_forth(it, x, module.bias)
    else:
        y = F.conv2d(
            laid_out(it, x, last=last),
            module.weight,
            module.bias,
            module.stride,
            module.padding,
            module.dilation,
            module.groups,
        )
    return Convolved(it, last), in_layout(y, last=last)
