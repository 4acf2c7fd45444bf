"""The layers whose Jacobians are known, by their exact types.

A subclass may do anything, so it is not the type it was made from.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from gradlib.private import grad_is_enabled

aten = cast(Any, torch.ops.aten)


@dataclass(frozen=True, slots=True)
class Pointwise:
    """An elementwise layer.

    Attributes:
        name: Of torch's function, and of a tensor's method, that does the same.
        forward: Of the module, or number, and x: what it returns.
        pull: Of that, v and x or y: v times the slope. It broadcasts.
        looks_at: Which one `pull` is given: ``"x"``, ``"y"``, or ``"either"``.
        overwrite: As `forward`, into x itself; ``None`` where x is looked at.
        options: The names of the module's options.
    """

    name: str
    forward: Callable[[Any, Tensor], Tensor]
    pull: Callable[[Any, Tensor, Tensor], Tensor]
    looks_at: str
    overwrite: Callable[[Any, Tensor], Tensor] | None = None
    options: tuple[str, ...] = ()


OPTIONS = (int, float, str)
"""The types of options; a tensor may be one, and have a graph."""


def _silu_pulled(v: Tensor, x: Tensor) -> Tensor:
    if not grad_is_enabled():
        return aten.silu_backward.default(v, x)
    s = x.sigmoid()  # torch's own has no derivative
    return v * (s + x * s * (1 - s))


def _mish_pulled(v: Tensor, x: Tensor) -> Tensor:
    if not grad_is_enabled():
        return v * aten.mish_backward.default(torch.ones_like(x), x)
    t = nn.functional.softplus(x).tanh()  # torch's own has no derivative
    return v * (t + x * x.sigmoid() * (1 - t.square()))


def _softsign_slope(x: Tensor) -> Tensor:
    size = x.abs()
    return (1 - size / (1 + size)) / (1 + size)  # NaN at infinity, as torch's


SELU_ALPHA, SELU_SCALE = 1.6732632423543772, 1.0507009873554805
"""Klambauer et al., "Self-Normalizing Neural Networks", 2017."""

POINTWISE: dict[type[nn.Module], Pointwise] = {
    nn.ReLU: Pointwise(
        "relu",
        lambda _, x: x.relu(),
        lambda _, v, y: aten.threshold_backward.default(v, y, 0),
        "either",
        lambda _, x: x.relu_(),
    ),
    nn.Tanh: Pointwise(
        "tanh",
        lambda _, x: x.tanh(),
        lambda _, v, y: aten.tanh_backward.default(v, y),
        "y",
        lambda _, x: x.tanh_(),
    ),
    nn.Sigmoid: Pointwise(
        "sigmoid",
        lambda _, x: x.sigmoid(),
        lambda _, v, y: aten.sigmoid_backward.default(v, y),
        "y",
        lambda _, x: x.sigmoid_(),
    ),
    nn.SiLU: Pointwise(
        "silu",
        lambda _, x: nn.functional.silu(x),
        lambda _, v, x: _silu_pulled(v, x),
        "x",
    ),
    nn.GELU: Pointwise(
        "gelu",
        lambda gelu, x: nn.functional.gelu(x, approximate=gelu.approximate),
        # It cannot broadcast.
        lambda gelu, v, x: (
            v
            * aten.gelu_backward.default(
                torch.ones_like(x), x, approximate=gelu.approximate
            )
        ),
        "x",
        options=("approximate",),
    ),
    nn.ELU: Pointwise(
        "elu",
        lambda elu, x: nn.functional.elu(x, elu.alpha),
        lambda elu, v, x: aten.elu_backward.default(v, elu.alpha, 1, 1, False, x),
        "x",
        options=("alpha",),
    ),
    nn.SELU: Pointwise(
        "selu",
        lambda _, x: nn.functional.selu(x),
        lambda _, v, x: aten.elu_backward.default(
            v, SELU_ALPHA, SELU_SCALE, 1, False, x
        ),
        "x",
    ),
    nn.Mish: Pointwise(
        "mish",
        lambda _, x: nn.functional.mish(x),
        lambda _, v, x: _mish_pulled(v, x),
        "x",
    ),
    nn.Hardswish: Pointwise(
        "hardswish",
        lambda _, x: nn.functional.hardswish(x),
        # It cannot broadcast.
        lambda _, v, x: v * aten.hardswish_backward.default(torch.ones_like(x), x),
        "x",
    ),
    nn.LogSigmoid: Pointwise(
        "logsigmoid",
        lambda _, x: nn.functional.logsigmoid(x),
        lambda _, v, x: v * (-x).sigmoid(),
        "x",
    ),
    nn.Softsign: Pointwise(
        "softsign",
        lambda _, x: nn.functional.softsign(x),
        lambda _, v, x: v * _softsign_slope(x),
        "x",
    ),
    nn.LeakyReLU: Pointwise(
        "leaky_relu",
        lambda leaky, x: nn.functional.leaky_relu(x, leaky.negative_slope),
        lambda leaky, v, x: aten.leaky_relu_backward.default(
            v, x, leaky.negative_slope, False
        ),
        "x",
        options=("negative_slope",),
    ),
    nn.Softplus: Pointwise(
        "softplus",
        lambda plus, x: nn.functional.softplus(x, plus.beta, plus.threshold),
        lambda plus, v, x: aten.softplus_backward.default(
            v, x, plus.beta, plus.threshold
        ),
        "x",
        options=("beta", "threshold"),
    ),
    nn.Hardtanh: Pointwise(
        "hardtanh",
        lambda hard, x: nn.functional.hardtanh(x, hard.min_val, hard.max_val),
        lambda hard, v, x: aten.hardtanh_backward.default(
            v, x, hard.min_val, hard.max_val
        ),
        "x",
        options=("min_val", "max_val"),
    ),
}

POINTWISE[nn.ReLU6] = POINTWISE[nn.Hardtanh]

SQUEEZED = object()
"""Stands where a last axis of one entry is taken away."""

IDLE = (nn.Identity, nn.Dropout, nn.AlphaDropout)
"""Layers that return what they are given, unless they drop some of it."""

SOFTMAXES = (nn.Softmax, nn.LogSoftmax)
"""Layers that mix the entries of a sample: a chain may end with one."""


class Layer(NamedTuple):
    """A layer of a chain that is no linear one.

    Attributes:
        module: The module, or the number that an operation takes; ``None`` without.
        pointwise: What is known of it; ``None`` for a convolution.
    """

    module: Any
    pointwise: Pointwise | None


OPERATIONS = SIN, COS, EXP, POWER, TIMES, OVER, PLUS, FROM = (
    Pointwise("sin", lambda _, x: x.sin(), lambda _, v, x: v * x.cos(), "x"),
    Pointwise("cos", lambda _, x: x.cos(), lambda _, v, x: -v * x.sin(), "x"),
    Pointwise("exp", lambda _, x: x.exp(), lambda _, v, y: v * y, "y"),
    Pointwise("pow", lambda n, x: x**n, lambda n, v, x: v * (n * x ** (n - 1)), "x"),
    Pointwise(
        "mul", lambda c, x: x * c, lambda c, v, x: v * torch.full_like(x, c), "x"
    ),
    Pointwise(
        "div", lambda c, x: x / c, lambda c, v, x: v * torch.ones_like(x) / c, "x"
    ),
    Pointwise("add", lambda c, x: x + c, lambda _, v, x: v * torch.ones_like(x), "x"),
    Pointwise("sub", lambda c, x: c - x, lambda _, v, x: -v * torch.ones_like(x), "x"),
)
"""Operations that no module is there for: some take a number, n or c."""
