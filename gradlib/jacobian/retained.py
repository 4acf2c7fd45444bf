"""The ``.grad`` that ``retain_grad()`` fills, which is not ours to fill.

A backward pass for a Jacobian is nobody's `backward()`, and may hold batched values
that nobody can read afterwards.
"""

from collections.abc import Generator, Iterable
from contextlib import contextmanager
from threading import Lock
from typing import Any, cast

from torch import Tensor


@contextmanager
def retaining_noted() -> Generator[list[Tensor]]:
    """Give the list of the tensors whose ``retain_grad()`` is called meanwhile."""
    notes: list[Tensor] = []
    kind: Any = Tensor
    with _lock:
        _everybodys.append(notes)
        kind.retain_grad = _noted
    try:
        yield notes
    finally:
        with _lock:
            _everybodys[:] = [it for it in _everybodys if it is not notes]
            if not _everybodys:
                del kind.retain_grad  # what it had inherited is there again


@contextmanager
def grads_kept(tensors: Iterable[Tensor]) -> Generator[None]:
    """Put the ``.grad`` back of those tensors that retain it."""
    before = [(it, it.grad) for it in tensors if it.retains_grad]
    try:
        yield
    finally:
        for tensor, grad in before:
            tensor.grad = grad


# Autograd tells nobody which tensors these are, so the method says it. Calls may be
# nested, and run in several threads.
_everybodys: list[list[Tensor]] = []
_lock = Lock()
_retain_grad = cast(Any, Tensor).retain_grad


def _noted(tensor: Tensor) -> None:
    _retain_grad(tensor)
    for notes in _everybodys:
        notes.append(tensor)
