"""The functions of torch, and methods of tensors, that are layers by another name.

Those that torch has when this is imported: what somebody puts there later is his own.
"""

from collections.abc import Callable
from functools import lru_cache
from types import BuiltinFunctionType, FunctionType
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from gradlib.jacobian.fast.chains.layers import (
    COS,
    EXP,
    FROM,
    OVER,
    PLUS,
    POWER,
    SIN,
    SQUEEZED,
    TIMES,
    Layer,
    Pointwise,
)


def _flatten(start_dim: int = 0, end_dim: int = -1) -> nn.Module:
    return nn.Flatten(start_dim, end_dim)


def _dropout(
    p: float = 0.5, training: bool = True, inplace: bool = False
) -> nn.Module | None:
    del p, inplace
    return None if training else nn.Identity()


def _power(n: object) -> Layer | None:
    return Layer(n, POWER) if type(n) is int and n > 0 else None


def _square() -> Layer | None:
    return _power(2)


def _squeezed(dim: object = None) -> object | None:
    return SQUEEZED if dim in (1, -1) else None


Made = Callable[..., Any]
"""Makes a layer, of numbers and names; ``None`` where there is none."""

_KINDS: dict[str, Made] = {
    "relu": nn.ReLU,
    "relu6": nn.ReLU6,
    "tanh": nn.Tanh,
    "sigmoid": nn.Sigmoid,
    "silu": nn.SiLU,
    "gelu": nn.GELU,
    "elu": nn.ELU,
    "leaky_relu": nn.LeakyReLU,
    "softplus": nn.Softplus,
    "hardtanh": nn.Hardtanh,
    "flatten": _flatten,
    "dropout": _dropout,
    "sin": lambda: Layer(None, SIN),
    "cos": lambda: Layer(None, COS),
    "exp": lambda: Layer(None, EXP),
    "pow": _power,
    "square": _square,
    "squeeze": _squeezed,
}
# With the same arguments, after the first.

_OF_TENSORS = ("relu", "tanh", "sigmoid", "sin", "cos", "exp", "pow", "square")

METHODS: dict[str, Made] = {
    name: _KINDS[name] for name in (*_OF_TENSORS, "flatten", "squeeze")
} | {f"{name}_": _KINDS[name] for name in _OF_TENSORS}
"""What makes the layer of each method."""


def _of_number(operation: Pointwise, factor: float = 1) -> Made:
    """Return what makes the layer of an operation with a number."""

    def made(number: Any) -> Layer | None:
        is_number = type(number) in (int, float)
        return Layer(number * factor, operation) if is_number else None

    return made


OPERATORS: dict[str, Made] = {
    "__add__": _of_number(PLUS),
    "__radd__": _of_number(PLUS),
    "__sub__": _of_number(PLUS, -1),
    "__rsub__": _of_number(FROM),
    "__mul__": _of_number(TIMES),
    "__rmul__": _of_number(TIMES),
    "__truediv__": _of_number(OVER),
    "__pow__": _power,
    "__neg__": lambda: Layer(-1, TIMES),
}
"""What makes the layer of each operator, with a number on its other side."""

NAMESPACES: tuple[Any, ...] = (torch, nn, F)
"""Where functions are."""

FUNCTIONS: dict[Any, Made] = {
    vars(space)[name]: kind
    for space in (torch, F)
    for name, kind in _KINDS.items()
    if name in vars(space)
}
"""What makes the layer of each."""

CONSTANTS = (int, float, bool, str, type(None))
"""The types of what has no parts, and stays as it is."""


def is_of_torch(value: object) -> bool:
    """Tell whether something is a function that is known, or where functions are."""
    if type(value) in (FunctionType, BuiltinFunctionType):
        return value in FUNCTIONS
    return any(value is it for it in NAMESPACES)


@lru_cache(maxsize=4096)
def layer(make: Made, args: tuple[Any, ...], **kwargs: Any) -> Any:
    """Return the layer that a call is; ``None`` if it is none.

    Args:
        make: What makes it.
        args: The call's, after the tensor: constants, as all else has no hash.
        kwargs: The same.
    """
    return make(*args, **kwargs)
