"""Chains of layers whose Jacobians are known, where nobody looks on."""

import math
from collections.abc import Callable, Sequence
from types import NoneType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn, strided
from torch.nn import Parameter

from gradlib.jacobian.fast.chains import order as orders
from gradlib.jacobian.fast.chains.layers import (
    OPTIONS,
    POINTWISE,
    SOFTMAXES,
    SQUEEZED,
    Layer,
)
from gradlib.jacobian.fast.chains.line import ERRORS, layers_of
from gradlib.jacobian.fast.chains.own import is_own_function
from gradlib.jacobian.fast.chains.shapes import size_after
from gradlib.private import nobody_looks_on, own_parameters

DTYPES = (torch.float32, torch.float64)
"""Others are rounded so much that another order would give another answer."""


class Linear(NamedTuple):
    """The parameters of a linear layer: ``(outs, ins)`` and ``(outs,)``."""

    weight: Tensor
    bias: Tensor | None


class Maps(NamedTuple):
    """Convolutions and what is elementwise, up to where they are flattened.

    Attributes:
        layers: In the order of the forward pass.
        outs: How many entries come out of them, of each sample.
        entries: How many go into all of them together.
        multiply_adds: What all convolutions take.
    """

    layers: list[Layer]
    outs: int
    entries: int
    multiply_adds: int


NO_MAPS = Maps([], 0, 0, 0)


class Chain(NamedTuple):
    """Convolutions, then linear layers, and what is elementwise around them.

    Attributes:
        x: What it is given, ``(batch, *in)``.
        maps: The convolutions.
        linears: The linear layers.
        bends: What is elementwise before the first, after each, and after the last.
        softmax: What comes at the end, if it is one.
        squeezed: Whether the output's axis, of one entry, is taken away.
        ins: How many entries of a sample go into the first linear layer.
        outs: And how many come out of the last.
        order: In which order the Jacobians of the linear layers are multiplied.
        kept: How many entries of a sample are kept for what is elementwise there, and
            for the softmax.
    """

    x: Tensor
    maps: Maps
    linears: list[Linear]
    bends: list[list[Layer]]
    softmax: nn.Softmax | nn.LogSoftmax | None
    squeezed: bool
    ins: int
    outs: int
    order: orders.Order
    kept: int

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the Jacobian, ``(batch, *out, *in)``."""
        samples, *rest = self.x.shape
        return (samples, *([] if self.squeezed else [self.outs]), *rest)

    @property
    def softens_early(self) -> bool:
        """Whether the last matrix is smaller, for each sample, than the whole."""
        return self.softmax is not None and self.linears[-1].weight.shape[1] < self.ins

    @property
    def multiply_adds(self) -> int:
        """How many all products take, and the convolutions, of all rows."""
        rows = self.x.shape[0] * self.outs
        softmax = rows * self.ins if self.softmax is not None else 0
        return self.order.multiply_adds + softmax + rows * self.maps.multiply_adds


def chain_of(fn: Callable[..., Any], inputs: tuple[Any, ...]) -> Chain | None:
    """Return the chain that a function is, or ``None`` if it is something else.

    Layers count where no mode of torch could change what they do. So nothing mixes
    samples, is random, or cuts a path.

    Args:
        fn: The function.
        inputs: What it would be called with.
    """
    if len(inputs) != 1 or not nobody_looks_on():
        return None
    x = inputs[0]
    if type(x) not in (Tensor, Parameter) or x.dtype not in DTYPES:
        return None
    if x.dim() < 2 or not x.numel() or x.layout is not strided:
        return None
    try:
        layers = layers_of(fn, x)
        return None if _overwrites(layers) else _assembled(x, layers)
    except ERRORS:
        return None


def _overwrites(layers: list[Any]) -> bool:
    """Tell whether a layer overwrites what one before it may have saved."""
    saved = False  # as linear layers and convolutions save no output of theirs
    for layer in layers:
        if type(layer) in POINTWISE:
            if saved and layer.__dict__.get("inplace"):
                return True
            saved = True
        elif type(layer) is not nn.Flatten:
            saved = type(layer) is Layer
    return False


def _assembled(x: Tensor, layers: list[Any]) -> Chain | None:
    """Return the chain that layers make of x, if they do."""
    samples, *size = x.shape
    maps = NO_MAPS
    last: Any = layers[-1] if layers else None
    squeezed, softmax = last is SQUEEZED, None
    if type(last) in SOFTMAXES:
        is_own = is_own_function("softmax") and is_own_function("log_softmax")
        if not is_own or type(last.dim) is not int or last.dim not in (1, -1):
            return None
        softmax = last
    if squeezed or softmax is not None:
        layers = layers[:-1]
    if len(size) > 1:
        flat = next((i for i, it in enumerate(layers) if _flattens(it)), len(layers))
        maps = _maps(x, size, layers[:flat])
        if maps is None:
            return None
        size, layers = [maps.outs], layers[flat + 1 :]
    linears: list[Linear] = []
    bends: list[list[Layer]] = [[]]
    widths, kept = size, 0
    like = x.dtype, x.device
    for layer in layers:
        if type(layer) is nn.Linear:
            linear = _parameters(layer, *like)
            if linear is None:
                return None
            outs, ins = linear.weight.shape
            if ins != widths[-1]:
                return None
            widths.append(outs)
            linears.append(linear)
            bends.append([])
        elif bend := _elementwise(layer):
            if not bends[-1]:
                kept += widths[-1]
            bends[-1].append(bend)
        elif not _flattens(layer):
            return None
    if not linears or len(linears) > orders.MOST or (squeezed and widths[-1] != 1):
        return None
    order = orders.best(tuple(widths), tuple(map(bool, bends[1:])), samples)
    if softmax is not None and widths[-2] < widths[0]:  # the last matrix of each sample
        kept += widths[-1] * widths[-2]
    ends = widths[0], widths[-1]
    return Chain(x, maps, linears, bends, softmax, squeezed, *ends, order, kept)


def _elementwise(layer: Any) -> Layer | None:
    """Return a layer with what is known of it, if it is elementwise."""
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


def _is_refused(layer: Any) -> bool:
    """Tell whether torch goes back through no such layer: it has lost the sign."""
    if not layer.__dict__.get("inplace"):
        return False
    return min(getattr(layer, it, 0) for it in ("negative_slope", "alpha")) < 0


def _maps(x: Tensor, size: Sequence[int], layers: list[Any]) -> Maps | None:
    """Return layers up to where they are flattened, if they are known."""
    found: list[Layer] = []
    entries = multiply_adds = 0
    for layer in layers:
        entries += math.prod(size)
        if type(layer) is nn.Conv2d:
            after = size_after(layer, size)
            if after is None or _parameters(layer, x.dtype, x.device) is None:
                return None
            multiply_adds += math.prod(after) * layer.weight[0].numel()
            size = after
            found.append(Layer(layer, None))
        elif bend := _elementwise(layer):
            found.append(bend)
        else:
            return None
    return Maps(found, math.prod(size), entries, multiply_adds)


def _flattens(layer: Any) -> bool:
    return type(layer) is nn.Flatten and (layer.start_dim, layer.end_dim) == (1, -1)


def _parameters(
    layer: nn.Module, dtype: torch.dtype, device: torch.device
) -> Linear | None:
    """Return a layer's parameters, if they are ordinary and go with its input."""
    own = own_parameters(layer)
    weight, bias = own.get("weight"), own.get("bias")
    if type(weight) is not Parameter or type(bias) not in (Parameter, NoneType):
        return None
    if weight.dtype is not dtype or weight.layout is not strided:
        return None
    # One that does not go with the weight makes torch raise where it is added.
    if bias is not None and (
        bias.dtype is not dtype or bias.shape != (weight.shape[0],)
    ):
        return None
    return Linear(weight, bias) if weight.device == device else None
