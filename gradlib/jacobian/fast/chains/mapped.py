"""The maps of a chain: layers before its matrices, gone back through by vectors."""

import math
import sys
from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import Any, NamedTuple, TypeAlias, cast

import torch
from torch import Tensor, nn, strided
from torch.nn import Parameter

from gradlib.jacobian.fast.chains.convolutions import convolution_of
from gradlib.jacobian.fast.chains.layers import (
    SQUEEZED,
    UNSQUEEZED,
    Joined,
    Layer,
    Linear,
    Stage,
    Summed,
    Taken,
    Woven,
)
from gradlib.jacobian.fast.chains.norms import BATCH_NORM, FEW
from gradlib.jacobian.fast.chains.own import is_own_function
from gradlib.jacobian.fast.chains.pointwise import OPTIONS, POINTWISE
from gradlib.jacobian.fast.chains.shapes import Shape, shape_after
from gradlib.jacobian.fast.plain_convolution import goes_by_shifts, small_images
from gradlib.private.modules import own_buffers, own_parameters

Like: TypeAlias = tuple[torch.dtype, torch.device]
"""The dtype and device of all tensors of a chain."""

Kind: TypeAlias = tuple[Any, ...]
"""The dtype, device, layout and shape of a tensor."""

kind_of: Callable[[Any], Kind] = attrgetter("dtype", "device", "layout", "shape")

_POOLS = (nn.AdaptiveAvgPool2d, nn.AvgPool2d, nn.MaxPool2d)


class Maps(NamedTuple):
    """Layers that are gone back through, vector by vector.

    Attributes:
        layers: The layers, in the order of the forward pass, also inside a `Joined`.
        size: The shape of a sample of their output.
        entries: How many entries of a sample all layers get together.
        widest: How many entries of a sample the largest tensor has.
        live: How many entries of one vector are held at once at most, going back.
        narrowest: How many entries the narrowest tensor has that all ways pass.
        multiply_adds: How many all convolutions and linear layers take.
        alike: How many those at the end take whose Jacobian all samples share.
        small_images: With at most this many samples, each convolution's time is that to
            start.
        of_groups: Whether there is a group norm, which is faster with channels first.
    """

    layers: list[Any]
    size: Shape
    entries: int = 0
    widest: int = 0
    live: int = 0
    narrowest: int = 0
    multiply_adds: int = 0
    alike: int = 0
    small_images: int = sys.maxsize
    of_groups: bool = False

    @property
    def first_images(self) -> int:
        """With at most this many vectors, all samples together, channels come first."""
        of_groups = FEW // self.widest if self.of_groups else 0
        return max(self.small_images, of_groups)

    @property
    def outs(self) -> int:
        """How many entries a sample of their output has."""
        return math.prod(self.size)


_ALIKE = (
    *(nn.Conv2d, nn.Linear, Linear, Summed, Taken, nn.BatchNorm1d, nn.BatchNorm2d),
    *(nn.AvgPool2d, nn.AdaptiveAvgPool2d, nn.Flatten),
)
"""Layers whose Jacobian is the same for all samples, as far as they are maps."""

NO_MAPS = Maps([], ())


def maps_of(layers: Sequence[Any], size: Shape, like: Like) -> Maps | None:
    """Return the maps that layers are; ``None`` where one is not known.

    Args:
        layers: The layers, in the order of the forward pass.
        size: The shape of a sample of their input.
        like: The dtype and device of the input.
    """
    width = math.prod(size)
    known = Maps([], size, widest=width, narrowest=width)
    for layer in layers:
        kind = cast(type[Any], type(layer))
        one = _OF_KINDS.get(kind, _of_other)(layer, known.size, like)
        if one is None:
            return None
        known = Maps(
            [*known.layers, *one.layers],
            one.size,
            entries=known.entries + one.entries,
            widest=max(known.widest, one.widest),
            live=max(known.live, one.live),
            narrowest=min(known.narrowest, one.narrowest),
            multiply_adds=known.multiply_adds + one.multiply_adds,
            alike=known.alike + one.alike if kind in _ALIKE else 0,
            small_images=min(known.small_images, one.small_images),
            of_groups=known.of_groups or one.of_groups,
        )
    return known


def _of_joined(layer: Joined, size: Shape, like: Like) -> Maps | None:
    one, other = (maps_of(way, size, like) for way in layer.ways)
    if one is None or other is None:
        return None
    factors = 0 if layer.by in ("add", "sub") else 2 * one.outs
    return Maps(
        [layer._replace(ways=(one.layers, other.layers))],
        one.size,
        entries=math.prod(size) + factors + one.entries + other.entries,
        widest=max(one.widest, other.widest),
        # Going back by the first way, the incoming gradient is held beside; by the
        # second, the first way's result too.
        live=max(one.live, other.live + math.prod(size)) + one.outs,
        narrowest=one.outs,
        multiply_adds=one.multiply_adds + other.multiply_adds,
        small_images=min(one.small_images, other.small_images),
        of_groups=one.of_groups or other.of_groups,
    )


def _of_woven(layer: Woven, size: Shape, like: Like) -> Maps | None:
    sizes, entries = [size], math.prod(size)
    widest = live = multiply_adds = 0
    stages = list[Stage]()
    # Stages that do nothing are left out, so later ones get other numbers.
    numbers = [0]
    for layers, by, given in layer.stages:
        given = tuple([numbers[number] for number in given])
        one, *others = [sizes[number] for number in given]
        maps = maps_of(layers, one, like)
        if maps is None:
            return None
        if not by and not maps.layers:
            numbers.append(given[0])
            continue
        size = maps.size if layers else one
        if by == "cat":
            size = (sum(it[0] for it in (one, *others)),)
        stages.append(Stage(maps.layers, by, given))
        sizes.append(size)
        numbers.append(len(stages))
        entries += maps.entries + len(others) * 2 * math.prod(size)
        widest = max(widest, maps.widest, math.prod(size))
        live = max(live, maps.live)
        multiply_adds += maps.multiply_adds
    size = sizes[numbers[-1]]
    return Maps(
        [Woven(stages)],
        size,
        entries=entries,
        widest=widest,
        live=live + entries,  # each stage's gradient may wait until its turn
        narrowest=math.prod(size),
        multiply_adds=multiply_adds,
    )


def _of_convolution(layer: nn.Conv2d, size: Shape, like: Like) -> Maps | None:
    shape, parameters = shape_after([layer], (0, *size)), parameters_of(layer, like)
    if shape is None or parameters is None or not _is_as_said(layer, parameters):
        return None
    outs, *each = parameters.weight.shape
    multiply_adds = math.prod(shape[1:]) * math.prod(each)
    it = convolution_of(layer, size)
    # All taps, before they are added up.
    more = multiply_adds // outs if goes_by_shifts(it) else 0
    maps = _of_one(layer, size, shape[1:], more=more, multiply_adds=multiply_adds)
    return maps._replace(small_images=small_images(it))


def _of_linear(layer: nn.Linear | Linear, size: Shape, like: Like) -> Maps | None:
    shape, parameters = shape_after([layer], (0, *size)), parameters_of(layer, like)
    if shape is None or parameters is None or len(size) != 1:
        return None
    multiply_adds = parameters.weight.numel()
    return _of_one(layer, size, shape[1:], multiply_adds=multiply_adds)


def _of_other(layer: Any, size: Shape, like: Like) -> Maps | None:
    kind = cast(type[Any], type(layer))
    if layer is SQUEEZED or layer is UNSQUEEZED:
        return NO_MAPS._replace(size=size)
    shape = shape_after([layer], (0, *size))
    if shape is None:
        return None
    after = shape[1:]
    if kind in (Summed, Taken) or kind in _POOLS:
        return _of_one(layer, size, after)
    if _is_norm(layer, size, like):
        maps = _of_one(layer, size, after, between=2 * math.prod(size))
        return maps._replace(of_groups=kind is nn.GroupNorm)
    if bend := elementwise(layer):
        return _of_one(layer, size, after)._replace(layers=[bend])
    if kind is nn.Flatten and after == size:
        return _of_one(layer, size, after)._replace(layers=[])
    return None


_OF_KINDS: dict[type[Any], Callable[[Any, Shape, Like], Maps | None]] = {
    Joined: _of_joined,
    Woven: _of_woven,
    nn.Conv2d: _of_convolution,
    nn.Linear: _of_linear,
    Linear: _of_linear,
}


def _of_one(
    layer: Any,
    size: Shape,
    after: Shape,
    *,
    more: int = 0,
    between: int = 0,
    multiply_adds: int = 0,
) -> Maps:
    """Return the maps that a single layer is.

    Args:
        layer: The layer.
        size: The shape of a sample of its input.
        after: The shape of a sample of its output.
        more: How many entries of a sample it gets besides its input.
        between: How many more are held at once, going back.
        multiply_adds: How many it takes.
    """
    entries, width = math.prod(size) + more, math.prod(after)
    return Maps(
        [Layer(layer, None)],
        after,
        entries=entries,
        widest=width,
        live=entries + between + width,
        narrowest=width,
        multiply_adds=multiply_adds,
        alike=multiply_adds,
    )


def _is_as_said(layer: nn.Conv2d, parameters: Linear) -> bool:
    """Tell whether a convolution's weight has the shape that its options say."""
    of_group = layer.in_channels // layer.groups
    said = (layer.out_channels, of_group, *layer.kernel_size)
    return parameters.weight.shape == said


def elementwise(layer: Any) -> Layer | None:
    """Return a layer as a `Layer`, if it is elementwise and torch's own."""
    if type(layer) is Layer:
        pointwise = layer.pointwise
        return layer if pointwise and is_own_function(pointwise.name) else None
    known = POINTWISE.get(type(layer))  # pyright: ignore (of any type)
    if known is None or not is_own_function(known.name):
        return None
    for option in known.options:
        if type(getattr(layer, option)) not in OPTIONS:
            return None
    return None if _is_refused(layer) else Layer(layer, known)


def scaling(layer: Any, width: int, like: Like) -> Layer | None:
    """Return a batch norm in evaluation as an elementwise `Layer`, or ``None``."""
    is_one = type(layer) is nn.BatchNorm1d and _is_norm(layer, (width,), like)
    return Layer(layer, BATCH_NORM) if is_one else None


def parameters_of(layer: nn.Module | Linear, like: Like) -> Linear | None:
    """Return a linear layer's or convolution's parameters, if they fit its input."""
    if type(layer) is Linear:
        weight, bias = layer
    else:
        own = own_parameters(cast(nn.Module, layer))
        weight, bias = cast(Tensor, own["weight"]), own["bias"]
    if weight.is_nested:  # so no shape of it is known
        return None
    # With a bias that does not fit the weight, torch raises.
    if bias is not None and not is_plain(bias, (weight.shape[0],), like):
        return None
    return Linear(weight, bias) if is_plain(weight, weight.shape, like) else None


def _is_norm(layer: Any, size: Shape, like: Like) -> bool:
    """Tell whether a layer is a known norm that does not mix samples."""
    kind = cast(type[Any], type(layer))
    channels = size[0]
    stored: list[Any] = []
    if kind is nn.GroupNorm:
        of_group = math.prod(size) // layer.num_groups  # torch refuses a single one
        fits = layer.num_channels == channels and of_group > 1
    elif kind is nn.LayerNorm:
        fits = layer.normalized_shape == tuple(size) == (channels,)
    elif kind in (nn.BatchNorm1d, nn.BatchNorm2d):
        # In evaluation it mixes no samples, and changes no statistics.
        fits = not layer.training and len(size) == (1 if kind is nn.BatchNorm1d else 3)
        buffers = own_buffers(layer)
        stored = [buffers.get("running_mean"), buffers.get("running_var")]
    else:
        return False
    own = own_parameters(layer)
    given = [it for it in (own.get("weight"), own.get("bias")) if it is not None]
    are_plain = all(is_plain(it, (channels,), like) for it in (*given, *stored))
    return fits and type(layer.eps) is float and are_plain


def is_plain(tensor: Any, shape: Shape, like: Like) -> bool:
    """Tell whether a tensor is ordinary, with a shape, dtype and device."""
    return (
        type(tensor) in (Parameter, Tensor)
        and tensor.shape == shape
        and (tensor.dtype, tensor.device) == like
        and tensor.layout is strided
    )


def _is_refused(layer: Any) -> bool:
    """Tell whether torch cannot go back: in place, a negative slope loses the sign."""
    if not layer.__dict__.get("inplace"):
        return False
    return min(getattr(layer, it, 0) for it in ("negative_slope", "alpha")) < 0
