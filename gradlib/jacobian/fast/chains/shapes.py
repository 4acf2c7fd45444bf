"""The shapes of the tensors on a line of layers."""

import math
from collections.abc import Sequence
from typing import Any, cast

from torch import nn

from gradlib.jacobian.fast.chains.layers import SQUEEZED, Joined
from gradlib.private import own_parameters

Shape = tuple[int, ...]


def shape_after(layers: Sequence[Any], shape: Shape) -> Shape | None:
    """Return the shape of what layers return, one after the other.

    Args:
        layers: Those of a line; each takes its input.
        shape: Of what the first is given, ``(batch, ...)``.

    Returns:
        The shape, or ``None`` where it is not known.
    """
    for layer in layers:
        kind = cast(type[Any], type(layer))
        if kind is nn.Linear:
            outs, ins = cast(Any, own_parameters(layer)["weight"]).shape
            if ins != shape[-1]:  # who waits for a shape would wait for ever
                return None
            shape = *shape[:-1], outs
        elif kind is nn.Conv2d:
            size = size_after(layer, shape[1:])
            if size is None:
                return None
            shape = (*shape[:1], *size)
        elif kind is nn.Flatten:
            if not flattens(layer):
                return None
            shape = (*shape[:1], math.prod(shape[1:]))
        elif kind is nn.MaxPool2d:
            size = pooled_size(layer, shape[1:])
            if size is None:
                return None
            shape = (*shape[:1], *size)
        elif kind is nn.AdaptiveAvgPool2d:
            # By what it prints: 1.0 is equal too, and torch refuses it.
            if len(shape) != 4 or repr(layer.output_size) not in ("1", "(1, 1)"):
                return None
            shape = *shape[:2], 1, 1
        elif kind is Joined:
            one, other = (shape_after(way, shape) for way in layer.ways)
            if one is None or one != other:
                return None
            shape = one
        elif layer is SQUEEZED:
            shape = shape[:-1]
    return shape


def flattens(layer: Any) -> bool:
    """Tell whether a layer makes a row of each sample."""
    if type(layer) is not nn.Flatten:
        return False
    axes = layer.start_dim, layer.end_dim
    return all(type(it) is int for it in axes) and axes == (1, -1)


def size_after(layer: nn.Conv2d, size: Sequence[int]) -> Shape | None:
    """Return the size of what a convolution makes of a sample, if it is known."""
    if len(size) != 3 or size[0] != layer.in_channels:
        return None
    padding, kernel = layer.padding, layer.kernel_size
    if isinstance(padding, str) or layer.padding_mode != "zeros":
        return None
    moves = zip(kernel, layer.stride, padding, layer.dilation, strict=True)
    spatial = [_after(it, *move) for it, move in zip(size[1:], moves, strict=True)]
    return None if min(spatial) < 1 else (layer.out_channels, *spatial)


def pooled_size(layer: nn.MaxPool2d, size: Sequence[int]) -> Shape | None:
    """Return the size of what a pool makes of a sample, if it is known."""
    if len(size) != 3 or layer.ceil_mode or layer.return_indices:
        return None
    kernel, stride, padding, dilation = (
        it if isinstance(it, tuple) else (it, it)
        for it in (layer.kernel_size, layer.stride, layer.padding, layer.dilation)
    )
    moves = [*zip(kernel, stride, padding, dilation, strict=True)]
    spatial = [_after(it, *move) for it, move in zip(size[1:], moves, strict=True)]
    # What torch refuses.
    if min(spatial) < 1 or any(2 * move[2] > move[0] for move in moves):
        return None
    return (size[0], *spatial)


def _after(size: int, kernel: int, stride: int, padding: int, dilation: int) -> int:
    """Return how many places a window stops at along an axis."""
    return (size + 2 * padding - dilation * (kernel - 1) - 1) // stride + 1
