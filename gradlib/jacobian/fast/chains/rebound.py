"""Rebuilds a function around stand-ins: same code, other globals and closure."""

import builtins
import dis
from collections.abc import Callable
from contextlib import suppress
from functools import lru_cache
from operator import getitem
from types import CellType, CodeType, FunctionType
from typing import Any

from gradlib.jacobian.fast.chains.noted import Read, note, note_own


class UnknownError(Exception):
    """Code does something that is not known of chains."""


BUILTINS: dict[str, Any] = {
    it.__name__: it
    for it in (
        *(abs, all, any, bool, enumerate, float, getattr, int, len, list),
        *(max, min, range, reversed, round, str, sum, tuple, zip),
    )
}
"""The builtins that code may use, as of import: they only compute."""


def rebound(
    function: FunctionType, known: Callable[[Any], Any], found: Callable[..., Any]
) -> FunctionType:
    """Return a function with the same code that reaches only stand-ins.

    Args:
        function: The user's function.
        known: A function from a value to its stand-in; raises `UnknownError` where
            there is none.
        found: The function that stands for ``getattr``.

    Raises:
        UnknownError: Its code may do, or ask, what stand-ins cannot answer.
    """
    code, outside = function.__code__, function.__globals__
    names = _names(code)
    # Its builtins may be others, as for a function made by exec().
    are_own = function.__builtins__ is builtins.__dict__
    if names is None or not are_own:
        raise UnknownError("it asks or does what nobody could stand in for")

    def of(owner: Any, read: Read, name: Any) -> Any:
        value = read(owner, name)
        stands = known(value)
        note(read, owner, name, value)
        return stands

    scope: dict[str, Any] = {"__builtins__": {}}
    for name in names:
        if name in outside:
            with suppress(UnknownError):  # code that uses it gets a NameError
                scope[name] = of(function, _global, name)
        elif name in BUILTINS and vars(builtins)[name] is BUILTINS[name]:
            note(_has_global, function, name, False)
            note_own(((builtins, name, BUILTINS[name]),))
            scope[name] = found if name == "getattr" else BUILTINS[name]
    cells: list[CellType] = []
    for number in range(len(function.__closure__ or ())):
        cells.append(CellType())
        with suppress(UnknownError, ValueError):  # a cell may be empty
            cells[-1].cell_contents = of(function, _in_cell, number)
    defaults = of(function, getattr, "__defaults__")
    made = FunctionType(code, scope, argdefs=defaults, closure=tuple(cells))
    given = function.__kwdefaults__
    note(getattr, function, "__kwdefaults__", given)
    if given is not None:
        made.__kwdefaults__ = {name: of(given, getitem, name) for name in given}
    return made


def _global(function: FunctionType, name: str) -> Any:
    return function.__globals__[name]


def _has_global(function: FunctionType, name: str) -> bool:
    return name in function.__globals__


def _in_cell(function: FunctionType, number: int) -> Any:
    cells = function.__closure__
    assert cells is not None, "its code has some"
    return cells[number].cell_contents


_REFUSED = {
    # These ask for an object's identity or class, which stand-ins do not have.
    *("IS_OP", "MATCH_SEQUENCE", "MATCH_MAPPING", "MATCH_CLASS"),
    # These handle errors, which may be ours here, or run code later.
    *("PUSH_EXC_INFO", "RETURN_GENERATOR"),
    *("STORE_GLOBAL", "DELETE_GLOBAL"),
}
_OF_CELLS = ("STORE_DEREF", "DELETE_DEREF")


@lru_cache(maxsize=4096)
def _names(code: CodeType) -> frozenset[str] | None:
    """Return the names that code, and code inside it, uses; ``None`` if refused.

    The result is kept for each code, as reading instructions is slow.
    """
    names = set(code.co_names)
    for it in dis.get_instructions(code):
        if it.opname in _REFUSED:
            return None
        if it.opname in _OF_CELLS and it.argval in code.co_freevars:
            return None
    for it in code.co_consts:
        if isinstance(it, CodeType):
            inner = _names(it)
            if inner is None:
                return None
            names |= inner
    return frozenset(names)
