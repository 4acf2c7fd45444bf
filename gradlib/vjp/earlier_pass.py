"""The backward pass that the source has before the failed one."""

import ast
from collections.abc import Sequence
from contextlib import suppress
from types import ModuleType, NoneType
from typing import Any, NamedTuple, cast

from torch import Tensor
from torch.autograd.graph import Node

from gradlib.edges import nodes_behind
from gradlib.private.nodes import leaf_of
from gradlib.vjp.arguments import Arguments
from gradlib.vjp.source import Position, Site, call_at, position_of, text_of, value_of
from gradlib.vjp.spelling import own_names

# Functions that run a pass; one more positional argument may be retain_graph.
_POSITIONS = {"backward": 1, "grad": 3}
_RETAINING = {"retain_graph", "create_graph"}


class EarlierPass(NamedTuple):
    """An earlier call as it should have been.

    Attributes:
        output: The variable that the pass goes back from.
        code: The call, with ``retain_graph=True``.
    """

    output: str
    code: str


def earlier_pass(arguments: Arguments) -> EarlierPass | None:
    """Return the last earlier pass that may have freed the graph of a call.

    One from the same variable is preferred: it went through all of the graph.

    Returns:
        ``None`` where the same function has none, or its source cannot be read.
    """
    site = arguments.site
    if site is None:
        return None
    with suppress(Exception):  # there may be no source
        here = _end(position_of(site))
        every = {*site.frame.f_code.co_positions()}
        places = (cast(Position, it) for it in every if None not in it)
        before = (it for it in places if _end(it) < here)
        graph = _saving_nodes(arguments.outputs.values)
        ordered = sorted(before, key=_end, reverse=True)
        passes = [it for place in ordered if (it := _retaining(place, site))]
        found = [it for it in passes if _may_free(it, graph, site)]
        own = own_names(arguments, "y")
        of_own = (it for it in found if it.output in own)
        return next(of_own, None) or next(iter(found), None)
    return None


def _may_free(earlier: EarlierPass, graph: set[Node], site: Site) -> bool:
    """Tell whether a pass may have gone through a part of a graph."""
    output = value_of(ast.Name(earlier.output), site.frame)
    if not isinstance(output, Tensor):
        # An output may be a number by now; an object that runs passes is no output.
        return isinstance(output, int | float | NoneType)
    if output.grad_fn is None:
        return True
    return bool(_saving_nodes([output]) & graph)


def _saving_nodes(outputs: Sequence[Any]) -> set[Node]:
    """Return the nodes of a graph except those of leaves, which save nothing."""
    return {node for node in nodes_behind(outputs) if leaf_of(node) is None}


def _end(position: Position) -> tuple[int, int]:
    _, line, _, column = position
    return line, column


def _retaining(position: Position, site: Site) -> EarlierPass | None:
    """Return the call at a position as it should have been, if it is a pass."""
    with suppress(Exception):  # most positions hold no call
        call, lines = call_at(position, site)
        output = call.args[0] if call.args else None
        if isinstance(call.func, ast.Attribute) and call.func.attr == "backward":
            owner = call.func.value
            if not isinstance(value_of(owner, site.frame), ModuleType):
                output = owner
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
