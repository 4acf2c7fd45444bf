"""The tensors that ``retain_grad()`` was called on, anywhere in the process.

They have to be searched for: nothing leads from a node of a graph to its tensor, nor
from a ``.grad`` to the tensor it belongs to.
"""

import gc
from typing import Any

from torch import Tensor

from gradlib.private.modes import no_function_modes


def retaining() -> list[Tensor]:
    """Return every non-leaf tensor that ``retain_grad()`` was called on."""
    # By type(), not isinstance(): a proxy may run anything when asked for its class.
    # Each object is looked up only once, as there are many.
    kinds = _with_subclasses(Tensor)
    tensors = (it for it in gc.get_objects() if type(it) in kinds)
    with no_function_modes():
        return [it for it in tensors if _retains_grad(it)]


def _with_subclasses(kind: type[Any]) -> set[type[Any]]:
    return {kind}.union(*map(_with_subclasses, kind.__subclasses__()))


def _retains_grad(tensor: Tensor) -> bool:
    try:
        return tensor.retains_grad
    except RuntimeError:  # torch has taken away the tensor behind this object
        return False
