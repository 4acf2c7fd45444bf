"""Reads a transformer of torch's own layers as a list of functions.

Each treats the samples of a batch alike, however many there are, as do linear layers
before and after the transformer, also on all tokens of a sample together.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias, cast

import torch
from torch import Tensor, nn
from torch.nn import Parameter
from torch.nn import functional as F
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

from gradlib.jacobian.fast.chains.own import are_same, found, run_by
from gradlib.jacobian.fast.chains.shapes import flattens
from gradlib.private.modes import nobody_looks_on
from gradlib.private.modules import (
    is_looked_into_plainly,
    is_plain_module,
    own_children,
    own_parameters,
)

Step: TypeAlias = Callable[[Tensor], Tensor]
"""A layer's function, of ``(batch, tokens, features)`` or ``(batch, size)``."""

# As they were when this was imported, like the functions in `_OWN`.
_LAYER, _ENCODER = nn.TransformerEncoderLayer, nn.TransformerEncoder
_SEQUENTIAL, _FLATTEN, _DROPOUT = nn.Sequential, nn.Flatten, nn.Dropout
_LINEAR, _NORM, _ATTENTION = nn.Linear, nn.LayerNorm, nn.MultiheadAttention

_TRANSFORMERS = frozenset((_LAYER, _ENCODER))

_ACTIVATIONS = nn.ReLU, nn.GELU

_BLOCKS = "_sa_block", "_ff_block"
"""The methods that a layer's forward calls."""

_FUNCTIONS = (
    *("multi_head_attention_forward", "_in_projection_packed"),
    *("scaled_dot_product_attention", "linear", "layer_norm", "relu", "gelu"),
)
"""The functions that the layers call."""

_OWN = (
    *found("forward", _LAYER, _ENCODER, nn.MultiheadAttention),
    *found("forward", nn.Linear, nn.LayerNorm, nn.Dropout, nn.ReLU, nn.GELU),
    *(it for name in _BLOCKS for it in found(name, _LAYER)),
    *(it for name in _FUNCTIONS for it in found(name, F)),
    *found("__iter__", nn.ModuleList),
    *run_by(nn.Sequential),
    *run_by(nn.Flatten),
    *run_by(nn.Dropout),
)


@dataclass
class Read:
    """What was read of a transformer.

    Attributes:
        x: Its input.
        steps: The functions of its layers, in their order.
        tensors: All its parameters.
        options: All else that decides what its layers do.
        size: The shape of a sample after the layers read so far.
        widest: How many entries of a sample the widest layer has.
    """

    x: Tensor
    steps: list[Step]
    tensors: list[Tensor]
    options: list[Any]
    size: tuple[int, ...]
    widest: int

    @property
    def rows(self) -> int:
        """How many entries a sample of the output has, once all layers are read."""
        return math.prod(self.size)


def has_transformer(net: Any) -> bool:
    """Tell whether a net is a transformer, or has one among its layers."""
    if type(net) is not _SEQUENTIAL:
        return type(net) in _TRANSFORMERS
    layers: Any = own_children(net)
    return not _TRANSFORMERS.isdisjoint(map(type, layers.values()))


def read(net: nn.Module, x: Tensor) -> Read | None:
    """Return what is read of a net; ``None`` if it may do something else.

    Args:
        net: The net.
        x: Its input, ``(batch, tokens, features)``.
    """
    if not (nobody_looks_on() and are_same(_OWN)):
        return None
    what = Read(x, [], [], [], tuple(x.shape[1:]), x[0].numel())
    try:
        what.steps += _steps(net, what)
    except (_UnknownError, AttributeError, KeyError):  # the last two: a part is missing
        return None
    return what


class _UnknownError(Exception):
    """Something in a transformer is not torch's own, or does not fit the input."""


def _require(condition: object) -> None:
    if not condition:
        raise _UnknownError


def _steps(module: Any, read: Read) -> list[Step]:
    """Return the functions of a module's layers."""
    kind = cast(type[Any], type(module))
    read.options.append(kind)
    if kind is _SEQUENTIAL:
        _parameters(module, kind, read)
        layers: Any = own_children(module)
        return [step for it in layers.values() for step in _steps(it, read)]
    if kind in _TRANSFORMERS:
        _require(len(read.size) == 2)
        return [_layer(module, read)] if kind is _LAYER else _encoder(module, read)
    if kind is _LINEAR:
        outs, _ = module.weight.shape
        step = _linear(module, read, read.size[-1], outs)
        read.size = *read.size[:-1], outs
        read.widest = max(read.widest, math.prod(read.size))
        return [step]
    if kind is _NORM:
        return [_norm(module, read)]
    if kind is _DROPOUT:
        return _no_dropout(module, read)
    _require(kind in (_FLATTEN, *_ACTIVATIONS) and is_plain_module(module))
    if kind is _FLATTEN:
        _require(flattens(module))
        read.size = (math.prod(read.size),)
        return [partial(torch.flatten, start_dim=1)]
    _require(not getattr(module, "inplace", False))  # its input may be needed
    read.options.append(getattr(module, "approximate", None))
    return [module]


def _no_dropout(module: Any, read: Read) -> list[Step]:
    """Return no step: the dropout must drop nothing."""
    _parameters(module, _DROPOUT, read)
    _require(not (module.training and module.p))
    return []


def _encoder(net: Any, read: Read) -> list[Step]:
    """Return the functions of an encoder's layers."""
    _parameters(net, _ENCODER, read)
    inner: Any = own_children(net)
    _parameters(inner["layers"], nn.ModuleList, read)
    steps = [_layer(it, read) for it in own_children(inner["layers"]).values()]
    _require(steps)
    norm = net.norm
    return steps if norm is None else [*steps, _norm(norm, read)]


def _layer(layer: Any, read: Read) -> Step:
    _parameters(layer, _LAYER, read)
    inner: Any = own_children(layer)
    (tokens, features), hidden = read.size, layer.linear1.out_features
    read.widest = max(read.widest, tokens * (features + hidden))
    attend = _attention(inner["self_attn"], read)
    widen = _linear(inner["linear1"], read, features, hidden)
    narrow = _linear(inner["linear2"], read, hidden, features)
    norm1, norm2 = _norm(inner["norm1"], read), _norm(inner["norm2"], read)
    bend = _activation(layer)
    for name in ("dropout", "dropout1", "dropout2"):
        _no_dropout(inner[name], read)
    norm_first = bool(layer.norm_first)
    read.options += [hidden, bend, getattr(bend, "approximate", None), norm_first]

    def norms_first(h: Tensor) -> Tensor:
        h = h + attend(norm1(h))
        return h + narrow(bend(widen(norm2(h))))

    def norms_last(h: Tensor) -> Tensor:
        h = norm1(h + attend(h))
        return norm2(h + narrow(bend(widen(h))))

    return norms_first if norm_first else norms_last


def _attention(attention: Any, read: Read) -> Step:
    tensors = _parameters(attention, _ATTENTION, read)
    heads, features = attention.num_heads, read.size[-1]
    read.options.append(heads)
    weight, bias = tensors["in_proj_weight"], tensors["in_proj_bias"]
    inner: Any = own_children(attention)
    out = _linear(
        inner["out_proj"], read, features, features, NonDynamicallyQuantizableLinear
    )
    _require(attention.batch_first and attention.embed_dim == features)
    _require(weight is not None and weight.shape == (3 * features, features))
    _require_bias(bias, 3 * features)
    _require(attention.bias_k is None and not attention.add_zero_attn)
    _require(not (attention.training and attention.dropout))

    def attend(h: Tensor) -> Tensor:
        given = F.linear(h, cast(Tensor, weight), bias)
        by_head = given.view(*h.shape[:2], 3, heads, -1).permute(2, 0, 3, 1, 4)
        query, key, value = by_head
        seen = F.scaled_dot_product_attention(query, key, value)
        return out(seen.transpose(1, 2).flatten(2))

    return attend


def _linear(
    layer: Any, read: Read, ins: int, outs: int, kind: type[nn.Module] = _LINEAR
) -> Step:
    tensors = _parameters(layer, kind, read)
    _require(tensors["weight"].shape == (outs, ins))
    _require_bias(tensors["bias"], outs)
    return partial(F.linear, **tensors)


def _require_bias(bias: Tensor | None, outs: int) -> None:
    """Require a bias of shape ``(outs,)``: another may differ from sample to sample."""
    _require(bias is None or bias.shape == (outs,))


def _norm(norm: Any, read: Read) -> Step:
    tensors = _parameters(norm, _NORM, read)
    shape = norm.normalized_shape
    _require(read.size[-len(shape) :] == shape)
    read.options += [shape, norm.eps]
    return partial(F.layer_norm, normalized_shape=shape, eps=norm.eps, **tensors)


def _activation(layer: Any) -> Step:
    bend = layer.activation
    if bend is not F.relu and bend is not F.gelu:
        _require(type(bend) in _ACTIVATIONS and is_plain_module(bend))
    return bend


def _parameters(module: Any, kind: type[nn.Module], read: Read) -> Any:
    """Return the parameters of a module, by name, and note them in `read`.

    Raises:
        _UnknownError: It is not torch's own module of class `kind`, or does not fit
            `x`.
    """
    x = read.x
    _require(type(module) is kind and is_plain_module(module))
    _require(is_looked_into_plainly(kind))
    tensors = own_parameters(module)
    in_front = {*_BLOCKS, *tensors, *own_children(module)}
    _require(vars(module).keys().isdisjoint(in_front))  # not set on the instance
    for it in tensors.values():
        if it is not None:
            _require(type(it) is Parameter and not it.is_inference())
            _require(it.dtype == x.dtype and it.device == x.device)
            read.tensors.append(it)
    # By name: which of them are None decides what each one does.
    read.options.append(tuple([(name, it is None) for name, it in tensors.items()]))
    return tensors
