"""Norms of a chain, forward and back: a sample's own statistics, or those of a model.

With y = n a + b, where n is x less its mean and divided by its deviation, a vector v
comes back as v a, less its mean, less n times the mean of v a n; and all that divided
by the deviation. Ba, Kiros, Hinton, "Layer Normalization", 2016; Wu, He, "Group
Normalization", 2018.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from gradlib.jacobian.fast.chains.layers import Pointwise, by_slope
from gradlib.jacobian.fast.kernels import INPUT_ALONE, aten
from gradlib.private.modes import grad_is_enabled

FEW = 2**20
"""Up to how many entries of all vectors torch's kernels of group norms are faster.

With two norms of 8 and of 24 channels of 16 x 16 places, and of 2 and of 8 samples with
6 vectors each, chains took a tenth to two fifths less time on one core and on two of an
AMD EPYC with torch 2.13; with 32 channels and 2**21 entries about as long. Those
kernels want channels first, and convolutions take less time with channels last.
"""


class Normed(NamedTuple):
    """A norm by a sample's own mean and deviation, of groups of its channels.

    Attributes:
        n: What it was given, with mean 0 and deviation 1: ``(batch, 1, places,
            channels)``.
        steep: What its output grows by with it: ``(batch, 1, 1, channels)``.
        groups: How many groups of channels there are.
    """

    n: Tensor
    steep: Tensor
    groups: int

    def part(self, start: int, stop: int) -> "Normed":
        """Return it for some samples."""
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
    """A norm by a sample's own mean and deviation, as torch's kernels have it.

    Attributes:
        x: What it was given, ``(batch, channels, ...)``, contiguous: in any other
            layout the kernels lose the digits of bright images.
        mean: Of each sample, or of each of its groups: ``(batch, ...)``.
        rate: One divided by the deviations.
        weight: ``(channels,)``, or ``None``.
        back: Goes back, with one vector for each x: of the vectors and the others.
    """

    x: Tensor
    mean: Tensor
    rate: Tensor
    weight: Tensor | None
    back: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor | None], Tensor]

    def part(self, start: int, stop: int) -> "Kernel":
        """Return it for some samples."""
        x, mean, rate = (it[start:stop] for it in (self.x, self.mean, self.rate))
        return self._replace(x=x, mean=mean, rate=rate)

    def pull(self, v: Tensor, ours: bool) -> tuple[Tensor, bool]:
        """Go back."""
        del ours
        x, mean, rate, weight, back = self
        if (count := v.shape[1]) > 1:
            x, mean, rate = (it.repeat_interleave(count, 0) for it in (x, mean, rate))
        v = v.contiguous()  # which the kernels take for granted
        return back(v.flatten(0, 1), x, mean, rate, weight).view(v.shape), True


def normed(module: Any, x: Tensor) -> tuple[Normed | Kernel, Tensor]:
    """Return what is needed to go back through a group or layer norm, and its output.

    Args:
        module: The norm.
        x: ``(batch, channels, ...)``.
    """
    # The kernels' own derivatives have none that is right.
    if type(module) is nn.LayerNorm and not grad_is_enabled():
        return _layered(module, x)
    groups = module.num_groups if type(module) is nn.GroupNorm else 1
    weight, bias = module.weight, module.bias
    # No kernel here: where channels are last that of images subtracts the square of the
    # mean from the mean of squares, and of a bright one no digit is left. And to put
    # them first takes long where there is much.
    last = x.movedim(1, -1)
    flat = last.reshape(x.shape[0], 1, -1, x.shape[1])
    places = flat.shape[2]
    n = flat - _means(flat.sum(2, keepdim=True), groups, places)
    # Of what is far from zero the mean is rounded by more than what is left has digits.
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
    """Do the same for a group norm by a kernel, whose derivatives are not right.

    Args:
        module: The norm.
        x: ``(batch, channels, ...)``.
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
        sums: ``(batch, count, 1, channels)``.
        groups: How many groups of channels there are.
        places: Over how many places they were summed.
    """
    each = sums.shape[-1] // groups
    of_groups = sums.view(*sums.shape[:-1], groups, each)
    means = of_groups.sum(-1, keepdim=True) / (each * places)
    return means.expand_as(of_groups).reshape(sums.shape)


class Scaled(NamedTuple):
    """A norm by a model's mean and deviation: nothing but a factor.

    Attributes:
        steep: The factor of each channel, ``(channels, ...)``.
    """

    steep: Tensor

    def pull(self, v: Tensor, ours: bool) -> tuple[Tensor, bool]:
        """Go back."""
        in_place = ours and not grad_is_enabled()
        return (v.mul_(self.steep) if in_place else v * self.steep), True


def scaled(module: Any, x: Tensor) -> tuple[Scaled, Tensor]:
    """Return what is needed to go back through a batch norm, and its output.

    Args:
        module: The norm, in evaluation mode.
        x: ``(batch, channels, ...)``.
    """
    steep = steepness(module)
    shift = -module.running_mean * steep
    if module.bias is not None:
        shift = shift + module.bias
    sides = [1] * (x.dim() - 2)
    steep = steep.view(-1, *sides)
    return Scaled(steep), torch.addcmul(shift.view(-1, *sides), x, steep)


def steepness(module: Any) -> Tensor:
    """Return what a batch norm in evaluation mode multiplies by, ``(channels,)``."""
    rate = (module.running_var + module.eps).rsqrt()
    return rate if module.weight is None else rate * module.weight


BATCH_NORM = Pointwise(
    "batch_norm",
    lambda module, x: scaled(module, x)[1],
    by_slope(lambda module, x: steepness(module).expand_as(x)),
    "x",
)
"""A batch norm of vectors, in evaluation mode: it is elementwise."""
