"""Subclasses of tensors, which may refuse what plain tensors do."""

from collections.abc import Callable, Iterable
from typing import TypeVar

from torch import Tensor, nn

Result = TypeVar("Result")


class UnknownToClassError(Exception):
    """A tensor subclass does not support what was to be computed."""


def if_known(compute: Callable[[], Result], tensors: Iterable[Tensor]) -> Result:
    """Return the result of `compute`, which uses `tensors`.

    Raises:
        UnknownToClassError: `compute` raised something, and one of the tensors is of a
            subclass: for what it does not support it may raise anything.
    """
    try:
        return compute()
    except Exception as error:
        if not any(map(is_of_other_class, tensors)):
            raise
        raise UnknownToClassError from error


def is_of_other_class(tensor: Tensor) -> bool:
    """Tell whether a tensor is of a subclass, which may replace what torch does."""
    return type(tensor) not in (Tensor, nn.Parameter)
