"""The backward pass that stands before another one in the source."""

import ast
from contextlib import suppress
from typing import NamedTuple

from gradlib.vjp.written import Position, Site, call_at, position_of, text_of

# Calls of these run a pass; with more arguments by position, others are among them.
_POSITIONS = {"backward": 1, "grad": 3}
_RETAINING = {"retain_graph", "create_graph"}


class EarlierPass(NamedTuple):
    """A call as it should have been.

    Attributes:
        output: The variable that holds what it goes back from.
        code: The call, with ``retain_graph=True``.
    """

    output: str
    code: str


def earlier_pass(site: Site | None) -> EarlierPass | None:
    """Return the pass that the caller wrote last before the one of a call.

    Returns:
        ``None`` where there is none in the same function, or it cannot be read.
    """
    if site is None:
        return None
    with suppress(Exception):  # as there may be no source
        here = _end(position_of(site))
        places = {*site.frame.f_code.co_positions()}
        before = (it for it in places if None not in it and _end(it) < here)
        for place in sorted(before, key=_end, reverse=True):
            if (found := _retaining(place, site)) is not None:
                return found
    return None


def _end(position: Position) -> tuple[int, int]:
    _, line, _, column = position
    return line or 0, column or 0


def _retaining(position: Position, site: Site) -> EarlierPass | None:
    """Return the call at a place as it should have been, if it is a pass."""
    with suppress(Exception):  # mostly there is no call
        call, lines = call_at(position, site)
        output = call.args[0] if call.args else None
        if isinstance(call.func, ast.Attribute) and call.func.attr == "backward":
            output = call.func.value
        if isinstance(output, ast.Name) and _runs(call):
            given = text_of(call, lines).removesuffix(")").rstrip(", ")
            separator = "" if given.endswith("(") else ", "
            return EarlierPass(output.id, f"{given}{separator}retain_graph=True)")
    return None


def _runs(call: ast.Call) -> bool:
    """Tell whether a call may be a pass that frees the graph."""
    name = getattr(call.func, "attr", getattr(call.func, "id", ""))
    if any(it.arg is None or it.arg in _RETAINING for it in call.keywords):
        return False
    if any(isinstance(it, ast.Starred) for it in call.args):
        return False
    return len(call.args) <= _POSITIONS.get(name, -1)
