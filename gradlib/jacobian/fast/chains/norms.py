"""Norms of a chain, forward and back: a sample's own statistics, or those of a model.

With y = n a + b, where n is x less its mean and divided by its deviation, a vector v
comes back as v a, less its mean, less n times the mean of v a n; and all that divided
by the deviation. Ba, Kiros, Hinton, "Layer Normalization", 2016; Wu, He, "Group
Normalization", 2018.
"""

from typing import Any, NamedTuple, Self

import torch
from torch import Tensor, nn

from gradlib.jacobian.fast.chains.layers import aten
from gradlib.private import grad_is_enabled

FEW = 2**16
"""Up to how many entries torch's kernels of group norms are faster, for one vector.

With 8 channels of 16 x 16 places, on a core of an AMD EPYC with torch 2.13, a chain
with two norms took a fifth less time at 2**14 entries and hardly less at 2**18; with
24, 6 per cent less at 2**15 and 8 per cent more at 2**18. Those kernels want channels
first.
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


class Saved(NamedTuple):
    """What torch's kernels of norms save.

    Attributes:
        x: What the norm was given, contiguous.
        mean: Its means.
        rate: One divided by its deviations.
        weight: ``(channels,)``, or ``None``.
    """

    x: Tensor
    mean: Tensor
    rate: Tensor
    weight: Tensor | None

    def part(self, start: int, stop: int) -> Self:
        """Return it for some samples."""
        x, mean, rate, weight = self
        return type(self)(x[start:stop], mean[start:stop], rate[start:stop], weight)


class Fused(Saved):
    """A layer norm of vectors, as torch's kernels have it.

    Attributes:
        x: What it was given, ``(batch, channels)``, contiguous.
        mean: Of each sample, ``(batch, 1)``.
        rate: One divided by the deviation, ``(batch, 1)``.
        weight: ``(channels,)``, or ``None``.
    """

    __slots__ = ()

    def pull(self, v: Tensor, ours: bool) -> tuple[Tensor, bool]:
        """Go back."""
        x, mean, rate, weight = self
        if v.shape[1] == 1:  # for more the kernel would need a copy of x for each
            v = v[:, 0].contiguous()  # the kernel takes for granted that it is
            made, _, _ = aten.native_layer_norm_backward.default(
                v, x, x.shape[1:], mean, rate, weight, None, [True, False, False]
            )
            return made.unsqueeze(1), True
        n = ((x - mean).mul_(rate)).unsqueeze(1)
        steep = (rate if weight is None else rate * weight).unsqueeze(1)
        made = v.mul_(steep) if ours else v * steep
        mean = made.mean(-1, keepdim=True)
        along = (made * n).mean(-1, keepdim=True)
        return made.addcmul_(n, along, value=-1).sub_(mean), True


class Grouped(Saved):
    """A group norm that one vector goes back through, as torch's kernels have it.

    Attributes:
        x: What it was given, ``(batch, channels, ...)``, contiguous: in any other
            layout the kernels lose the digits of bright images.
        mean: Of each group, ``(batch, groups)``.
        rate: One divided by the deviation, ``(batch, groups)``.
        weight: ``(channels,)``, or ``None``.
    """

    __slots__ = ()

    def pull(self, v: Tensor, ours: bool) -> tuple[Tensor, bool]:
        """Go back."""
        del ours
        x, mean, rate, weight = self
        given = v[:, 0]
        made, _, _ = aten.native_group_norm_backward.default(
            given.contiguous(),
            *(x, mean, rate, weight),
            *_sizes(x, mean.shape[1]),
            [True, False, False],
        )
        return _laid_out_as(given, made).unsqueeze(1), True


def normed(module: Any, x: Tensor) -> tuple[Normed | Fused, Tensor]:
    """Return what is needed to go back through a group or layer norm, and its output.

    Args:
        module: The norm.
        x: ``(batch, channels, ...)``.
    """
    groups = module.num_groups if type(module) is nn.GroupNorm else 1
    weight, bias = module.weight, module.bias
    # The kernels' own derivatives have none that is right.
    if type(module) is nn.LayerNorm and not grad_is_enabled():
        x = x.contiguous()
        y, mean, rate = aten.native_layer_norm.default(
            x, x.shape[1:], weight, bias, module.eps
        )
        return Fused(x, mean, rate, weight), y
    # No kernel here: where channels are last that of images subtracts the square of the
    # mean from the mean of squares, and of a bright one no digit is left. And to put
    # them first takes long where there is much.
    last = x.movedim(1, -1)
    flat = last.reshape(x.shape[0], 1, -1, x.shape[1])
    places = flat.shape[2]
    n = flat - _means(flat.sum(2, keepdim=True), groups, places)
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


def normed_for_one(module: Any, x: Tensor) -> tuple[Normed | Fused | Grouped, Tensor]:
    """Do the same for a group norm that one vector of each sample goes back through.

    Args:
        module: The norm.
        x: ``(batch, channels, ...)``.
    """
    if x.numel() > FEW or grad_is_enabled():  # kernels have no right derivatives
        return normed(module, x)
    given, x, weight = x, x.contiguous(), module.weight
    y, mean, rate = aten.native_group_norm.default(
        x, weight, module.bias, *_sizes(x, module.num_groups), module.eps
    )
    return Grouped(x, mean, rate, weight), _laid_out_as(given, y)


def _laid_out_as(given: Tensor, made: Tensor) -> Tensor:
    """Return what was made with channels last in memory, unless they are first there.

    Args:
        given: ``(batch, channels, ...)``, laid out as what follows wants it.
        made: The same, contiguous.
    """
    if given.is_contiguous():
        return made
    return made.movedim(1, -1).contiguous().movedim(-1, 1)


def _sizes(x: Tensor, groups: int) -> tuple[int, int, int, int]:
    """Return what the kernels of group norms ask for: all sizes, and the groups."""
    batch, channels = x.shape[:2]
    return batch, channels, x.numel() // (batch * channels), groups


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

    def part(self, start: int, stop: int) -> "Scaled":
        """Return it for some samples: it is the same for all."""
        del start, stop
        return self

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
    steep = (module.running_var + module.eps).rsqrt()
    if module.weight is not None:
        steep = steep * module.weight
    shift = -module.running_mean * steep
    if module.bias is not None:
        shift = shift + module.bias
    sides = [1] * (x.dim() - 2)
    steep = steep.view(-1, *sides)
    return Scaled(steep), torch.addcmul(shift.view(-1, *sides), x, steep)
