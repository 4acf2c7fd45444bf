"""How a call is written in its source: the expression of each argument."""

import ast
import linecache
import warnings
from contextlib import suppress
from dataclasses import dataclass
from inspect import CO_OPTIMIZED
from itertools import islice
from types import CodeType, FrameType, FunctionType, ModuleType
from typing import Any, NamedTuple, TypeAlias

from gradlib.private.passes import running_frame

Position: TypeAlias = tuple[int | None, int | None, int | None, int | None]
"""Where something is in a file: its first and last line, its first and last column."""


class Site(NamedTuple):
    """Where a function was called.

    Attributes:
        frame: Of the caller.
        instruction: The one that makes the call, as ``f_lasti`` and ``tb_lasti`` count.
        code: Of the function.
    """

    frame: FrameType
    instruction: int
    code: CodeType


@dataclass(frozen=True)
class Expression:
    """An expression of the caller's.

    Attributes:
        node: What it is.
        text: As it is written, on one line.
        entries: Those of a list or tuple that is written out.
    """

    node: ast.expr
    text: str
    entries: tuple["Expression", ...]


UNKNOWN = object()
"""The value of an expression that would have to be evaluated."""


def site_of_caller() -> Site:
    """Return where the function that asks was called."""
    caller = running_frame(2)
    return Site(caller, caller.f_lasti, running_frame(1).f_code)


def expressions(site: Site) -> dict[str, Expression]:
    """Return what the caller wrote for each parameter, as far as it can be read.

    Nothing is evaluated. Without a source, or with one that has been changed since,
    there is nothing to read.

    Returns:
        Expressions by the parameter's name; that of a method's object as ``"self"``.
    """
    with suppress(Exception):  # anything may stand where the source was
        call, lines = call_at(position_of(site), site)
        return {
            name: _expression(node, lines)
            for name, node in _arguments(call, site).items()
        }
    return {}


def position_of(site: Site) -> Position:
    """Return where the source of a call is."""
    positions = site.frame.f_code.co_positions()
    return next(islice(positions, site.instruction // 2, None))


def call_at(position: Position, site: Site) -> tuple[ast.Call, list[str]]:
    """Return a call of the caller's, and the lines that its places are in.

    The rest of the file is not read, which may be a page of prose with code in it.

    Raises:
        Exception: No source is there, or something else than a call.
    """
    start, end, left, right = position
    assert start is not None
    name = site.frame.f_code.co_filename
    lines = linecache.getlines(name, site.frame.f_globals)[start - 1 : end]
    parts = [line.encode() for line in lines]  # places count bytes
    parts[-1] = parts[-1][:right]
    parts[0] = parts[0][left:]
    source = f"({b''.join(parts).decode()})"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the compiler has given them already
        call = ast.parse(source, mode="eval").body
    assert isinstance(call, ast.Call)
    return call, source.splitlines(keepends=True)


def tree_of(frame: FrameType) -> ast.AST:
    """Return the code that a frame runs, a function or a whole file, with its lines.

    Of a file that is not all code, as a page with code in it, only that is read.

    Raises:
        Exception: No source is there, or something else.
    """
    code = frame.f_code
    places = [*code.co_positions()]
    first = min(it[0] for it in places if it[0])
    last = max(it[1] for it in places if it[1])
    lines = linecache.getlines(code.co_filename, frame.f_globals)[first - 1 : last]
    is_inside = lines[0][:1].isspace()
    tree: Any = ast.parse("".join(["if True:\n"] * is_inside + lines))
    ast.increment_lineno(tree, first - 1 - is_inside)
    tree = tree.body[0] if is_inside else tree
    return tree if code.co_name == "<module>" else tree.body[0]


def text_of(node: ast.expr, lines: list[str]) -> str:
    """Return an expression as it is written, or on one line where it has several."""
    if node.lineno == node.end_lineno:
        line = lines[node.lineno - 1].encode()
        return line[node.col_offset : node.end_col_offset].decode()
    return ast.unparse(node)


def value_of(node: ast.expr, frame: FrameType) -> Any:
    """Look an expression up, in variables, modules, lists and dicts alone.

    Returns:
        The value, or `UNKNOWN` where code would have to run for it.
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
    code = frame.f_code
    if code.co_flags & CO_OPTIMIZED:
        own = (*code.co_varnames, *code.co_cellvars, *code.co_freevars)
    else:
        own = (*frame.f_locals,)
    return {*own, *frame.f_globals}


def _scope_of(name: str, frame: FrameType) -> dict[str, Any]:
    """Return the variables of a frame that a name is looked for in.

    To ask the frame of a function for all of its variables has it keep their values,
    until Python 3.13. So it is asked only where it has the one that is wanted.
    """
    code = frame.f_code
    if code.co_flags & CO_OPTIMIZED:
        is_local = name in (*code.co_varnames, *code.co_cellvars, *code.co_freevars)
    else:
        is_local = name in frame.f_locals
    return frame.f_locals if is_local else frame.f_globals


def _arguments(call: ast.Call, site: Site) -> dict[str, ast.expr]:
    """Return the arguments by the names of the parameters they are for."""
    names = site.code.co_varnames[: site.code.co_argcount]
    found: dict[str, ast.expr] = {}
    if names[:1] == ("self",):
        if not isinstance(call.func, ast.Attribute) or not _is_called(call.func, site):
            return {}
        found["self"], names = call.func.value, names[1:]
    elif not _is_called(call.func, site):
        return {}  # but by way of something else, as functools.partial
    for name, node in zip(names, call.args, strict=False):
        if isinstance(node, ast.Starred):
            break
        found[name] = node
    return found | {it.arg: it.value for it in call.keywords if it.arg}


def _is_called(node: ast.expr, site: Site) -> bool:
    """Tell whether an expression gives the function itself: by its name, or another."""
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
