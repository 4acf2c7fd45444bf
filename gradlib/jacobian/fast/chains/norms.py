"""Norms of a chain, forward and back: a sample's own statistics, or those of a model.

With y = n a + b, where n is x less its mean and divided by its deviation, a vector v
goes back to v a, less its mean, less n times the mean of v a n, all divided by the
deviation. Ba, Kiros, Hinton, "Layer Normalization", 2016; Wu, He, "Group
Normalization", 2018.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from gradlib.jacobian.fast.chains.pointwise import Pointwise, by_slope
from gradlib.jacobian.fast.kernels import INPUT_ALONE, aten
from gradlib.private.modes import grad_is_enabled

FEW = 2**20
"""With at most this many entries of all vectors, torch's group norm kernels are faster.

With two norms of 8 and of 24 channels of 16 x 16 places, and of 2 and of 8 samples with
6 vectors each, chains took a tenth to two fifths less time on one core and on two of an
AMD EPYC with torch 2.13; with 32 channels and 2**21 entries about as long. Those
kernels want channels first, and convolutions take less time with channels last.
"""


class Normed(NamedTuple):
    """A norm by a sample's own mean and deviation, of groups of its channels.

    Attributes:
        n: The normalized input, of mean 0 and deviation 1: ``(batch, 1, places,
            channels)``.
        steep: The weight divided by the deviation: ``(batch, 1, 1, channels)``.
        groups: How many groups of channels there are.
    """

    n: Tensor
    steep: Tensor
    groups: int

    def part(self, start: int, stop: int) -> "Normed":
        """Return the step for some samples."""
        return Normed(self.n[start:stop], self.steep[start:stop], self.groups)

    def pull(self, v: Tensor, ours: bool) -> tuple[Tensor, bool]:
        """Go back."""
        n, steep, groups = self
        v = v.movedim(2, -1)
        flat = v.reshape(*v.shape[:2], -1, v.shape[-1])
        mean = _means(flat.sum(2, keepdim=True) * steep, groups, n.shape[2])
        along = _means((flat * n).sum(2, keepdim=True) * steep, groups, n.shape[2])
        if grad_is_enabled():
            made = flat * steep - mean - n * along
        else:
            made = flat.mul_(steep) if ours else flat * steep
            made.addcmul_(n, along, value=-1).sub_(mean)
        return made.view(v.shape).movedim(-1, 2), True


class Kernel(NamedTuple):
    """The same norm, back by torch's kernels.

    Attributes:
        x: The input, ``(batch, channels, ...)``, contiguous: in any other layout the
            kernels lose the digits of bright images.
        mean: The mean of each sample, or of each of its groups: ``(batch, ...)``.
        rate: One divided by the deviations, ``(batch, ...)``.
        weight: The weight, ``(channels,)``, or ``None``.
        back: A function of vectors, one for each sample of x, and the four above.
    """

    x: Tensor
    mean: Tensor
    rate: Tensor
    weight: Tensor | None
    back: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor | None], Tensor]

    def part(self, start: int, stop: int) -> "Kernel":
        """Return the step for some samples."""
        x, mean, rate = (it[start:stop] for it in (self.x, self.mean, self.rate))
        return self._replace(x=x, mean=mean, rate=rate)

    def pull(self, v: Tensor, _ours: bool) -> tuple[Tensor, bool]:
        """Go back."""
        x, mean, rate, weight, back = self
        if (count := v.shape[1]) > 1:
            x, mean, rate = (it.repeat_interleave(count, 0) for it in (x, mean, rate))
        v = v.contiguous()  # the kernels assume it
        return back(v.flatten(0, 1), x, mean, rate, weight).view(v.shape), True


def normed(module: Any, x: Tensor) -> tuple[Normed | Kernel, Tensor]:
    """Return the step back through a group or layer norm, and its output.

    Args:
        module: The norm.
        x: Its input, ``(batch, channels, ...)``.
    """
    # The derivatives of the kernels' backward are wrong.
    if type(module) is nn.LayerNorm and not grad_is_enabled():
        return _layered(module, x)
    groups = module.num_groups if type(module) is nn.GroupNorm else 1
    weight, bias = module.weight, module.bias
    # No kernel here: with channels last, that of images subtracts the square of the
    # mean from the mean of squares, which leaves a bright image no digit. To put
    # channels first takes long for many entries.
    last = x.movedim(1, -1)
    flat = last.reshape(x.shape[0], 1, -1, x.shape[1])
    places = flat.shape[2]
    n = flat - _means(flat.sum(2, keepdim=True), groups, places)
    # Far from zero, the mean is rounded by more than the precision of the difference.
    rest = _means(n.sum(2, keepdim=True), groups, places)
    n = n - rest if grad_is_enabled() else n.sub_(rest)
    squares = n * n
    var = _means(squares.sum(2, keepdim=True), groups, places)
    rate = (var + module.eps).rsqrt()
    steep = rate if weight is None else rate * weight
    if grad_is_enabled():
        n = n * rate
        y = n if weight is None else n * weight
        y = y if bias is None else y + bias
    else:  # fresh memory is slow
        n.mul_(rate)
        y = squares.copy_(n) if weight is None else torch.mul(n, weight, out=squares)
        y = y if bias is None else y.add_(bias)
    return Normed(n, steep, groups), y.view(last.shape).movedim(-1, 1)


def grouped(module: nn.GroupNorm, x: Tensor) -> tuple[Kernel, Tensor]:
    """Do the same for a group norm by a kernel, whose second derivatives are wrong.

    Args:
        module: The norm.
        x: Its input, ``(batch, channels, ...)``.
    """
    x, weight, groups = x.contiguous(), module.weight, module.num_groups
    y, mean, rate = aten.native_group_norm.default(
        x, weight, module.bias, *_sizes(x), groups, module.eps
    )
    return Kernel(x, mean, rate, weight, partial(_back_by_groups, groups)), y


def _back_by_groups(
    groups: int, v: Tensor, x: Tensor, mean: Tensor, rate: Tensor, weight: Tensor | None
) -> Tensor:
    return aten.native_group_norm_backward.default(
        *(v, x, mean, rate, weight), *_sizes(x), groups, INPUT_ALONE
    )[0]


def _sizes(x: Tensor) -> tuple[int, int, int]:
    batch, channels = x.shape[:2]
    return batch, channels, x.numel() // (batch * channels)


def _layered(module: nn.LayerNorm, x: Tensor) -> tuple[Kernel, Tensor]:
    x, weight = x.contiguous(), module.weight
    y, mean, rate = aten.native_layer_norm.default(
        x, x.shape[1:], weight, module.bias, module.eps
    )
    return Kernel(x, mean, rate, weight, _back_by_layers), y


def _back_by_layers(
    v: Tensor, x: Tensor, mean: Tensor, rate: Tensor, weight: Tensor | None
) -> Tensor:
    return aten.native_layer_norm_backward.default(
        v, x, x.shape[1:], mean, rate, weight, None, INPUT_ALONE
    )[0]


def _means(sums: Tensor, groups: int, places: int) -> Tensor:
    """Return the means of groups, ``(batch, count, 1, channels)``, of sums over places.

    Args:
        sums: The sums, ``(batch, count, 1, channels)``.
        groups: How many groups of channels there are.
        places: How many places were summed over.
    """
    each = sums.shape[-1] // groups
    of_groups = sums.view(*sums.shape[:-1], groups, each)
    means = of_groups.sum(-1, keepdim=True) / (each * places)
    return means.expand_as(of_groups).reshape(sums.shape)


class Scaled(NamedTuple):
    """A norm by a model's stored mean and deviation, which is only a factor.

    Attributes:
        steep: The factor of each channel, ``(channels, ...)``.
    """

    steep: Tensor

    def pull(self, v: Tensor, ours: bool) -> tuple[Tensor, bool]:
        """Go back."""
        return v.mul_(self.steep) if ours else v * self.steep, True


def scaled(module: Any, x: Tensor) -> tuple[Scaled, Tensor]:
    """Return the step back through a batch norm, and its output.

    Args:
        module: The norm, in evaluation mode.
        x: Its input, ``(batch, channels, ...)``.
    """
    steep = steepness(module)
    shift = -module.running_mean * steep
    if module.bias is not None:
        shift = shift + module.bias
    sides = [1] * (x.dim() - 2)
    steep = steep.view(-1, *sides)
    return Scaled(steep), torch.addcmul(shift.view(-1, *sides), x, steep)


def steepness(module: Any) -> Tensor:
    """Return the factor of a batch norm in evaluation mode, ``(channels,)``."""
    rate = (module.running_var + module.eps).rsqrt()
    return rate if module.weight is None else rate * module.weight


BATCH_NORM = Pointwise(
    "batch_norm",
    lambda module, x: scaled(module, x)[1],
    by_slope(lambda module, x: steepness(module).expand_as(x)),
    "x",
)
"""A batch norm of vectors in evaluation mode, which is elementwise."""
