"""The tensors that were told to retain their grad, wherever in the process they are.

Nothing leads from a node of a graph to its tensor, nor from a ``.grad`` to its own.
"""

import gc

from torch import Tensor

from gradlib.private import no_function_modes


def retaining() -> list[Tensor]:
    """Return every tensor that ``retain_grad()`` was called of, and no leaf."""
    everything = gc.get_objects()
    # Their types, as what only stands for an object may do anything when asked for its
    # class; and each once, as there are many objects.
    kinds = {it for it in set(map(type, everything)) if issubclass(it, Tensor)}
    with no_function_modes():
        return [it for it in everything if type(it) in kinds and _retains_grad(it)]


def _retains_grad(tensor: Tensor) -> bool:
    try:
        return tensor.retains_grad
    except RuntimeError:  # it is none any more: torch has taken away what it stood for
        return False
