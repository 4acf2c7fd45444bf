"""Goes forward through the maps of a chain, and back, vector by vector."""

from collections.abc import Callable, Sequence
from functools import partial
from operator import add
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from gradlib.jacobian.fast.chains.bends import Bend, passed
from gradlib.jacobian.fast.chains.convolutions import convolved
from gradlib.jacobian.fast.chains.layers import Joined, Linear, Summed, Taken, Woven
from gradlib.jacobian.fast.chains.mapped import Maps
from gradlib.jacobian.fast.chains.norms import grouped, normed, scaled
from gradlib.jacobian.fast.chains.pools import averaged, averaged_in_parts, picked
from gradlib.jacobian.fast.chains.steps import Step, Steps, differs, pulled_back
from gradlib.jacobian.fast.chains.ways import (
    Forked,
    Interwoven,
    Padded,
    gathered,
    put_together,
)
from gradlib.jacobian.fast.layouts import channels_last
from gradlib.jacobian.fast.matmul import linear, multiplied
from gradlib.jacobian.fast.plain_convolution import is_few
from gradlib.private.modes import grad_is_enabled


class ChannelsLast(NamedTuple):
    """Puts the channels of incoming vectors last in memory; it is no layer."""

    def pull(self, v: Tensor, ours: bool) -> tuple[Tensor, bool]:
        """Put channels last."""
        if v.dim() == 3:  # no images; mostly contiguous already
            return v.contiguous(), ours
        return _last_in_memory(v.flatten(0, 1)).view(v.shape), ours


class Multiplied(NamedTuple):
    """A linear layer.

    Attributes:
        weight: Its matrix, ``(outs, ins)``.
    """

    weight: Tensor

    def pull(self, v: Tensor, _ours: bool) -> tuple[Tensor, bool]:
        """Go back."""
        return multiplied(v, self.weight), True


class Spread(NamedTuple):
    """A sum or mean of vectors.

    Attributes:
        layer: The sum or mean.
    """

    layer: Summed

    def pull(self, v: Tensor, _ours: bool) -> tuple[Tensor, bool]:
        """Go back."""
        v = v / self.layer.of if self.layer.averages else v
        # Contiguous, else torch may multiply sample by sample.
        spread = v.expand(*v.shape[:-1], self.layer.of)
        return spread.contiguous(), self.layer.of > 1


def forward(maps: Maps, x: Tensor, count: int) -> tuple[Steps, Tensor]:
    """Return the steps back through maps, and their output.

    Args:
        maps: The maps.
        x: Their input, ``(batch, *in)``.
        count: How many vectors of each sample will go back.
    """
    if not maps.layers:
        return [], x
    if x.dim() != 4:
        steps, y = _forward(maps.layers, x, _VECTORS)
    elif is_few(x, maps.first_images // max(1, count)):
        return _forward(maps.layers, x.contiguous(), _CHANNELS_FIRST)
    else:
        steps, y = _forward(maps.layers, channels_last(x), _CHANNELS_LAST)
    return [*steps, ChannelsLast()], y


def backward(steps: Steps, v: Tensor) -> Tensor:
    """Return the VJPs of vectors ``(batch, count, channels, ...)``, in own memory."""
    made, is_ours = pulled_back(steps, v, ours=False)
    return made if is_ours else made.clone()  # it may still be a weight


def backward_alike(steps: Steps, v: Tensor) -> tuple[Steps, Tensor]:
    """Go back through the last layers, as far as they are the same for all samples.

    Args:
        steps: The steps of all layers.
        v: The vectors, the same for each sample, ``(1, count, channels, ...)``.

    Returns:
        The steps that are left, and the VJPs.
    """
    last = len(steps)
    while last and not differs(steps[last - 1]):
        last -= 1
    # Not copied: after a mean, all places share memory.
    return steps[:last], pulled_back(steps[last:], v, ours=False)[0]


def _forward(layers: Sequence[Any], x: Tensor, kind: "_Kind") -> tuple[Steps, Tensor]:
    steps: Steps = []
    ours, alone = False, not grad_is_enabled()
    for layer in layers:
        if type(layer) is Joined:
            (one, y), (other, z) = (_forward(way, x, kind) for way in layer.ways)
            x, gates = put_together(layer.by, y, z, kind.laid_out)
            steps.append(Forked(*map(add, (one, other), gates)))
            ours = alone
        elif type(layer) is Woven:
            step, x = _interwoven(layer, x, kind)
            steps.append(step)
            ours = alone
        elif layer.pointwise is None:
            step, x = kind.steps[type(layer.module)](layer.module, x)
            steps.append(step)
            ours = alone
        else:
            value, x, ours = passed(layer, x, ours=ours)
            steps.append(Bend(layer, kind.laid_out(value)))
            ours = ours and alone
    return steps, x


def _interwoven(layer: Woven, x: Tensor, kind: "_Kind") -> tuple[Interwoven, Tensor]:
    values = [x]
    stages: list[tuple[list[Steps], tuple[int, ...]]] = []
    for layers, by, given in layer.stages:
        if by == "cat":
            value, ways = gathered([values[number] for number in given])
        elif by:
            y, z = (values[number] for number in given)
            value, ways = put_together(by, y, z, kind.laid_out)
        else:
            steps, value = _forward(layers, values[given[0]], kind)
            ways = [steps]
        values.append(value)
        stages.append((ways, given))
    return Interwoven(stages), values[-1]


def _as_it_is(x: Tensor) -> Tensor:
    return x


def _last_in_memory(x: Tensor) -> Tensor:
    """Return images, or vectors, with channels last in memory on every device."""
    last = torch.channels_last if x.dim() == 4 else torch.contiguous_format
    return x.contiguous(memory_format=last)


def _multiplied(module: nn.Linear | Linear, x: Tensor) -> tuple[Multiplied, Tensor]:
    return Multiplied(module.weight), linear(x, module.weight, module.bias)


# torch's own, also where these methods are replaced later.
_sum, _mean = cast(Any, Tensor).sum, cast(Any, Tensor).mean


def _summed(layer: Summed, x: Tensor) -> tuple[Spread, Tensor]:
    of_all = _mean if layer.averages else _sum
    return Spread(layer), of_all(x, 1, keepdim=True)


def _taken(layer: Taken, x: Tensor) -> tuple[Padded, Tensor]:
    part = x[:, layer.start : layer.stop].clone()  # so that x is never overwritten
    return Padded(layer.start, layer.of - layer.stop), part


class _Kind(NamedTuple):
    """How layers are gone through, for one kind of samples.

    Attributes:
        steps: By type of layer, a function of it and its input ``(batch, ...)``. It
            returns the step back, and the output.
        laid_out: Gives kept tensors the memory layout of the vectors that go back.
    """

    steps: dict[type[Any], Callable[[Any, Tensor], tuple[Step, Tensor]]]
    laid_out: Callable[[Tensor], Tensor]


_VECTORS = _Kind(
    {
        nn.Conv2d: convolved,
        nn.Linear: _multiplied,
        Linear: _multiplied,
        Summed: _summed,
        Taken: _taken,
        nn.GroupNorm: normed,
        nn.LayerNorm: normed,
        nn.BatchNorm1d: scaled,
        nn.BatchNorm2d: scaled,
        nn.AdaptiveAvgPool2d: averaged_in_parts,
        nn.AvgPool2d: averaged,
        nn.MaxPool2d: picked,
    },
    _as_it_is,
)
_CHANNELS_LAST = _Kind(_VECTORS.steps, _last_in_memory)
_CHANNELS_FIRST = _Kind(
    {
        **_VECTORS.steps,
        nn.Conv2d: partial(convolved, last=False),
        nn.GroupNorm: grouped,
    },
    _as_it_is,
)
"""Images with channels last in memory, or first, as small convolutions and kernels of
group norms are faster so."""
