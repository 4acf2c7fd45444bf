"""The shapes of the tensors along a line of layers."""

import math
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias, cast

from torch import Tensor, nn

from gradlib.jacobian.fast.chains.layers import (
    UNSQUEEZED,
    Joined,
    Layer,
    Linear,
    Summed,
    Taken,
    Woven,
)
from gradlib.jacobian.fast.chains.pointwise import POINTWISE
from gradlib.private.modules import own_parameters

Shape: TypeAlias = tuple[int, ...]


def shape_after(layers: Sequence[Any], shape: Shape) -> Shape | None:
    """Return the shape of the output of layers, one after the other.

    Args:
        layers: The layers of a line.
        shape: The shape of the first one's input, ``(batch, ...)``.

    Returns:
        The shape, or ``None`` where it is not known.
    """
    for layer in layers:
        if len(shape) == 1 and not _is_of_numbers(layer):
            return None
        rule = _AFTER.get(cast(type[Any], type(layer)))
        after = shape if rule is None else rule(layer, shape)
        if after is None:
            return None
        shape = after
    return shape


def _is_of_numbers(layer: Any) -> bool:
    """Tell whether a layer takes a batch of numbers, ``(batch,)``, too."""
    known = Joined, Woven, Layer, *POINTWISE
    return layer is UNSQUEEZED or type(layer) in known


def _known(layers: Sequence[Any], shape: Shape) -> Shape:
    """Return the shape after the layers of a way.

    It is known: ways are combined only where the shapes of both are, and fit together.
    """
    return cast(Shape, shape_after(layers, shape))


def _linear(layer: Any, shape: Shape) -> Shape | None:
    is_own = type(layer) is Linear
    weight: Any = layer.weight if is_own else own_parameters(layer)["weight"]
    if not is_matrix(weight):
        return None
    outs, ins = weight.shape
    # Else code that loops until a shape is reached would not end.
    return (*shape[:-1], outs) if ins == shape[-1] else None


def is_matrix(weight: Tensor) -> bool:
    """Tell whether a weight has rows and columns; of a nested one no shape is known."""
    return not weight.is_nested and weight.dim() == 2


def _flat(layer: Any, shape: Shape) -> Shape | None:
    return (*shape[:1], math.prod(shape[1:])) if flattens(layer) else None


def _with_axis(layer: object, shape: Shape) -> Shape | None:
    """Return the shape with a last axis of one entry more, or less."""
    if layer is UNSQUEEZED:
        return *shape, 1
    return shape[:1] if len(shape) == 2 and shape[1] == 1 else None


def _shape_of_woven(layer: Woven, shape: Shape) -> Shape:
    shapes = [shape]
    for layers, by, given in layer.stages:
        one, *others = [shapes[number] for number in given]
        after = _known(layers, one)
        if by == "cat":
            after = *one[:1], sum(it[-1] for it in (one, *others))
        shapes.append(after)
    return shapes[-1]


def flattens(layer: Any) -> bool:
    """Tell whether a layer flattens each sample to a vector."""
    if type(layer) is not nn.Flatten:
        return False
    axes = layer.start_dim, layer.end_dim
    return all(type(it) is int for it in axes) and axes == (1, -1)


def _convolved(layer: nn.Conv2d, size: Sequence[int]) -> Shape | None:
    """Return the shape of a sample of a convolution's output, if it is known."""
    if len(size) != 3 or size[0] != layer.in_channels:
        return None
    padding, kernel = layer.padding, layer.kernel_size
    if isinstance(padding, str) or layer.padding_mode != "zeros":
        return None
    moves = zip(kernel, layer.stride, padding, layer.dilation, strict=True)
    spatial = [_after(it, *move) for it, move in zip(size[1:], moves, strict=True)]
    return None if min(spatial) < 1 else (layer.out_channels, *spatial)


def _largest(layer: nn.MaxPool2d, size: Sequence[int]) -> Shape | None:
    if layer.return_indices:
        return None
    return _pooled(layer, size, layer.dilation)


def _means(layer: nn.AvgPool2d, size: Sequence[int]) -> Shape | None:
    if layer.divisor_override is not None or type(layer.count_include_pad) is not bool:
        return None
    return _pooled(layer, size, 1)


def _pooled(
    layer: nn.MaxPool2d | nn.AvgPool2d, size: Sequence[int], dilation: Any
) -> Shape | None:
    moves = _of_axes(layer.kernel_size, layer.stride, layer.padding, dilation)
    if len(size) != 3 or layer.ceil_mode is not False or moves is None:
        return None
    # torch refuses these.
    for kernel, stride, padding, apart in moves:
        if min(kernel, stride, apart) < 1 or not 0 <= 2 * padding <= kernel:
            return None
    spatial = [_after(it, *move) for it, move in zip(size[1:], moves, strict=True)]
    return None if min(spatial) < 1 else (size[0], *spatial)


def _means_of_parts(layer: nn.AdaptiveAvgPool2d, size: Sequence[int]) -> Shape | None:
    parts = _of_axes(layer.output_size)
    if len(size) != 3 or parts is None:
        return None
    for places, (count,) in zip(size[1:], parts, strict=True):
        if count < 1 or places % count:  # windows of several sizes
            return None
    return (size[0], *(count for (count,) in parts))


def _of_axes(*options: Any) -> list[tuple[int, ...]] | None:
    """Return a pool's options for each axis, if each is an integer or a pair of them.

    Types are compared exactly: torch refuses a float or ``True`` that equals an
    integer.
    """
    pairs = [*map(pair, options)]
    if any(len(it) != 2 or {*map(type, it)} != {int} for it in pairs):
        return None
    return [*zip(*pairs, strict=True)]


def pair(option: Any) -> tuple[int, int]:
    """Return a pool's option as a pair, one for each axis."""
    if isinstance(option, tuple):
        return cast(tuple[int, int], option)
    return option, option


def _of_image(
    size_of: Callable[[Any, Sequence[int]], Shape | None],
) -> Callable[[Any, Shape], Shape | None]:
    """Return the rule of a layer from that of a sample's shape."""

    def after(layer: Any, shape: Shape) -> Shape | None:
        size = size_of(layer, shape[1:])
        return None if size is None else (*shape[:1], *size)

    return after


_AFTER: dict[type[Any], Callable[[Any, Shape], Shape | None]] = {
    nn.Linear: _linear,
    Linear: _linear,
    nn.Flatten: _flat,
    nn.Conv2d: _of_image(_convolved),
    nn.MaxPool2d: _of_image(_largest),
    nn.AvgPool2d: _of_image(_means),
    nn.AdaptiveAvgPool2d: _of_image(_means_of_parts),
    Joined: lambda layer, shape: _known(layer.ways[0], shape),
    Woven: _shape_of_woven,
    Summed: lambda _, shape: (*shape[:-1], 1),
    Taken: lambda layer, shape: (*shape[:-1], layer.stop - layer.start),
    object: _with_axis,  # SQUEEZED and UNSQUEEZED
}
"""Functions of a layer and the shape of its input that give that of its output, if it
is known; other layers keep the shape."""


def _after(size: int, kernel: int, stride: int, padding: int, dilation: int) -> int:
    """Return how many windows there are along an axis."""
    return (size + 2 * padding - dilation * (kernel - 1) - 1) // stride + 1
