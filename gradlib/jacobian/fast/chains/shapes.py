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
            shape = (*shape[:1], math.prod(shape[1:]))
        elif kind is nn.AdaptiveAvgPool2d:
            if len(shape) != 4 or layer.output_size not in (1, (1, 1)):
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


def size_after(layer: nn.Conv2d, size: Sequence[int]) -> Shape | None:
    """Return the size of what a convolution makes of a sample, if it is known."""
    if len(size) != 3 or size[0] != layer.in_channels:
        return None
    padding, kernel = layer.padding, layer.kernel_size
    if isinstance(padding, str) or layer.padding_mode != "zeros":
        return None
    spatial = [
        (size[1 + i] + 2 * padding[i] - layer.dilation[i] * (kernel[i] - 1) - 1)
        // layer.stride[i]
        + 1
        for i in range(2)
    ]
    return None if min(spatial) < 1 else (layer.out_channels, *spatial)
