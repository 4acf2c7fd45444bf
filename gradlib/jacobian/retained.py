"""Keeps the ``.grad`` of tensors that called ``retain_grad()`` as it was.

Passes for a Jacobian fill it, though the user called no ``backward()``, and maybe with
batched values that cannot be read afterwards.
"""

import threading
from collections.abc import (
    Callable,
    Generator,
    Iterable,
    MutableMapping,
    Sequence,
)
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
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
    """Give a list, which fills with tensors as their ``retain_grad()`` is called."""
    _patch_retain_grad()
    notes: list[Tensor] = []
    with _lock:
        _open_notes.append(notes)
    try:
        yield notes
    finally:
        with _lock:
            _open_notes[:] = [it for it in _open_notes if it is not notes]


def grads_kept(tensors: Iterable[Tensor]) -> AbstractContextManager[None]:
    """Restore the ``.grad`` of those of the tensors that retain it."""
    before = [(it, it.grad) for it in tensors if it.retains_grad]
    return _put_back(before) if before else nullcontext()


def drop_filled() -> None:
    """Drop what a batched pass filled, which cannot be read nor added to."""
    for before in _here.kept:
        for tensor, _ in before:
            tensor.grad = None


@contextmanager
def grads_between_kept(
    outputs: Sequence[Tensor], inputs: Sequence[Tensor]
) -> Generator[None]:
    """Restore the ``.grad`` of every tensor between outputs and inputs that retains it.

    One backward pass finds these tensors.
    """
    vectors = [torch.ones_like(it) for it in outputs]
    filled = _Filled()
    before: list[tuple[Tensor, Tensor | None]] = []
    with _put_back(before):
        try:
            # The next pass raises a better error.
            with suppress(RuntimeError), filled, ZerosWrittenOut():
                torch.autograd.grad(
                    outputs, inputs, vectors, retain_graph=True, allow_unused=True
                )
        finally:
            before += filled.before()  # the next pass fills it anew
        yield


@contextmanager
def _put_back(before: Sequence[tuple[Tensor, Tensor | None]]) -> Generator[None]:
    """Restore the ``.grad`` of each tensor."""
    _here.kept.append(before)
    try:
        yield
    finally:
        _here.kept.pop()
        for tensor, grad in before:
            tensor.grad = grad


class _Here(threading.local):
    """What the open contexts of this thread will restore."""

    def __init__(self) -> None:
        super().__init__()
        self.kept: list[Sequence[tuple[Tensor, Tensor | None]]] = []


_here = _Here()


class _Filled(TorchDispatchMode):
    """Notes in a backward pass which tensors may become a ``.grad``.

    Autograd sets it to a copy of the gradient, or to the sum of the old one and the
    gradient. Of all copies and sums of the pass, only these stay alive.
    """

    def __init__(self) -> None:
        cast(Any, super()).__init__()
        # The old ``.grad``, by what may be the new one.
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
        # Else the sum is part of the pass.
        elif func is _ADD and args[0] not in self._were:
            self._were[result] = args[0]
        return result

    def before(self) -> list[tuple[Tensor, Tensor | None]]:
        """Return the tensors whose ``.grad`` was filled, each with the old one."""
        alive = dict(self._were.items())
        if not alive:
            return []
        own = {id(now): were for now, were in alive.items()}
        return [(it, own[id(it.grad)]) for it in retaining() if id(it.grad) in own]


_CLONE, _ADD = torch.ops.aten.clone.default, torch.ops.aten.add.Tensor


# Autograd has no list of these tensors, so the patched method adds each to every open
# list. Contexts may be nested, and run in several threads.
_open_notes: list[list[Tensor]] = []
_lock = threading.Lock()
_retain_grad = cast(Any, Tensor).retain_grad


@cache
def _patch_retain_grad() -> None:
    """Have ``retain_grad()`` note its tensor, from now on.

    The patch stays: from Python 3.13 on, a class that has changed a thousand times has
    slow attributes for good.
    """
    cast(Any, Tensor).retain_grad = _noted


@partial(never_compiled, because="gradlib notes which tensors retain their gradients")
@wraps(_retain_grad)  # help() shows torch's own text
def _noted(tensor: Tensor) -> None:
    _retain_grad(tensor)
    for notes in _open_notes:
        notes.append(tensor)
