"""Finds what cut the graph of an output, in the source before the call."""

import ast
import re
from bisect import bisect_left
from collections import defaultdict, deque
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from types import FrameType
from typing import Any, NamedTuple, TypeAlias, cast

from torch import Tensor, nn

from gradlib.plain_tensors import is_inexact
from gradlib.private.modules import own_buffers, own_children, own_parameters
from gradlib.tree import tensors_in
from gradlib.vjp.arguments import Arguments
from gradlib.vjp.connection import LEADS_NOWHERE
from gradlib.vjp.source import Site, position_of, tree_of, value_of
from gradlib.vjp.spelling import LONGEST, expressions_by_letter

_DETACHED = "Leave it out on the way from the input to the output."
_NO_DERIVATIVE = "It has no derivative. Compute the output with operations on floats."
_OF_A_GRADIENT = "Pass create_graph=True where that gradient is computed."
_DRAWN = (
    "What is drawn has no gradient. rsample() has one, where the distribution has it. "
    "Otherwise let the loss weigh log_prob() of what was drawn."
)
_UNFROZEN = "Let requires_grad_() unfreeze what shall learn, or the input require grad."
_NOT_RECORDED = "Compute the output outside of that, where gradients are recorded."

_FUNCTIONS = {
    "grad": _OF_A_GRADIENT,
    **dict.fromkeys(("tensor", "Tensor", "FloatTensor"), LEADS_NOWHERE),
    **dict.fromkeys(("float", "int"), _DETACHED),
}
_ATTRIBUTES = {
    "grad": _OF_A_GRADIENT,
    **dict.fromkeys(("multinomial", "sample"), _DRAWN),
    **dict.fromkeys(("tensor", "Tensor", "FloatTensor"), LEADS_NOWHERE),
    **dict.fromkeys(("data", "detach", "item", "numpy", "tolist"), _DETACHED),
    **dict.fromkeys(("argmax", "argmin", "argsort", "bool", "int"), _NO_DERIVATIVE),
    **dict.fromkeys(("eq", "ge", "gt", "le", "long", "lt", "ne"), _NO_DERIVATIVE),
}
_MODE = re.compile(r"\b(no_grad|inference_mode|set_grad_enabled\(False|enable_grad)\b")


class Cut(NamedTuple):
    """What cut a graph.

    Attributes:
        what: What cut it, in words.
        intent: What to do instead.
    """

    what: str
    intent: str


@dataclass(frozen=True, eq=False)
class _Step:
    """A statement that sets variables, or the call.

    Attributes:
        place: The line and column where it begins.
        names: The variables.
        value: The expression that they are set to.
        mode: The expression that switches gradients off there, or ``""``.
    """

    place: tuple[int, int]
    names: frozenset[str]
    value: ast.expr
    mode: str


_Steps: TypeAlias = dict[str, list[_Step]]
"""For each variable, the steps that set it, in order."""


def cut_of(arguments: Arguments) -> Cut | None:
    """Return what cut the graph of the outputs of a call, as the source shows.

    A cut is an operation without a derivative, on something that requires grad. Where
    an output was computed from several things, another one may have to require grad.

    Returns:
        ``None`` where nothing is found, or the source cannot be read.
    """
    output = expressions_by_letter(arguments).get("y")
    if arguments.site is None or output is None:
        return None
    with suppress(Exception):  # there may be no source
        return _nearest(output.node, arguments.site)
    return None


def _nearest(output: ast.expr, site: Site) -> Cut | None:
    """Return the cut that is nearest to the call."""
    line, _, column, _ = position_of(site)
    place = line, column
    begun = [it for it in _statements(site.frame) if _start(it[0]) <= place]
    steps: _Steps = defaultdict(list)
    for step in _steps([it for it in begun if not _is_around(it[0], place)]):
        for name in step.names:
            steps[name].append(step)
    call = _Step(place, frozenset(), output, begun[-1][1])
    for step in _behind(call, steps):
        for part, cut in _cuts_in(step, site.frame):
            if _requires_grad(part, steps, site.frame):
                return cut
    frozen = (it for step in _behind(call, steps) for it in _frozen(step, site.frame))
    return next(frozen, None)


def _cuts_in(step: _Step, frame: FrameType) -> Iterator[tuple[_Step, Cut]]:
    """Yield what cuts a graph in a step if there is one, and the part it is done to."""
    for part in ast.walk(step.value):
        if intent := _intent(part):
            of_part = replace(step, value=cast(Any, part))
            yield of_part, _cut(_in_short(part), intent)
    if step.mode:
        yield step, _cut(step.mode, _NOT_RECORDED)
    for name in _integers(step, frame):
        yield step, _cut(name, _NO_DERIVATIVE)


def _cut(text: str, intent: str) -> Cut:
    otherwise = "If that is meant, another part should require grad."
    return Cut(f"`{text}` seems to cut its graph", f"{intent} {otherwise}")


def _start(node: ast.stmt) -> tuple[int, int]:
    return node.lineno, node.col_offset


def _is_around(node: ast.stmt, place: tuple[int, int]) -> bool:
    """Tell whether a statement that holds no others ends only after a place."""
    end = node.end_lineno or 0, node.end_col_offset or 0
    return not hasattr(node, "body") and end > place


def _in_short(part: ast.AST) -> str:
    text = ast.unparse(part)
    if len(text) <= LONGEST:
        return text
    name = ast.unparse(part.func) if isinstance(part, ast.Call) else ""
    return f"{name if len(name) <= LONGEST else name.rpartition('.')[2]}(...)"


def _frozen(step: _Step, frame: FrameType) -> Iterator[Cut]:
    """Yield the modules of a step that have parameters, all of them frozen."""
    for name in _names(step.value):
        value = _value_of(name, frame)
        every = [*value.parameters()] if isinstance(value, nn.Module) else []
        if every and not any(it.requires_grad for it in every):
            yield Cut(f"no parameter of `{name}` does", _UNFROZEN)


def _intent(node: ast.AST) -> str:
    """Return what to do instead of an expression without a derivative, or ``""``."""
    match node:
        case ast.Compare(ops=[ast.Is() | ast.IsNot() | ast.In() | ast.NotIn()]):
            return ""
        case ast.Compare():
            return _NO_DERIVATIVE
        case ast.Call(keywords=options) if _creates_graph(options):
            return ""
        case ast.Call(func=ast.Name(id=name)):
            return _FUNCTIONS.get(name, "")
        case ast.Call(func=ast.Attribute(attr=name)):
            return _ATTRIBUTES.get(name, "")
        case ast.Attribute(attr="data" | "grad" as name):
            return _ATTRIBUTES[name]
        case _:
            return ""


def _integers(step: _Step, frame: FrameType) -> list[str]:
    """Return the variables that a step sets to tensors of integers or booleans."""
    values = {name: _value_of(name, frame) for name in sorted(step.names)}
    return [
        name
        for name, it in values.items()
        if isinstance(it, Tensor) and not is_inexact(it.dtype)
    ]


def _creates_graph(options: Sequence[ast.keyword]) -> bool:
    return any(
        it.arg == "create_graph" and ast.unparse(it.value) != "False" for it in options
    )


def _requires_grad(step: _Step, steps: _Steps, frame: FrameType) -> bool:
    """Tell whether something that a value was computed from requires grad."""
    every = _behind(step, steps)
    names = {name for it in every for name in _names(it.value)}
    return any(_holds_grad(_value_of(name, frame)) for name in names)


def _value_of(name: str, frame: FrameType) -> object:
    variable, _, attribute = name.partition(".")
    value = value_of(ast.Name(variable), frame)
    if not attribute:
        return value
    own: dict[str, Any] = getattr(value, "__dict__", {})
    places = [own]
    if isinstance(value, nn.Module):
        places += [own_parameters(value), own_buffers(value), own_children(value)]
    return next((it[attribute] for it in places if attribute in it), None)


def _holds_grad(value: object) -> bool:
    if isinstance(value, nn.Module):
        return any(it.requires_grad for it in value.parameters())
    return any(it.requires_grad for it in tensors_in(value))


def _behind(last: _Step, steps: _Steps) -> Iterator[_Step]:
    """Yield a step, and the earlier ones its value comes from, the nearest first."""
    waiting, seen = deque([last]), {last}
    while waiting:
        step = waiting.popleft()
        yield step
        for name in _names(step.value):
            every = steps.get(name, [])
            before = bisect_left(every, step.place, key=lambda it: it.place)
            made = every[before - 1] if before else step
            if made not in seen:
                seen.add(made)
                waiting.append(made)


def _names(node: ast.AST) -> Iterator[str]:
    """Yield the variables of an expression, and attributes such as ``"self.net"``."""
    for it in ast.walk(node):
        match it:
            case ast.Name(id=name):
                yield name
            case ast.Attribute(value=ast.Name(id=owner), attr=name):
                yield f"{owner}.{name}"
            case _:
                pass


def _set_by(targets: Sequence[ast.expr]) -> frozenset[str]:
    """Return the names that targets set; for ``self.net`` that is not ``self``."""
    names = [name for it in targets for name in _names(it)]
    owners = {name.partition(".")[0] for name in names if "." in name}
    return frozenset(names) - owners


def _steps(statements: Sequence[tuple[ast.stmt, str]]) -> Iterator[_Step]:
    """Yield the statements that set variables, or append to a list."""
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
        yield _Step(_start(it), _set_by(targets), value, mode)


def _statements(frame: FrameType) -> Iterator[tuple[ast.stmt, str]]:
    """Yield the statements that a frame runs, in order, and the mode each is in."""
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
    """Return the expression that switches gradients off, or ``""``: the last wins."""
    for it in expressions:
        if found := _MODE.search(text := ast.unparse(it)):
            around = "" if found[1] == "enable_grad" else text
    return around
