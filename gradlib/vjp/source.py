"""How a call is written in its source: the expression of each argument."""

import ast
import linecache
import warnings
from contextlib import suppress
from dataclasses import dataclass
from inspect import CO_OPTIMIZED
from itertools import islice
from types import CodeType, FrameType, FunctionType, ModuleType
from typing import Any, NamedTuple, TypeAlias, cast

from gradlib.private.passes import running_frame

Position: TypeAlias = tuple[int, int, int, int]
"""Where something is in a file: its first and last line, its first and last column."""


class Site(NamedTuple):
    """Where a function was called.

    Attributes:
        frame: The caller's frame.
        instruction: The offset of the instruction that makes the call, as ``f_lasti``
            and ``tb_lasti`` count it.
        code: The code of the called function.
    """

    frame: FrameType
    instruction: int
    code: CodeType


@dataclass(frozen=True)
class Expression:
    """An expression in the caller's source.

    Attributes:
        node: Its syntax tree.
        text: Its source, on one line.
        entries: Its entries, if it is a written-out list or tuple.
    """

    node: ast.expr
    text: str
    entries: tuple["Expression", ...]


UNKNOWN = object()
"""The value of an expression that would have to be evaluated."""


def site_of_caller() -> Site:
    """Return where the function that calls this one was called."""
    caller = running_frame(2)
    return Site(caller, caller.f_lasti, running_frame(1).f_code)


def expressions(site: Site) -> dict[str, Expression]:
    """Return the expression that the caller wrote for each parameter.

    Nothing is evaluated. The result is empty where the source is missing, or has
    changed since.

    Returns:
        Expressions by parameter name; the object of a method call is ``"self"``.
    """
    with suppress(Exception):  # the file may hold anything by now
        call, lines = call_at(position_of(site), site)
        return {
            name: _expression(node, lines)
            for name, node in _arguments(call, site).items()
        }
    return {}


def position_of(site: Site) -> Position:
    """Return the position of a call in its source.

    Raises:
        Exception: There is no source.
    """
    positions = site.frame.f_code.co_positions()
    found = next(islice(positions, site.instruction // 2, None))
    assert None not in found
    return cast(Position, found)


def lines_of(frame: FrameType) -> list[str]:
    """Return the lines of the file whose code a frame runs, none without a source."""
    return linecache.getlines(frame.f_code.co_filename, frame.f_globals)


def call_at(position: Position, site: Site) -> tuple[ast.Call, list[str]]:
    """Return the call at a position, and the lines that its nodes refer to.

    The rest of the file is not parsed: it may be a page of prose with code in it.

    Raises:
        Exception: There is no source, or no call at that position.
    """
    start, end, left, right = position
    lines = lines_of(site.frame)[start - 1 : end]
    parts = [line.encode() for line in lines]  # columns count bytes
    parts[-1] = parts[-1][:right]
    parts[0] = parts[0][left:]
    source = f"({b''.join(parts).decode()})"
    call = parsed(source, "eval").body
    assert isinstance(call, ast.Call)
    return call, source.splitlines(keepends=True)


def tree_of(frame: FrameType) -> ast.AST:
    """Return the syntax tree of the function or file that a frame runs.

    Its lines are numbered as in the file. Only the lines of that code are parsed: the
    file may be a page of prose with code in it.

    Raises:
        Exception: There is no source, or something else by now.
    """
    code = frame.f_code
    places = [*code.co_positions()]
    first = min(it[0] for it in places if it[0])
    last = max(it[1] for it in places if it[1])
    lines = lines_of(frame)[first - 1 : last]
    is_inside = lines[0][:1].isspace()
    tree = parsed("".join(["if True:\n"] * is_inside + lines))
    ast.increment_lineno(tree, first - 1 - is_inside)
    tree = tree.body[0] if is_inside else tree
    return tree if code.co_name == "<module>" else tree.body[0]


def parsed(source: str, mode: str = "exec") -> Any:
    """Return the syntax tree of code that Python has compiled before."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the compiler has shown them already
        return ast.parse(source, mode=mode)


def text_of(node: ast.expr, lines: list[str]) -> str:
    """Return an expression as written, or put on one line if it has several."""
    if node.lineno == node.end_lineno:
        line = lines[node.lineno - 1].encode()
        return line[node.col_offset : node.end_col_offset].decode()
    return ast.unparse(node)


def value_of(node: ast.expr, frame: FrameType) -> Any:
    """Look up an expression, through variables, modules, lists, tuples and dicts only.

    Returns:
        The value; `UNKNOWN` where there is none, or code would have to run for it.
    """
    match node:
        case ast.Name(id=name):
            return _scope_of(name, frame).get(name, UNKNOWN)
        case ast.Attribute(value=inner, attr=name):
            owner = value_of(inner, frame)
            return (
                vars(owner).get(name, UNKNOWN) if type(owner) is ModuleType else UNKNOWN
            )
        case ast.Subscript(value=inner, slice=ast.Constant(value=key)):
            owner = value_of(inner, frame)
            if type(owner) in (list, tuple, dict):
                with suppress(LookupError, TypeError):
                    return owner[key]
        case _:
            pass
    return UNKNOWN


def names_in(frame: FrameType) -> set[str]:
    """Return the names of the variables that the code of a frame can read."""
    return {*_local_names(frame), *frame.f_globals}


def _local_names(frame: FrameType) -> tuple[str, ...]:
    code = frame.f_code
    if code.co_flags & CO_OPTIMIZED:
        return (*code.co_varnames, *code.co_cellvars, *code.co_freevars)
    return (*frame.f_locals,)


def _scope_of(name: str, frame: FrameType) -> dict[str, Any]:
    """Return the variables, local or global, in which a frame looks up a name.

    Before Python 3.13, reading ``f_locals`` of a function's frame makes the frame keep
    all their values alive. So it is read only where the name is local.
    """
    return frame.f_locals if name in _local_names(frame) else frame.f_globals


def _arguments(call: ast.Call, site: Site) -> dict[str, ast.expr]:
    """Return the arguments of a call by parameter name."""
    names = site.code.co_varnames[: site.code.co_argcount]
    found: dict[str, ast.expr] = {}
    if names[:1] == ("self",):
        if not isinstance(call.func, ast.Attribute) or not _is_called(call.func, site):
            return {}
        found["self"], names = call.func.value, names[1:]
    elif not _is_called(call.func, site):
        return {}  # called through something else, such as functools.partial
    for name, node in zip(names, call.args, strict=False):
        if isinstance(node, ast.Starred):
            break
        found[name] = node
    return found | {it.arg: it.value for it in call.keywords if it.arg}


def _is_called(node: ast.expr, site: Site) -> bool:
    """Tell whether an expression is the called function, under any of its names."""
    name = node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "")
    if name == site.code.co_name:
        return True
    function = value_of(node, site.frame)
    return isinstance(function, FunctionType) and function.__code__ is site.code


def _expression(node: ast.expr, lines: list[str]) -> Expression:
    if isinstance(node, ast.NamedExpr):
        node = node.target
    listed = node.elts if isinstance(node, ast.List | ast.Tuple) else []
    entries = tuple(_expression(it, lines) for it in listed)
    return Expression(node, text_of(node, lines), entries)
