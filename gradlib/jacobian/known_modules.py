"""Finds the modules that a function may call, from its code and what it holds."""

from collections.abc import Iterable, Sequence
from functools import partial
from types import CellType, CodeType, FunctionType, MethodType
from typing import Any, cast

from torch import nn

from gradlib.opaque import is_module
from gradlib.private.modules import torchs_own

MANY = 1000
"""How many objects are searched for modules; a list that holds more may be data."""


def modules_known_to(fn: object) -> list[nn.Module]:
    """Return the modules that a function may call, without calling it."""
    known: list[object] = [fn]
    seen: set[int] = set()
    for it in known:  # the list grows meanwhile
        if id(it) not in seen and len(seen) < MANY:
            seen.add(id(it))
            known += _named_in(it)
    known += [inner for it in known for inner in _held(it)]
    return [it for it in known if is_module(it)]


def _named_in(function: object) -> list[object]:
    """Return the objects that a function names, or a partial or method holds.

    A function of torch names none.
    """
    if isinstance(function, partial):
        return [function.func, *function.args, *function.keywords.values()]
    if isinstance(function, MethodType):
        return [function.__self__, function.__func__]
    if not isinstance(function, FunctionType) or torchs_own(function) is function:
        return []
    cells = function.__closure__ or ()
    enclosed = [it.cell_contents for it in cells if _is_filled(it)]
    names = _names_of(function.__code__)
    return enclosed + [function.__globals__.get(name) for name in names]


def _names_of(code: CodeType) -> list[str]:
    """Return the names that code uses, those in functions it defines included."""
    inner = [it for it in code.co_consts if isinstance(it, CodeType)]
    return [*code.co_names, *(name for it in inner for name in _names_of(it))]


def _held(value: object) -> Iterable[object]:
    """Return what a list, tuple or dict holds, such as the members of an ensemble."""
    if isinstance(value, dict):
        value = [*cast("dict[Any, object]", value).values()]
    if not isinstance(value, list | tuple):
        return ()
    held = cast("Sequence[object]", value)
    return held if len(held) <= MANY else ()


def _is_filled(cell: CellType) -> bool:
    try:
        return cell.cell_contents is not None
    except ValueError:
        return False
