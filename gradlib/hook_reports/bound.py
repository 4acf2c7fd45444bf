"""The functions that a copied module holds, made to refer to the copy."""

import weakref
from collections import OrderedDict
from contextlib import suppress
from functools import lru_cache, partial
from operator import is_
from types import CellType, FunctionType, MethodType
from typing import Any, cast

from torch import Tensor

from gradlib.opaque import is_module
from gradlib.private.hooks import FORWARD_HOOKS


def bind_functions(made: object, memo: dict[int, Any]) -> None:
    """Make the functions that a copied module or object holds refer to copies too.

    deepcopy does not copy a function, so a forward that was put into the module calls
    the original's forward. Nor does it copy a weak reference, as of a child to its
    parent.
    """
    own: Any = getattr(made, "__dict__", None)
    if not isinstance(own, dict) or isinstance(made, Tensor | FunctionType):
        return
    every: list[dict[Any, Any]] = [own]
    if is_module(made):
        every += [own[kind] for kind in FORWARD_HOOKS]
    for functions in every:
        for key, value in functions.items():
            functions[key] = _bound(value, memo)


def _bound(value: Any, memo: dict[int, Any]) -> Any:
    """Return a value that refers to copies: the value itself, if it need not change."""
    if id(value) in memo:
        return memo[id(value)]
    if isinstance(value, MethodType):
        owner = _bound(value.__self__, memo)
        return value if owner is value.__self__ else MethodType(value.__func__, owner)
    if isinstance(value, FunctionType):
        return _made_anew(value, memo)
    if isinstance(value, weakref.ref) and id(cast(Any, value)()) in memo:
        return weakref.ref(memo[id(cast(Any, value)())])
    return _opened(value, memo)


def _opened(value: Any, memo: dict[int, Any]) -> Any:
    """Return a list, dict or the like with functions in it that refer to copies."""
    parts = _parts(value)
    if not 0 < len(parts) <= MOST:
        return value
    memo[id(value)] = value  # it may hold itself
    memo.setdefault(id(memo), []).append(value)  # as deepcopy does: an id is used again
    bound = [_bound(it, memo) for it in parts]
    if not all(map(is_, bound, parts)):
        memo[id(value)] = _put_together(value, bound)
    return memo[id(value)]


def _parts(value: Any) -> list[Any]:
    kind = cast(Any, type(value))
    if kind in (list, tuple):
        return [*value]
    if kind in (dict, OrderedDict):
        return [*value.values()]
    if kind is partial:
        return [value.func, value.args, value.keywords]
    return [value.__wrapped__] if kind is _CACHE else []


def _put_together(like: Any, parts: list[Any]) -> Any:
    make = cast(Any, type(like))
    if isinstance(like, list | tuple):
        return make(parts)
    if isinstance(like, dict):
        keys = cast(dict[Any, Any], like)
        return make(zip(keys, parts, strict=True))
    if isinstance(like, partial):
        return make(parts[0], *parts[1], **parts[2])
    return lru_cache(**like.cache_parameters())(*parts)


def _made_anew(function: FunctionType, memo: dict[int, Any]) -> FunctionType:
    """Return a function that refers to copies wherever it referred to originals.

    It may refer to them in its closure, in its defaults and by global names.
    """
    closure = function.__closure__ or ()
    cells = tuple(CellType() for _ in closure)
    everywhere = _with_copies(function, memo)
    made = FunctionType(function.__code__, everywhere, function.__name__, None, cells)
    memo[id(function)] = made  # it may refer to itself
    made.__defaults__ = _bound(function.__defaults__, memo)
    made.__kwdefaults__ = _bound(function.__kwdefaults__, memo)
    vars(made).update(vars(function))
    is_same = (
        everywhere is function.__globals__
        and made.__defaults__ is function.__defaults__
        and made.__kwdefaults__ is function.__kwdefaults__
    )
    for cell, before in zip(cells, closure, strict=True):
        with suppress(ValueError):  # raised by a cell that is still empty
            held = before.cell_contents
            bound = cell.cell_contents = _bound(held, memo)
            is_same = is_same and (bound is held or bound is made)
    if is_same:  # it may be compared by identity, as functions of torch are
        memo[id(function)] = function
    return memo[id(function)]


def _with_copies(function: FunctionType, memo: dict[int, Any]) -> dict[str, Any]:
    """Return the globals for a function: its own, unless they hold originals."""
    everywhere = function.__globals__
    found = {
        name: _bound(everywhere[name], memo)
        for name in everywhere.keys() & {*function.__code__.co_names}
        if not isinstance(everywhere[name], _ANYBODYS)
    }
    if all(it is everywhere[name] for name, it in found.items()):
        return everywhere
    return {**everywhere, **found}


_ANYBODYS = FunctionType, list, tuple, dict, partial
"""Global values of these types are left alone: other code may use them too."""

_CACHE: Any = type(lru_cache(len))

MOST = 1000
"""Functions are looked for in lists, dicts and tuples of at most so many entries."""
