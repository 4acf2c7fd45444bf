"""The slopes of elementwise operations: numbers, or as their nodes know them."""

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
"""What each thing is multiplied by that goes in, by the names of nodes."""

ELEMENTWISE = frozenset(
    (
        *(f"{it}Backward0" for it in ("Abs", "Atan", "Cos", "Div", "Elu", "Erf")),
        *(f"{it}Backward0" for it in ("Exp", "Expm1", "Gelu", "Hardsigmoid")),
        *(f"{it}Backward0" for it in ("Hardswish", "Hardtanh", "LeakyRelu", "Log")),
        *(f"{it}Backward0" for it in ("Log1P", "LogSigmoid", "MaskedFill", "Mish")),
        *(f"{it}Backward0" for it in ("Mul", "NativeDropout", "Pow", "Reciprocal")),
        *(f"{it}Backward0" for it in ("Relu", "Rsqrt", "Sigmoid", "Silu", "Sin")),
        *(f"{it}Backward0" for it in ("Softplus", "Sqrt", "Tanh", "Where")),
        *(f"{it}Backward1" for it in ("Clamp", "Mul", "Pow", "Rsub")),
        *(f"{it}BatchNormBackward0" for it in ("Cudnn", "Native")),
    )
)
"""The names of the nodes of others, which know their slopes."""


def slopes(op: Operation) -> dict[int, Tensor]:
    """Return the slopes by what went in, those that have the shape of what came out.

    The node itself says them: its own backward of ones is its derivative. Of a batch
    norm that learns there are none: it mixes the samples.
    """
    if op.saved("training"):
        return {}
    found: Any = op.node(torch.ones(op.shape, **op.like))
    given = cast(Any, found if isinstance(found, tuple) else (found,))
    return {
        i: given[i]
        for i in op.shapes
        if type(given[i]) is Tensor and tuple(given[i].shape) == op.shape
    }
