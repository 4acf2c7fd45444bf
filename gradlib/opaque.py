"""What is kept of a value that is neither a tensor nor a structure of tensors."""

from enum import Enum
from types import BuiltinFunctionType, EllipsisType, FunctionType, NoneType
from typing import Any, TypeGuard, cast

import numpy as np
import torch
from torch import Tensor, nn


class NotSaved:
    """Stands for a value that a recording, or its file, cannot hold.

    Attributes:
        text: The name of the value's class, or its ``repr``.
    """

    # Not a dataclass: those are opened like tuples, and this is one value.

    def __init__(self, text: str) -> None:
        """Take the text that describes the value."""
        self.text = text

    def __eq__(self, other: object) -> bool:
        """Tell whether `other` is a `NotSaved` with the same `text`."""
        return isinstance(other, NotSaved) and other.text == self.text

    def __hash__(self) -> int:
        """Agree with ``==``, so that a `NotSaved` can be a key."""
        return hash(self.text)

    def __repr__(self) -> str:
        """Show the text that describes the value."""
        return f"NotSaved({self.text})"


def is_tensor(value: object) -> TypeGuard[Tensor]:
    """Tell whether a value is a tensor, by its type.

    ``isinstance`` also asks for its ``__class__``, which raises in a weak proxy of what
    is gone, and in a mock of a tensor is that of a tensor.
    """
    return issubclass(type(value), Tensor)


def is_module(value: object) -> TypeGuard[nn.Module]:
    """Tell whether a value is a module, by its type, as `is_tensor` does."""
    return issubclass(type(value), nn.Module)


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
    kind = type(value)  # not __class__, for which see is_tensor()
    if issubclass(kind, FIXED):
        return True
    return kind is FunctionType and cast(Any, value).__closure__ is None


FIXED = (
    *(NoneType, bool, int, float, complex, str, bytes, range, slice, EllipsisType),
    *(type, Enum, BuiltinFunctionType, np.generic, np.dtype, NotSaved),
    *(torch.dtype, torch.device, torch.layout, torch.memory_format, torch.Size),
)
"""Classes whose instances cannot change."""
