"""The functions of torch, and methods of tensors, that do what a known layer does.

These are torch's at the time of import: a later replacement is not known.
"""

from collections.abc import Callable
from functools import lru_cache
from types import BuiltinFunctionType, FunctionType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gradlib.jacobian.fast.chains.layers import SQUEEZED, Layer
from gradlib.jacobian.fast.chains.noted import note_own
from gradlib.jacobian.fast.chains.pointwise import (
    COS,
    EXP,
    FROM,
    OVER,
    PLUS,
    POINTWISE,
    POWER,
    SIN,
    TIMES,
    UNDER,
    Pointwise,
)
from gradlib.private.modules import torchs_own

Made = Callable[..., Any]
"""Makes a layer from the arguments of a call; ``None`` where there is none."""

LARGEST = 2**53
"""The largest number that is taken as the same in every dtype."""


def _flatten(start_dim: object = 0, end_dim: object = -1) -> nn.Module | None:
    is_known = type(start_dim) is int and (start_dim, end_dim) == (1, -1)
    return nn.Flatten() if is_known else None


def _squeeze(dim: object = None) -> object | None:
    return SQUEEZED if type(dim) is int and dim in (1, -1) else None


def _dropout(
    p: float = 0.5, training: bool = True, inplace: bool = False
) -> nn.Module | None:
    del inplace
    return nn.Identity() if 0 <= p <= 1 and not training else None


def _power(n: object, /) -> Layer | None:
    return Layer(n, POWER) if type(n) is int and n > 0 else None


def _of_number(operation: Pointwise, factor: int = 1) -> Made:
    """Return the maker of the layer of an operation with a number."""

    def made(number: Any) -> Layer | None:
        is_known = type(number) is int or type(number) is float
        if not is_known or not abs(number) <= LARGEST:
            return None
        return Layer(number * factor, operation)

    return made


def _over(number: Any) -> Layer | None:
    return _of_number(OVER)(number) if number else None


def _gelu(*, approximate: str = "none") -> nn.Module:
    return nn.GELU(approximate)


def _hardtanh(
    min_val: float = -1, max_val: float = 1, inplace: bool = False
) -> nn.Module:
    return nn.Hardtanh(min_val, max_val, inplace)


def _max_pool(
    kernel_size: Any,
    stride: Any = None,
    padding: Any = 0,
    dilation: Any = 1,
    ceil_mode: bool = False,
    return_indices: bool = False,
) -> nn.Module:
    return nn.MaxPool2d(
        kernel_size, stride, padding, dilation, return_indices, ceil_mode
    )


_WITHOUT_OPTIONS: dict[str, Made] = {
    "relu": lambda: nn.ReLU(),
    "tanh": lambda: nn.Tanh(),
    "sigmoid": lambda: nn.Sigmoid(),
    "sin": lambda: Layer(None, SIN),
    "cos": lambda: Layer(None, COS),
    "exp": lambda: Layer(None, EXP),
    "square": lambda: Layer(2, POWER),
    "pow": _power,
    "flatten": _flatten,
    "squeeze": _squeeze,
    "softmax": nn.Softmax,
    "log_softmax": nn.LogSoftmax,
}
_WITH_OPTIONS: dict[str, Made] = {
    **{known.name: kind for kind, known in POINTWISE.items()},
    "relu6": nn.ReLU6,
    "gelu": _gelu,
    "hardtanh": _hardtanh,
    "dropout": _dropout,
    "max_pool2d": _max_pool,
    "adaptive_avg_pool2d": nn.AdaptiveAvgPool2d,
    "avg_pool2d": nn.AvgPool2d,
    "softmax": nn.Softmax,
    "log_softmax": nn.LogSoftmax,
}

FUNCTIONS: dict[Any, Made] = {
    vars(space)[name]: make
    for space, makes in ((torch, _WITHOUT_OPTIONS), (F, _WITH_OPTIONS))
    for name, make in makes.items()
}
"""The maker of each function's layer, from the arguments after the first."""

NAMED: dict[Any, str] = {
    F.linear: "linear",
    **{vars(torch)[name]: name for name in ("matmul", "mm", "sum", "mean")},
    **{vars(torch)[name]: name for name in ("chunk", "split", "unbind")},
}
"""Functions whose layer depends on the shape, or on a tensor, each with its name."""

NAMESPACES: tuple[Any, ...] = (torch, nn, F)
"""The namespaces that functions are looked up in."""

METHODS: dict[str, Made] = {
    **_WITHOUT_OPTIONS,
    "relu_": lambda: nn.ReLU(inplace=True),
    "clone": lambda: nn.Identity(),
    "contiguous": lambda: nn.Identity(),
}
"""The maker of each method's layer."""

CASTS = {"float": torch.float32, "double": torch.float64}
"""Methods that do nothing where a tensor has that dtype already."""

OPERATORS: dict[str, Made] = {
    "__add__": _of_number(PLUS),
    "__radd__": _of_number(PLUS),
    "__sub__": _of_number(PLUS, -1),
    "__rsub__": _of_number(FROM),
    "__mul__": _of_number(TIMES),
    "__rmul__": _of_number(TIMES),
    "__truediv__": _over,
    "__rtruediv__": _of_number(UNDER),
    "__pow__": _power,
    "__neg__": lambda: Layer(-1, TIMES),
}
"""The maker of each operator's layer, from the number on its other side."""

JOINING = {
    **dict.fromkeys(("__add__", "__iadd__"), "add"),
    "__sub__": "sub",
    "__mul__": "mul",
    "__truediv__": "div",
}
"""Operators whose other side may be a tensor too, with the `by` of a `Joined`."""

GATHERING = {torch.cat: "cat", torch.stack: "stack"}
"""Functions of several tensors."""

MULTIPLYING = ("__matmul__", "matmul", "mm")
"""Methods whose other side is a matrix."""

TURNING = ("T", "mT", "t")
"""Attributes that give a transposed matrix; the last one is a method."""

SEEN = (
    *("shape", "size", "dim", "ndim", "view", "reshape", "__len__", "__getitem__"),
    *("sum", "mean", "chunk", "split", "unbind", "unsqueeze"),
    *CASTS,
)
"""Other known attributes of a tensor."""

_KNOWN = *METHODS, *OPERATORS, *JOINING, *MULTIPLYING, *TURNING, *SEEN
_WERE = {name: torchs_own(getattr(Tensor, name)) for name in _KNOWN}


def is_own(name: str) -> bool:
    """Tell whether an attribute of tensors is known, and still torch's own."""
    if name not in _WERE:
        return False
    note_own(((Tensor, name, _WERE[name]),))
    return getattr(Tensor, name) is _WERE[name]


CONSTANTS = (int, float, bool, str, type(None), torch.Size)
"""The types of immutable values without parts that stand for themselves."""


def is_torchs_function(value: object) -> bool:
    """Tell whether a value is a known function, or a namespace of functions."""
    if type(value) in (FunctionType, BuiltinFunctionType):
        return any(value in it for it in (FUNCTIONS, NAMED, GATHERING))
    return any(value is it for it in NAMESPACES)


@lru_cache(maxsize=4096, typed=True)  # 2.0 is not 2
def _layer(kinds: tuple[Any, ...], make: Made, *args: Any, **kwargs: Any) -> Any:
    del kinds
    return make(*args, **kwargs)


def layer(make: Made, *args: Any, **kwargs: Any) -> Any:
    """Return the layer that a call is, or ``None``. Equal calls give the same object.

    Args:
        make: The maker of the layer.
        *args: The call's arguments after the tensor: constants, as the cache hashes
            them.
        **kwargs: The same, by name.
    """
    given = *args, *kwargs.values()
    # The cache tells types of arguments apart, but not inside tuples: (2.0, 2), (2, 2).
    kinds = [(*map(type, it),) for it in given if issubclass(type(it), tuple)]
    return _layer((*kinds,), make, *args, **kwargs)
