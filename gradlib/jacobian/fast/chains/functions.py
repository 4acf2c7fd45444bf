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


def _flatten(start_dim: int = 0, end_dim: int = -1) -> nn.Module:
    return nn.Flatten(start_dim, end_dim)


def _dropout(
    p: float = 0.5, training: bool = True, inplace: bool = False
) -> nn.Module | None:
    del p, inplace
    return None if training else nn.Identity()


Made = Callable[..., nn.Module | None]

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
}
# With the same arguments, after the first.

METHODS: dict[str, Made] = {
    name: _KINDS[name.removesuffix("_")]
    for name in ("relu", "relu_", "tanh", "tanh_", "sigmoid", "sigmoid_", "flatten")
}
"""What makes the layer of each method."""

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
def layer(make: Made, args: tuple[Any, ...], **kwargs: Any) -> nn.Module | None:
    """Return the layer that a call is; ``None`` if it is none.

    Args:
        make: What makes it.
        args: The call's, after the tensor: constants, as all else has no hash.
        kwargs: The same.
    """
    return make(*args, **kwargs)
