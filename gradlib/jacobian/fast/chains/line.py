"""Straight lines: the layers that x goes through, one after the other."""

import sys
from collections.abc import Callable
from types import FunctionType, MethodType
from typing import Any, cast

import torch
from torch import Tensor, nn

from gradlib.jacobian.fast.chains.layers import CODE, IDLE
from gradlib.jacobian.fast.chains.stand_ins import (
    VIEWED,
    Place,
    StandIn,
    UnknownError,
    called,
    real_of,
)
from gradlib.private import is_plain_module, own_children


def layers_of(fn: Callable[..., Any], x: Tensor) -> list[Any] | None:
    """Return the layers that a function of x goes through, or ``None``.

    They are modules, by their exact type and with no hook on them; where there is no
    module for what is done, a `Layer`; and `SQUEEZED`. A module of one's own, or a
    function, says in its code which they are.

    Args:
        fn: The function, or module.
        x: What it would be called with.
    """
    try:
        if isinstance(fn, nn.Module):
            found = _of_module(fn, len(x))
        else:
            found = _in_code(fn, len(x))
    except Exception:  # somebody's code may raise anything where it is not at home
        return None
    return found if _can_be_viewed(found, x) else None


def _of_module(module: nn.Module, samples: int) -> list[Any]:
    kind = type(module)
    if not is_plain_module(module):
        raise UnknownError("a hook is on it")
    code: Any = CODE.get(kind)
    if code is None:
        return _in_code(MethodType(kind.forward, module), samples)
    if code is not kind.forward:
        raise UnknownError("somebody has put something else there")
    if kind in IDLE:
        if module.training and kind is not nn.Identity:
            raise UnknownError("it drops some of what it is given")
        return []
    if kind is not nn.Sequential:
        return [module]
    found: list[Any] = []
    for child in own_children(module).values():
        found += _of_module(cast(nn.Module, child), samples)
    return found


def _in_code(fn: Any, samples: int) -> list[Any]:
    """Return the layers that code goes through, run on stand-ins."""
    if type(fn) not in (FunctionType, MethodType) or sys.gettrace() is not None:
        raise UnknownError("no code, or somebody debugs it and would see stand-ins")
    start = Place([], 0, samples, _of_module)
    end = real_of(called(fn, (StandIn(start),), {}))
    if not isinstance(end, Place):
        raise UnknownError("it returns something else")
    end.require_last()
    return end.line


def _can_be_viewed(layers: list[Any], x: Tensor) -> bool:
    """Tell whether torch views tensors as flat here: it does so in one layout only."""
    if all(it is not VIEWED for it in layers):
        return True
    weights = [it.weight for it in layers if isinstance(it, nn.Conv2d)]
    # Not is_contiguous(): with one channel that says nothing.
    return all(
        it.stride() == torch.empty(it.shape, device="meta").stride()
        for it in (x, *weights)
    )
