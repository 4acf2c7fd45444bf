"""Finds the line of layers that an input x goes through, one after the other."""

import sys
from collections.abc import Callable
from operator import getitem
from typing import Any

import torch
from torch import Tensor, nn

from gradlib.jacobian.fast.chains.axes import VIEWED
from gradlib.jacobian.fast.chains.layers import IDLE, every
from gradlib.jacobian.fast.chains.noted import length, note
from gradlib.jacobian.fast.chains.own import KNOWN, is_own_layer
from gradlib.jacobian.fast.chains.place import Place, start
from gradlib.jacobian.fast.chains.rebound import UnknownError
from gradlib.jacobian.fast.chains.shapes import Shape, shape_after
from gradlib.jacobian.fast.chains.stand_ins import (
    StandIn,
    attribute,
    called,
    real_of,
)
from gradlib.private.modules import is_plain_module, own_children


def layers_of(fn: Callable[..., Any], x: Tensor) -> list[Any]:
    """Return the layers that a function takes x through.

    They are modules without hooks, known by their exact type, or the classes of
    `layers` for operations without a module. Those of a custom module, or a function,
    are found by running its code on stand-ins.

    Args:
        fn: The function, or module.
        x: Its input, ``(batch, *in)``.

    Raises:
        Exception: One of `ERRORS`: it does something else.
    """
    if isinstance(fn, nn.Module):
        layers = _of_module(fn, x.shape, x.dtype)
    else:
        layers = _in_code(fn, x.shape, x.dtype)
    if VIEWED in every(layers) and not _can_be_viewed(layers, x):
        raise UnknownError("torch refuses this view")
    return layers


# Layers without the user's code, which may ask for the shape of its input.
_WITHOUT_CODE = KNOWN - {nn.Sequential}

ERRORS = (
    *(UnknownError, ArithmeticError, AssertionError, AttributeError, ImportError),
    *(LookupError, NameError, RecursionError, TypeError, ValueError),
)
"""The errors of code run on stand-ins, and of layers that the user has changed.

Any other error is the user's own, as from a signal handler.
"""


def _of_module(module: nn.Module, shape: Shape, dtype: torch.dtype) -> list[Any]:
    kind = type(module)
    is_plain = _is_plain(module)
    note(_is_plain, module, None, is_plain)
    if not is_plain:
        raise UnknownError("a hook is on it")
    if kind not in KNOWN:
        # The code of torch's other modules names no layers. Subclasses of Linear may
        # keep their weights elsewhere, as those of low rank or few bits do.
        is_of_torch = _is_of_torch(module)
        note(_is_of_torch, module, None, is_of_torch)
        if is_of_torch or isinstance(module, nn.Linear):
            raise UnknownError("this layer is not known")
        return _in_code(real_of(attribute(module, "forward")), shape, dtype)
    if not is_own_layer(kind):
        raise UnknownError("somebody has put something else there")
    if kind in IDLE:
        if kind is not nn.Identity:
            note(getattr, module, "training", module.training)
            if module.training:
                raise UnknownError("it drops some of what it is given")
        return []
    if kind is not nn.Sequential:
        return [module]
    layers: list[Any] = []
    passed = 0  # `shape` is that after this many layers
    children = _children(module)
    note(_children, module, None, children)
    note(length, children, None, len(children))
    for number, child in enumerate(children):
        note(getitem, children, number, child)
        if type(child) not in _WITHOUT_CODE:
            after, passed = shape_after(layers[passed:], shape), len(layers)
            if after is None:
                raise UnknownError("its input has a shape that is not known")
            shape = after
        layers += _of_module(child, shape, dtype)
    return layers


def _is_plain(module: nn.Module, _: None = None) -> bool:
    return is_plain_module(module)


def _is_of_torch(module: nn.Module, _: None = None) -> bool:
    return type(module).__module__.startswith("torch.nn.")


def _children(module: nn.Module, _: None = None) -> list[Any]:
    return [*own_children(module).values()]


def _in_code(fn: Any, shape: Shape, dtype: torch.dtype) -> list[Any]:
    """Return the layers that a function goes through, by running it on stand-ins."""
    if is_debugged():
        raise UnknownError("somebody debugs it, and would see stand-ins")
    x = StandIn(start(shape, dtype, _of_module))
    end = real_of(called(fn, (x,), {}))
    if not isinstance(end, Place):
        raise UnknownError("it returns something else")
    return end.line()


def is_debugged() -> bool:
    """Tell whether a debugger or tracer runs, which would show stand-ins."""
    monitoring: Any = vars(sys).get("monitoring")  # since Python 3.12
    tool = monitoring and monitoring.get_tool(monitoring.DEBUGGER_ID)
    return sys.gettrace() is not None or tool is not None


def _can_be_viewed(layers: list[Any], x: Tensor) -> bool:
    """Tell whether torch can view all tensors as flat: it can in one layout only."""
    weights = [it.weight for it in every(layers) if isinstance(it, nn.Conv2d)]
    # Not is_contiguous(): with one channel that does not tell.
    return all(
        it.stride() == torch.empty(it.shape, device="meta").stride()
        for it in (x, *weights)
    )
