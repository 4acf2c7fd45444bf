"""The tensors that were told to retain their grad, wherever in the process they are.

Nothing leads from a node of a graph to its tensor, nor from a ``.grad`` to its own.
"""

import gc
from typing import Any

from torch import Tensor

from gradlib.private.modes import no_function_modes


def retaining() -> list[Tensor]:
    """Return every tensor that ``retain_grad()`` was called of, and no leaf."""
    # By their types, as what only stands for an object may do anything when asked for
    # its class; and none is asked twice, as there are many.
    kinds = _with_subclasses(Tensor)
    tensors = (it for it in gc.get_objects() if type(it) in kinds)
    with no_function_modes():
        return [it for it in tensors if _retains_grad(it)]


def _with_subclasses(kind: type[Any]) -> set[type[Any]]:
    return {kind}.union(*map(_with_subclasses, kind.__subclasses__()))


def _retains_grad(tensor: Tensor) -> bool:
    try:
        return tensor.retains_grad
    except RuntimeError:  # it is none any more: torch has taken away what it stood for
        return False
