"""Small transformers of torch's own layers: each sample once for each row.

To read what a forward pass has left takes longer than such a pass. These layers treat
each sample alike, however many there are: so all rows come from one pass of as many
replicas of the batch.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, TypeAlias, cast

import torch
from torch import Tensor, nn
from torch.nn import Parameter
from torch.nn import functional as F
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

from gradlib.jacobian.arguments import Call, asks_no_more, is_open
from gradlib.jacobian.fast.chains.chain import DTYPES
from gradlib.jacobian.fast.chains.own import are_same, found
from gradlib.jacobian.fresh import keep_what_is_freed
from gradlib.jacobian.plan import BATCHED, Plan
from gradlib.private import (
    is_plain_module,
    nobody_looks_on,
    own_children,
    own_parameters,
)

SMALL = 10**5
"""How many entries go through the widest layers at most, all replicas together.

Larger nets are faster by their graph, where only the way back is taken for each row.
With torch 2.13 on a core of an AMD EPYC the two were equal at about so many.
"""

Step: TypeAlias = Callable[[Tensor], Tensor]
"""What a layer does, ``(batch, tokens, features)`` to the same."""

_LAYER, _ENCODER = nn.TransformerEncoderLayer, nn.TransformerEncoder

_ACTIVATIONS = nn.ReLU, nn.GELU

_BLOCKS = "_sa_block", "_ff_block"
"""The methods that a layer's forward calls."""

_OWN = (
    *found("forward", _LAYER, _ENCODER, nn.MultiheadAttention),
    *found("forward", nn.Linear, nn.LayerNorm, nn.Dropout, nn.ReLU, nn.GELU),
    *(it for name in _BLOCKS for it in found(name, _LAYER)),
    *found("multi_head_attention_forward", F),
    *found("scaled_dot_product_attention", F),
    *found("linear", F),
    *found("layer_norm", F),
    *found("relu", F),
    *found("gelu", F),
)


class Replicas(NamedTuple):
    """A small transformer, and what it is given.

    Attributes:
        steps: What its layers do.
        x: ``(batch, tokens, features)``.
    """

    steps: list[Step]
    x: Tensor

    @property
    def may_hide(self) -> tuple[Tensor, ...]:
        """What may be infinite where the Jacobian is not: rows would hide the same."""
        return ()

    @torch.inference_mode(False)
    @torch.enable_grad()
    def jacobian(self) -> Tensor:
        """Return the Jacobian, ``(batch, tokens, features, tokens, features)``."""
        keep_what_is_freed()
        batch, *shape = self.x.shape
        rows = self.x[0].numel()
        replicas = (
            self.x.detach().unsqueeze(1).expand(batch, rows, *shape).flatten(0, 1)
        )
        y = replicas.requires_grad_()
        for step in self.steps:
            y = step(y)
        ones = torch.eye(rows, dtype=y.dtype, device=y.device)
        asked = ones.expand(batch, rows, rows).reshape(y.shape)
        (jacobian,) = torch.autograd.grad(y, replicas, asked)
        return jacobian.reshape(batch, *shape, *shape)

    def planned(self, plan: Plan) -> Plan:
        """Return a plan to go back once, for all rows."""
        return plan.together(
            "replicas",
            "it is small, and its layers treat each sample alike",
            self.x[0].numel(),
            0,
            # All layers have saved something when the way back begins.
            plan.pass_bytes * max(BATCHED, len(self.steps) + 1) // BATCHED,
        )


def find_replicas(call: Call) -> Replicas | None:
    """Return the small transformer that a call is, or ``None``.

    Args:
        call: The call.
    """
    net: Any = call.fn
    if type(net) not in (_LAYER, _ENCODER) or len(call.inputs) != 1:
        return None
    x = call.inputs[0]
    if not (is_open(call) and asks_no_more(call)) or type(x) is not Tensor:
        return None
    if x.dim() != 3 or x.is_nested or x.dtype not in DTYPES or x.device.type != "cpu":
        return None
    if not 0 < _entries(x) <= SMALL:
        return None
    if not (nobody_looks_on() and are_same(_OWN)):
        return None
    try:
        return Replicas(_steps(net, x), x)
    except (_UnknownError, AttributeError, KeyError):  # or it lacks something
        return None


class _UnknownError(Exception):
    """Something in a transformer is not torch's own, or not made for such inputs."""


def _require(condition: object) -> None:
    if not condition:
        raise _UnknownError


def _entries(x: Tensor, hidden: int = 0) -> int:
    """Return how many entries all replicas have, and in a layer that widens them."""
    batch, tokens, features = x.shape
    return batch * tokens * features * tokens * (features + hidden)


def _steps(net: Any, x: Tensor) -> list[Step]:
    """Return what the layers of a transformer do."""
    if type(net) is _LAYER:
        return [_layer(net, x)]
    _parameters(net, _ENCODER, x)
    inner: Any = own_children(net)
    _parameters(inner["layers"], nn.ModuleList, x)
    steps = [_layer(it, x) for it in own_children(inner["layers"]).values()]
    _require(steps)
    norm = net.norm
    return steps if norm is None else [*steps, _norm(norm, x)]


def _layer(layer: Any, x: Tensor) -> Step:
    _parameters(layer, _LAYER, x)
    inner: Any = own_children(layer)
    features, hidden = x.shape[2], layer.linear1.out_features
    _require(_entries(x, hidden) <= SMALL)
    attend = _attention(inner["self_attn"], x)
    widen = _linear(inner["linear1"], x, features, hidden)
    narrow = _linear(inner["linear2"], x, hidden, features)
    norm1, norm2 = _norm(inner["norm1"], x), _norm(inner["norm2"], x)
    bend = _activation(layer)
    for name in ("dropout", "dropout1", "dropout2"):
        _parameters(inner[name], nn.Dropout, x)
        _require(not (inner[name].training and inner[name].p))

    def norm_first(h: Tensor) -> Tensor:
        h = h + attend(norm1(h))
        return h + narrow(bend(widen(norm2(h))))

    def norm_last(h: Tensor) -> Tensor:
        h = norm1(h + attend(h))
        return norm2(h + narrow(bend(widen(h))))

    return norm_first if layer.norm_first else norm_last


def _attention(attention: Any, x: Tensor) -> Step:
    tensors = _parameters(attention, nn.MultiheadAttention, x)
    heads, features = attention.num_heads, x.shape[2]
    weight, bias = tensors["in_proj_weight"], tensors["in_proj_bias"]
    inner: Any = own_children(attention)
    out = _linear(
        inner["out_proj"], x, features, features, NonDynamicallyQuantizableLinear
    )
    _require(attention.batch_first and attention.embed_dim == features)
    _require(weight is not None and weight.shape == (3 * features, features))
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
    layer: Any, x: Tensor, ins: int, outs: int, kind: type[nn.Module] = nn.Linear
) -> Step:
    tensors = _parameters(layer, kind, x)
    _require(tensors["weight"].shape == (outs, ins))
    return partial(F.linear, **tensors)


def _norm(norm: Any, x: Tensor) -> Step:
    tensors = _parameters(norm, nn.LayerNorm, x)
    shape = norm.normalized_shape
    _require(x.shape[-len(shape) :] == shape)
    return partial(F.layer_norm, normalized_shape=shape, eps=norm.eps, **tensors)


def _activation(layer: Any) -> Step:
    bend = layer.activation
    if bend is not F.relu and bend is not F.gelu:
        _require(type(bend) in _ACTIVATIONS and is_plain_module(bend))
    return bend


def _parameters(module: Any, kind: type[nn.Module], x: Tensor) -> Any:
    """Return the parameters of a module that is torch's own, of one class.

    Raises:
        _UnknownError: It is none, or not for what `x` is.
    """
    _require(type(module) is kind and is_plain_module(module))
    tensors = own_parameters(module)
    in_front = {*_BLOCKS, *tensors, *own_children(module)}
    _require(vars(module).keys().isdisjoint(in_front))  # somebody has put it there
    for it in tensors.values():
        if it is not None:
            _require(type(it) is Parameter and not it.is_inference())
            _require(it.dtype == x.dtype and it.device == x.device)
    return tensors
