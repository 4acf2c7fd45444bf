"""The elementwise layers whose slopes are known, by their exact types.

A subclass may do anything, so it does not count as its base class.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gradlib.jacobian.fast.kernels import aten
from gradlib.private.modes import grad_is_enabled

Pull: TypeAlias = Callable[[Any, Tensor, Tensor, bool], Tensor]
"""A function of a module, vectors v, the module's input x or output y, and whether v
may be overwritten. It returns v times the slope, broadcast where v is not
overwritten."""


@dataclass(frozen=True, slots=True)
class Pointwise:
    """An elementwise layer.

    Attributes:
        name: The name of torch's function, and of a tensor's method, that does the
            same.
        forward: A function of the module, or number, and x, that returns y.
        pull: Multiplies vectors by the slope.
        looks_at: What `pull` takes, ``"x"``, ``"y"``, or ``"either"`` of both.
        overwrite: As `forward`, but overwrites x; ``None`` where `pull` takes x.
        options: The names of the module's options.
        cuts: Whether `pull` gives zero where the function is flat for infinite vectors
            too, as torch does; a product with a slope of zero would give NaN.
        factor: A function of the number that gives the slope, where that is constant.
    """

    name: str
    forward: Callable[[Any, Tensor], Tensor]
    pull: Pull
    looks_at: str
    overwrite: Callable[[Any, Tensor], Tensor] | None = None
    options: tuple[str, ...] = ()
    cuts: bool = False
    factor: Callable[[Any], float] | None = None


OPTIONS = (int, float, str)
"""The types that options must have: a tensor as an option may have a graph."""


def by_kernel(
    kernel: Any, others: Callable[[Any, Tensor], tuple[Any, ...]] | None = None
) -> Pull:
    """Return the pull that multiplies by a slope in one of torch's kernels.

    Args:
        kernel: The kernel.
        others: A function of the module and its x or y that gives the kernel's
            arguments after v; ``None`` for x or y alone.
    """
    fresh, into = kernel.default, kernel.grad_input

    def pull(module: Any, v: Tensor, value: Tensor, ours: bool) -> Tensor:
        rest = (value,) if others is None else others(module, value)
        return into(v, *rest, grad_input=v) if ours else fresh(v, *rest)

    return pull


def by_slope(slope: Callable[[Any, Tensor], Tensor]) -> Pull:
    """Return the pull that multiplies by ``slope(module, x or y)``."""

    def pull(module: Any, v: Tensor, value: Tensor, ours: bool) -> Tensor:
        steep = slope(module, value)
        return v.mul_(steep) if ours else v * steep

    return pull


_silu_at_once = by_kernel(aten.silu_backward)


def _silu_pulled(module: Any, v: Tensor, x: Tensor, ours: bool) -> Tensor:
    if not grad_is_enabled():
        return _silu_at_once(module, v, x, ours)
    s = x.sigmoid()  # torch's kernel has no derivative
    return v * (s + x * s * (1 - s))


def _mish_slope(x: Tensor) -> Tensor:
    if not grad_is_enabled():
        return aten.mish_backward.default(torch.ones_like(x), x)
    t = F.softplus(x).tanh()  # torch's kernel has no derivative
    return t + x * x.sigmoid() * (1 - t.square())


def _power_slope(n: Any, x: Tensor) -> Tensor:
    return x + x if n == 2 else n * x ** (n - 1)  # a square is the commonest


def _softsign_slope(x: Tensor) -> Tensor:
    size = x.abs()
    return (1 - size / (1 + size)) / (1 + size)  # NaN at infinity, as torch's


SELU_ALPHA, SELU_SCALE = 1.6732632423543772, 1.0507009873554805
"""Klambauer et al., "Self-Normalizing Neural Networks", 2017."""


POINTWISE: dict[type[nn.Module], Pointwise] = {
    nn.ReLU: Pointwise(
        "relu",
        lambda _, x: x.relu(),
        by_kernel(aten.threshold_backward, lambda _, y: (y, 0)),
        "either",
        lambda _, x: x.relu_(),
        cuts=True,
    ),
    nn.Tanh: Pointwise(
        "tanh",
        lambda _, x: x.tanh(),
        by_kernel(aten.tanh_backward),
        "y",
        lambda _, x: x.tanh_(),
    ),
    nn.Sigmoid: Pointwise(
        "sigmoid",
        lambda _, x: x.sigmoid(),
        by_kernel(aten.sigmoid_backward),
        "y",
        lambda _, x: x.sigmoid_(),
    ),
    nn.SiLU: Pointwise("silu", lambda _, x: F.silu(x), _silu_pulled, "x"),
    nn.GELU: Pointwise(
        "gelu",
        lambda gelu, x: F.gelu(x, approximate=gelu.approximate),
        by_slope(
            lambda gelu, x: aten.gelu_backward.default(
                torch.ones_like(x), x, approximate=gelu.approximate
            )
        ),
        "x",
        options=("approximate",),
    ),
    nn.ELU: Pointwise(
        "elu",
        lambda elu, x: F.elu(x, elu.alpha),
        by_kernel(aten.elu_backward, lambda elu, x: (elu.alpha, 1, 1, False, x)),
        "x",
        options=("alpha",),
    ),
    nn.SELU: Pointwise(
        "selu",
        lambda _, x: F.selu(x),
        by_kernel(
            aten.elu_backward, lambda _, x: (SELU_ALPHA, SELU_SCALE, 1, False, x)
        ),
        "x",
    ),
    nn.Mish: Pointwise(
        "mish", lambda _, x: F.mish(x), by_slope(lambda _, x: _mish_slope(x)), "x"
    ),
    nn.Hardswish: Pointwise(
        "hardswish",
        lambda _, x: F.hardswish(x),
        lambda _, v, x, _ours: aten.hardswish_backward.default(v, x),
        "x",
        cuts=True,
    ),
    nn.LogSigmoid: Pointwise(
        "logsigmoid",
        lambda _, x: F.logsigmoid(x),
        by_slope(lambda _, x: (-x).sigmoid()),
        "x",
    ),
    nn.Softsign: Pointwise(
        "softsign",
        lambda _, x: F.softsign(x),
        by_slope(lambda _, x: _softsign_slope(x)),
        "x",
    ),
    nn.LeakyReLU: Pointwise(
        "leaky_relu",
        lambda leaky, x: F.leaky_relu(x, leaky.negative_slope),
        by_kernel(
            aten.leaky_relu_backward,
            lambda leaky, x: (x, leaky.negative_slope, False),
        ),
        "x",
        options=("negative_slope",),
    ),
    nn.Softplus: Pointwise(
        "softplus",
        lambda plus, x: F.softplus(x, plus.beta, plus.threshold),
        by_kernel(
            aten.softplus_backward, lambda plus, x: (x, plus.beta, plus.threshold)
        ),
        "x",
        options=("beta", "threshold"),
    ),
    nn.Hardtanh: Pointwise(
        "hardtanh",
        lambda hard, x: F.hardtanh(x, hard.min_val, hard.max_val),
        by_kernel(
            aten.hardtanh_backward, lambda hard, x: (x, hard.min_val, hard.max_val)
        ),
        "x",
        options=("min_val", "max_val"),
        cuts=True,
    ),
}

POINTWISE[nn.ReLU6] = POINTWISE[nn.Hardtanh]


def _by_number(
    name: str, forward: Callable[[Any, Tensor], Tensor], factor: Callable[[Any], float]
) -> Pointwise:
    """Return an operation with a number, whose slope is constant."""
    slope = by_slope(lambda c, x: torch.full_like(x, factor(c)))
    return Pointwise(name, forward, slope, "x", factor=factor)


OPERATIONS = SIN, COS, EXP, POWER, TIMES, OVER, UNDER, PLUS, FROM = (
    Pointwise("sin", lambda _, x: x.sin(), by_slope(lambda _, x: x.cos()), "x"),
    Pointwise("cos", lambda _, x: x.cos(), by_slope(lambda _, x: -x.sin()), "x"),
    Pointwise("exp", lambda _, x: x.exp(), by_slope(lambda _, y: y), "y"),
    Pointwise("pow", lambda n, x: x**n, by_slope(_power_slope), "x"),
    _by_number("mul", lambda c, x: x * c, lambda c: c),
    _by_number("div", lambda c, x: x / c, lambda c: 1 / c),
    Pointwise("div", lambda c, x: c / x, by_slope(lambda c, x: -(c / x) / x), "x"),
    _by_number("add", lambda c, x: x + c, lambda _: 1),
    _by_number("sub", lambda c, x: c - x, lambda _: -1),
)
"""Operations without a module: some take a number, n or c."""
