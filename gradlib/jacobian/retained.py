"""The ``.grad`` that ``retain_grad()`` fills, which is not ours to fill.

A backward pass for a Jacobian is nobody's `backward()`, and may hold batched values
that nobody can read afterwards.
"""

import threading
from collections.abc import (
    Callable,
    Generator,
    Iterable,
    MutableMapping,
    Sequence,
)
from contextlib import contextmanager, suppress
from functools import cache, partial, wraps
from typing import Any, cast

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.weak import WeakIdKeyDictionary

from gradlib.jacobian.zeros import ZerosWrittenOut
from gradlib.private.compiling import never_compiled
from gradlib.retaining import retaining


@contextmanager
def retaining_noted() -> Generator[list[Tensor]]:
    """Give the list of the tensors whose ``retain_grad()`` is called meanwhile."""
    _be_told()
    notes: list[Tensor] = []
    with _lock:
        _everybodys.append(notes)
    try:
        yield notes
    finally:
        with _lock:
            _everybodys[:] = [it for it in _everybodys if it is not notes]


@contextmanager
def grads_kept(tensors: Iterable[Tensor]) -> Generator[None]:
    """Put the ``.grad`` back of those tensors that retain it."""
    before = [(it, it.grad) for it in tensors if it.retains_grad]
    with _put_back(before):
        yield


def drop_filled() -> None:
    """Drop what a batched pass filled: those values are gone, and the next adds."""
    for before in _here.kept:
        for tensor, _ in before:
            tensor.grad = None


@contextmanager
def grads_between_kept(
    outputs: Sequence[Tensor], inputs: Sequence[Tensor]
) -> Generator[None]:
    """Put the ``.grad`` back of every tensor between two that retains it.

    It takes one backward pass, which looks for them.
    """
    vectors = [torch.ones_like(it) for it in outputs]
    filled = _Filled()
    before: list[tuple[Tensor, Tensor | None]] = []
    with _put_back(before):
        try:
            # Of what goes wrong the next pass says more.
            with suppress(RuntimeError), filled, ZerosWrittenOut():
                torch.autograd.grad(
                    outputs, inputs, vectors, retain_graph=True, allow_unused=True
                )
        finally:
            before += filled.before()  # the next pass fills it anew
        yield


@contextmanager
def _put_back(before: Sequence[tuple[Tensor, Tensor | None]]) -> Generator[None]:
    """Put back what the ``.grad`` of each tensor was."""
    _here.kept.append(before)
    try:
        yield
    finally:
        _here.kept.pop()
        for tensor, grad in before:
            tensor.grad = grad


class _Here(threading.local):
    """What is put back in this thread, by the contexts that are open."""

    def __init__(self) -> None:
        super().__init__()
        self.kept: list[Sequence[tuple[Tensor, Tensor | None]]] = []


_here = _Here()


class _Filled(TorchDispatchMode):
    """Sees in a backward pass what becomes somebody's ``.grad``.

    Autograd puts a copy of the gradient there, or the sum of it and what was there. Of
    all copies and sums these alone are alive afterwards.
    """

    def __init__(self) -> None:
        cast(Any, super()).__init__()
        # What may have been there before, by what may be there now.
        self._were: MutableMapping[Tensor, Tensor | None] = WeakIdKeyDictionary()

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is _CLONE:
            self._were[result] = None
        elif func is _ADD and args[0] not in self._were:  # that is of this pass
            self._were[result] = args[0]
        return result

    def before(self) -> list[tuple[Tensor, Tensor | None]]:
        """Return the tensors that had theirs filled, each with what it had before."""
        found = dict(self._were.items())
        if not found:
            return []
        own = {id(now): were for now, were in found.items()}
        return [(it, own[id(it.grad)]) for it in retaining() if id(it.grad) in own]


_CLONE, _ADD = torch.ops.aten.clone.default, torch.ops.aten.add.Tensor


# Autograd tells nobody which tensors these are, so the method says it. Calls may be
# nested, and run in several threads.
_everybodys: list[list[Tensor]] = []
_lock = threading.Lock()
_retain_grad = cast(Any, Tensor).retain_grad


@cache
def _be_told() -> None:
    """Have ``retain_grad()`` tell us, from now on.

    It is not put back after each call: a class that has changed a thousand times has
    slow attributes for good, from Python 3.13 on.
    """
    cast(Any, Tensor).retain_grad = _noted


@partial(never_compiled, because="gradlib notes which tensors retain their gradients")
@wraps(_retain_grad)  # who asks for help finds torch's own
def _noted(tensor: Tensor) -> None:
    _retain_grad(tensor)
    for notes in _everybodys:
        notes.append(tensor)
