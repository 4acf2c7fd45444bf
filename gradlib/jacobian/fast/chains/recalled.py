"""Finds chains again by repeating the readings that found them before.

From the second call on of a module, or of a function's code, the readings that found
its chain, or that it is none, are kept. Each later call repeats them; where any gives
something else, the chain is found anew. No module or tensor of a net is kept.
"""

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from types import FunctionType, MethodType
from typing import Any
from weakref import ref

from torch import Tensor, nn

from gradlib.jacobian.fast.chains.assembled import found_on, is_for_chains
from gradlib.jacobian.fast.chains.chain import Chain
from gradlib.jacobian.fast.chains.forms import ChainForm, form_of, refusal_of, values_of
from gradlib.jacobian.fast.chains.line import ERRORS, is_debugged
from gradlib.jacobian.fast.chains.noted import noting
from gradlib.jacobian.fast.chains.witnesses import Witnesses

MOST = 4
"""How many forms are kept for a module, or code, as for several batch sizes."""

TRIES = 8
"""How many forms are noted before one must be met again, or noting stops."""

UNREADABLE = (*ERRORS, RuntimeError)
"""The errors of reading what is gone by now, or the shape of a nested tensor."""


@dataclass(slots=True, eq=False)
class _Known:
    """What is known of a module, or of code.

    Attributes:
        of: A weak reference to the module, or code.
        tries: How many more forms may be noted.
        is_met: Whether it was called before.
        forms: The forms that were met, the last one first.
        refusals: The same for calls that were no chain.
    """

    of: "ref[Any]"
    tries: int
    is_met: bool = False
    forms: tuple[ChainForm, ...] = ()
    refusals: tuple[ChainForm, ...] = ()


_known: dict[int, _Known] = {}


def chain_of(fn: Callable[..., Any], inputs: tuple[Any, ...]) -> Chain | None:
    """Return the chain that a function is, or ``None``.

    Args:
        fn: The function.
        inputs: Its inputs.
    """
    if not is_for_chains(inputs):
        return None
    x = inputs[0]
    known = _known_of(fn)
    if known is None or is_debugged():
        return _traced(fn, x)
    return recalled(known, fn, x) or _found(known, fn, x)


def recalled(known: _Known, fn: Any, x: Tensor) -> Chain | None:
    """Return the chain that a function is, if it has a form that was met before.

    Args:
        known: What is known of the function.
        fn: The function.
        x: Its input, ``(batch, *in)``.
    """
    for form in known.forms:
        values = _read(form, fn, x)
        if values is not None and form.make is not None:
            known.tries = TRIES
            return form.make(values, x)
    return None


def _read(form: ChainForm, fn: Any, x: Tensor) -> Sequence[Any] | None:
    """Return what is read of a function, if it has a form that was met before."""
    try:
        return values_of(form, fn, x)
    except UNREADABLE:
        return None


def _found(known: _Known, fn: Any, x: Tensor) -> Chain | None:
    """Find a chain; note its readings if it is met again and tries are left."""
    if any(_read(form, fn, x) is not None for form in known.refusals):
        known.tries = TRIES
        return None
    if known.is_met and known.tries > 0:
        return _noted(known, fn, x)
    if known.tries <= 0:
        known.forms = known.refusals = ()
    known.is_met = True
    return _traced(fn, x)


def _traced(fn: Any, x: Tensor) -> Chain | None:
    """Find a chain without noting readings."""
    pair = found_on(fn, x)
    return None if pair is None else pair[0]


def _noted(known: _Known, fn: Any, x: Tensor) -> Chain | None:
    """Find a chain, and note the readings that find it."""
    seen = Witnesses(fn)
    with noting(seen):
        pair = found_on(fn, x)
    known.tries -= 1
    with suppress(*UNREADABLE):
        if pair is None:
            known.refusals = _with(refusal_of(seen, x), known.refusals)
        else:
            chain, layers = pair
            known.forms = _with(form_of(seen, layers, chain), known.forms)
    return None if pair is None else pair[0]


def _with(
    form: ChainForm | None, others: tuple[ChainForm, ...]
) -> tuple[ChainForm, ...]:
    """Return forms with one more, if there is one, and at most `MOST`."""
    return others if form is None else (form, *others[: MOST - 1])


def _known_of(fn: Any) -> _Known | None:
    """Return what is known of a module or function; ``None`` if it is neither."""
    of = fn
    if not issubclass(type(fn), nn.Module):  # isinstance() would ask its __class__
        if type(fn) is MethodType:
            fn = fn.__func__
        if type(fn) is not FunctionType:
            return None
        of = fn.__code__
    key = id(of)
    known = _known.get(key)
    if known is None or known.of() is not of:
        known = _known[key] = _Known(ref(of, partial(_forget, key)), TRIES)
    return known


def _forget(key: int, of: "ref[Any]") -> None:
    known = _known.get(key)
    if known is not None and known.of is of:
        del _known[key]
