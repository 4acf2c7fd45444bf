"""What cut the graph of an output, as the source before the call shows."""

import ast
import re
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from types import FrameType
from typing import Any, NamedTuple, cast

from torch import nn

from gradlib.tree import tensors_in
from gradlib.vjp.arguments import Arguments
from gradlib.vjp.connection import LEADS_NOWHERE
from gradlib.vjp.spelling import LONGEST, expression_of
from gradlib.vjp.written import Site, position_of, tree_of, value_of

_DETACHED = "Leave it out on the way from the input to the output."
_NO_DERIVATIVE = "It has no derivative. Compute the output with operations on floats."
_NOT_RECORDED = "Compute the output outside of that, where gradients are recorded."

_FUNCTIONS = {
    **dict.fromkeys(("tensor", "Tensor", "FloatTensor"), LEADS_NOWHERE),
    **dict.fromkeys(("float", "int"), _DETACHED),
}
_ATTRIBUTES = {
    **dict.fromkeys(("tensor", "Tensor", "FloatTensor"), LEADS_NOWHERE),
    **dict.fromkeys(("data", "detach", "item", "numpy", "tolist"), _DETACHED),
    **dict.fromkeys(("argmax", "argmin", "argsort", "bool", "int"), _NO_DERIVATIVE),
    **dict.fromkeys(("eq", "ge", "gt", "le", "long", "lt", "ne"), _NO_DERIVATIVE),
}
_MODE = re.compile(r"\b(no_grad|inference_mode|set_grad_enabled\(False|enable_grad)\b")


class Cut(NamedTuple):
    """What cut a graph.

    Attributes:
        text: As it is written.
        intent: What to do instead.
    """

    text: str
    intent: str


@dataclass(frozen=True, eq=False)
class _Step:
    """A line that gives variables a value, or the call.

    Attributes:
        line: Where it is.
        names: Of the variables.
        value: What they are given.
        mode: What switches gradients off there, as it is written, or ``""``.
    """

    line: int
    names: frozenset[str]
    value: ast.expr
    mode: str


def cut_of(arguments: Arguments) -> Cut | None:
    """Return what cut the graph of the outputs of a call, as the source shows.

    It is something without a derivative, of what requires grad. Where an output was
    computed from several things, another may be the one that should require grad.

    Returns:
        ``None`` where nothing is found, or the source cannot be read.
    """
    site, written = arguments.site, expression_of(arguments, "y")
    if site is None or written is None:
        return None
    with suppress(Exception):  # as there may be no source
        return _nearest(written.node, site)
    return None


def _nearest(output: ast.expr, site: Site) -> Cut | None:
    """Return the cut that is nearest to the call."""
    line, _, _, _ = position_of(site)
    assert line is not None
    statements = [*_statements(site.frame)]
    mode = next((mode for it, mode in statements[::-1] if it.lineno <= line), "")
    steps = [it for it in _steps(statements) if it.line <= line]
    call = _Step(line + 1, frozenset(), output, mode)
    for step in _behind(call, steps):
        for part in ast.walk(step.value):
            intent, of_part = _intent(part), replace(step, value=cast(Any, part))
            if intent and _requires_grad(of_part, steps, site.frame):
                text = ast.unparse(part)
                return Cut(text, intent) if len(text) <= LONGEST else None
        if step.mode and _requires_grad(step, steps, site.frame):
            return Cut(step.mode, _NOT_RECORDED)
    return None


def _intent(node: ast.AST) -> str:
    """Return what to do instead of an expression without a derivative, or ``""``."""
    match node:
        case ast.Compare():
            return _NO_DERIVATIVE
        case ast.Call(func=ast.Name(id=name)):
            return _FUNCTIONS.get(name, "")
        case ast.Call(func=ast.Attribute(attr=name)):
            return _ATTRIBUTES.get(name, "")
        case ast.Attribute(attr="data"):
            return _ATTRIBUTES["data"]
        case _:
            return ""


def _requires_grad(step: _Step, steps: Sequence[_Step], frame: FrameType) -> bool:
    """Tell whether something that a value was computed from requires grad."""
    every = _behind(step, steps)
    names = {name for it in every for name in _names(it.value)}
    return any(_holds_grad(_value_of(name, frame)) for name in names)


def _value_of(name: str, frame: FrameType) -> object:
    variable, _, attribute = name.partition(".")
    value = value_of(ast.Name(variable), frame)
    return getattr(value, "__dict__", {}).get(attribute) if attribute else value


def _holds_grad(value: object) -> bool:
    if isinstance(value, nn.Module):
        return any(it.requires_grad for it in value.parameters())
    return any(it.requires_grad for it in tensors_in(value))


def _behind(last: _Step, steps: Sequence[_Step]) -> Iterator[_Step]:
    """Give a step, and those before it that its value was computed by, the last first.

    Args:
        last: Where to begin.
        steps: Those of the same code, in order.
    """
    waiting, seen = deque([last]), {last}
    while waiting:
        step = waiting.popleft()
        yield step
        for name in _names(step.value):
            before = (it for it in reversed(steps) if it.line < step.line)
            made = next((it for it in before if name in it.names), None)
            if made is not None and made not in seen:
                seen.add(made)
                waiting.append(made)


def _names(node: ast.AST) -> Iterator[str]:
    """Give the variables of an expression, and attributes, as ``"self.net"``."""
    for it in ast.walk(node):
        match it:
            case ast.Name(id=name):
                yield name
            case ast.Attribute(value=ast.Name(id=owner), attr=name):
                yield f"{owner}.{name}"
            case _:
                pass


def _set_by(targets: Sequence[ast.expr]) -> frozenset[str]:
    """Return what is given a value, of an object the attribute alone."""
    names = [name for it in targets for name in _names(it)]
    owners = {name.partition(".")[0] for name in names if "." in name}
    return frozenset(names) - owners


def _steps(statements: Sequence[tuple[ast.stmt, str]]) -> Iterator[_Step]:
    """Give the statements that give variables a value, or a list one entry more."""
    for it, mode in statements:
        match it:
            case ast.Assign(targets=targets, value=value):
                pass
            case ast.AnnAssign(target=target, value=ast.expr() as value):
                targets = [target]
            case ast.AugAssign(target=target, op=op, value=added):
                targets, value = [target], ast.BinOp(target, op, added)
            case ast.For(target=target, iter=value):
                targets = [target]
            case ast.Expr(
                value=ast.Call(func=ast.Attribute(attr="append") as f, args=[value])
            ):
                targets = [f.value]
            case _:
                continue
        yield _Step(it.lineno, _set_by(targets), value, mode)


def _statements(frame: FrameType) -> Iterator[tuple[ast.stmt, str]]:
    """Give the statements that a frame runs, in order, and the mode each is in."""
    tree = tree_of(frame)
    yield from _inside(tree, _mode_of(getattr(tree, "decorator_list", []), ""))


def _inside(node: ast.AST, mode: str) -> Iterator[tuple[ast.stmt, str]]:
    for it in ast.iter_child_nodes(node):
        if isinstance(it, ast.stmt):
            yield it, mode
        if not isinstance(it, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            items = [each.context_expr for each in getattr(it, "items", [])]
            yield from _inside(it, _mode_of(items, mode))


def _mode_of(expressions: Sequence[ast.expr], around: str) -> str:
    """Return what switches gradients off, by what is written last."""
    for it in expressions:
        if found := _MODE.search(text := ast.unparse(it)):
            around = "" if found[1] == "enable_grad" else text
    return around
