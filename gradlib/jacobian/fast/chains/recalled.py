"""Chains that were found before: of the same code and layers, as they are now.

Of a module, or of the code of a function, it is kept how chains were found, from its
second call on. At each later one all that is read again, and where anything is not as
it was, the chain is found anew. Nothing of a net itself is kept.
"""

from collections.abc import Callable
from contextlib import suppress
from functools import partial
from types import FunctionType, MethodType
from typing import Any
from weakref import ref

from torch import Tensor, nn

from gradlib.jacobian.fast.chains.chain import Chain, found_on, is_for_chains
from gradlib.jacobian.fast.chains.forms import ChainForm, form_of, of_form
from gradlib.jacobian.fast.chains.line import ERRORS, is_debugged
from gradlib.jacobian.fast.chains.noted import noting
from gradlib.jacobian.fast.chains.witnesses import Witnesses

MOST = 4
"""How many forms are kept of a module, or of code: as of batches of several sizes."""

TRIES = 8
"""How many forms are noted until one must have been met again."""


class _Known:
    """What is known of a module, or of code.

    Attributes:
        of: The module, or code, weakly.
        is_chain: Whether it was one when it was called last.
        forms: The forms that were met, the last one first.
        tries: How many more may be noted.
    """

    __slots__ = ("forms", "is_chain", "of", "tries")

    def __init__(self, of: "ref[Any]") -> None:
        self.of = of
        self.is_chain = False
        self.forms: tuple[ChainForm, ...] = ()
        self.tries = TRIES


_known: dict[int, _Known] = {}


def chain_of(fn: Callable[..., Any], inputs: tuple[Any, ...]) -> Chain | None:
    """Return the chain that a function is, or ``None`` if it is something else.

    Args:
        fn: The function.
        inputs: What it would be called with.
    """
    if not is_for_chains(inputs):
        return None
    x = inputs[0]
    known = _known_of(fn)
    if known is None or is_debugged():
        return _traced(fn, x)
    return recalled(known, fn, x) or _found(known, fn, x)


def recalled(known: _Known, fn: Any, x: Tensor) -> Chain | None:
    """Return the chain that a function is, if it is of a form that was met before.

    Args:
        known: What is known of it.
        fn: The function.
        x: What it would be called with.
    """
    for form in known.forms:
        try:
            chain = of_form(form, fn, x)
        except ERRORS:  # what was read is not there any more
            continue
        if chain is not None:
            known.tries = TRIES
            return chain
    return None


def _found(known: _Known, fn: Any, x: Tensor) -> Chain | None:
    """Find a chain, and note how, if it was one before and may be met again."""
    if known.is_chain and known.tries > 0:
        chain = _noted(known, fn, x)
    else:
        if known.tries <= 0:
            known.forms = ()
        chain = _traced(fn, x)
    known.is_chain = chain is not None
    return chain


def _traced(fn: Any, x: Tensor) -> Chain | None:
    """Find a chain, and note nothing."""
    found = found_on(fn, x)
    return None if found is None else found[0]


def _noted(known: _Known, fn: Any, x: Tensor) -> Chain | None:
    """Find a chain, and note how."""
    seen = Witnesses(fn)
    with noting(seen):
        found = found_on(fn, x)
    if found is None:
        return None
    chain, layers = found
    known.tries -= 1
    with suppress(*ERRORS):  # it has no option of that name
        form = form_of(seen, layers, chain)
        if form is not None:
            known.forms = form, *known.forms[: MOST - 1]
    return chain


def _known_of(fn: Any) -> _Known | None:
    """Return what is known of a function; ``None`` if it is no function."""
    of = fn
    if not issubclass(type(fn), nn.Module):  # whatever it says it is
        if type(fn) is MethodType:
            fn = fn.__func__
        if type(fn) is not FunctionType:
            return None
        of = fn.__code__
    key = id(of)
    known = _known.get(key)
    if known is None or known.of() is not of:
        known = _known[key] = _Known(ref(of, partial(_forget, key)))
    return known


def _forget(key: int, of: "ref[Any]") -> None:
    known = _known.get(key)
    if known is not None and known.of is of:
        del _known[key]
