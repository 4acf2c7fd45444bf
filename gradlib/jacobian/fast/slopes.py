"""The slopes of elementwise operations: constants, or computed by their nodes."""

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor

from gradlib.jacobian.fast.moves import UNCHANGED
from gradlib.jacobian.fast.operation import Operation

SCALED: dict[str, Callable[[Operation], tuple[float, ...]]] = {
    "AddBackward0": lambda op: (1, op.saved("alpha")),
    "SubBackward0": lambda op: (1, -op.saved("alpha")),
    "NegBackward0": lambda _: (-1,),
    **dict.fromkeys(UNCHANGED, lambda _: (1,)),
}
"""The factor of each input, for nodes whose slopes are constants."""

ELEMENTWISE = frozenset(
    (
        *(f"{it}Backward0" for it in ("Abs", "Atan", "Cos", "Div", "Elu", "Erf")),
        *(f"{it}Backward0" for it in ("Exp", "Expm1", "Gelu", "Hardsigmoid")),
        *(f"{it}Backward0" for it in ("Hardswish", "Hardtanh", "LeakyRelu", "Log")),
        *(f"{it}Backward0" for it in ("Log1P", "LogSigmoid", "MaskedFill", "Mish")),
        *(f"{it}Backward0" for it in ("Mul", "NativeDropout", "Pow", "Reciprocal")),
        *(f"{it}Backward0" for it in ("Relu", "Rsqrt", "Sigmoid", "Silu", "Sin")),
        *(f"{it}Backward0" for it in ("Softplus", "Sqrt", "Tanh", "Where")),
        *(f"Clamp{it}Backward0" for it in ("Max", "Min")),
        *(f"{it}Backward1" for it in ("Clamp", "Mul", "Pow", "Rsub")),
        *(f"{it}BatchNormBackward0" for it in ("Cudnn", "Native")),
    )
)
"""The names of the other elementwise nodes, whose backward computes their slopes."""


def slopes(op: Operation) -> dict[int, Tensor]:
    """Return the slope by each input, of those inputs that have the output's shape.

    The node's own backward of ones is its derivative. A batch norm in training has no
    slopes: it mixes the samples.
    """
    if op.saved("training"):
        return {}
    grads = of_ones(op)
    return {
        i: grads[i]
        for i in op.shapes
        if type(grads[i]) is Tensor and tuple(grads[i].shape) == op.shape
    }


def of_ones(op: Operation) -> tuple[Any, ...]:
    """Return what the node's own backward gives for ones, by position."""
    returned: Any = op.node(torch.ones(op.shape, **op.like))
    return cast(Any, returned if isinstance(returned, tuple) else (returned,))
