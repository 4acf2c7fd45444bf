"""What is kept of a value that is neither a tensor nor a structure of tensors."""

from enum import Enum
from types import BuiltinFunctionType, EllipsisType, FunctionType, NoneType
from typing import Any, cast

import numpy as np
import torch

from gradlib.storage import NotSaved


def keep_opaque(value: object) -> Any:
    """Return what a recording keeps of a value as it is now.

    A value that may change, such as a key-value cache, is not kept: it would show its
    later state, and keep the tensors in it alive, with the graph behind them.

    Args:
        value: Anything but a tensor, or a structure that a `Tree` opens.

    Returns:
        The value itself if it cannot change, a copy of an array, or else `NotSaved`
        with the name of the class.
    """
    if is_fixed(value):
        return value
    if type(value) is np.ndarray and not cast(Any, value).dtype.hasobject:
        return cast(Any, value).copy()
    return NotSaved(type(cast(object, value)).__name__)


def is_fixed(value: object) -> bool:
    """Tell whether neither a value nor what it holds can change."""
    if isinstance(value, FIXED):
        return True
    return isinstance(value, FunctionType) and value.__closure__ is None


FIXED = (
    *(NoneType, bool, int, float, complex, str, bytes, range, slice, EllipsisType),
    *(type, Enum, BuiltinFunctionType, np.generic, np.dtype, NotSaved),
    *(torch.dtype, torch.device, torch.layout, torch.memory_format, torch.Size),
)
"""Classes whose instances cannot change."""
