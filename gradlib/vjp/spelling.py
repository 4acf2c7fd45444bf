"""Rewrites the code of an explanation in the caller's own names for tensors.

The checks write y, x and v for the outputs, inputs and grad_outputs of a call. Here
these letters become what the caller wrote, where that can be read.
"""

import ast
import re
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, count
from operator import is_
from types import FrameType, ModuleType
from typing import Any

from torch import Tensor, nn

from gradlib.vjp.arguments import Argument, Arguments
from gradlib.vjp.diagnosis import Diagnosis
from gradlib.vjp.source import UNKNOWN, Expression, expressions, names_in, value_of
from gradlib.vjp.tensor_names import variable_of

LONG = 30  # letters; a longer expression is put into a variable first
LONGEST = 60  # letters, at most, of an expression that is put into a variable

_OPENED = (list, tuple, set, frozenset, deque)  # looking into these changes nothing

# By letter, the parameters of grad() and backward(), and the object of the method.
_PARAMETERS = {
    "y": ("outputs", "tensors", "self"),
    "x": ("inputs",),
    "v": ("grad_outputs", "grad_tensors", "gradient"),
}


@dataclass(frozen=True)
class Spelling:
    """How code spells an argument.

    Attributes:
        text: The expression that gives the argument.
        variable: The variable that code may set in its place.
        before: The line that binds the variable first, where `text` needs it.
        entries: The expression of each entry, where the caller wrote them one by one.
    """

    text: str
    variable: str = ""
    before: str = ""
    entries: tuple[str, ...] = ()


def in_own_names(found: Diagnosis, arguments: Arguments) -> Diagnosis:
    """Return a diagnosis with its code in the caller's own names."""
    with suppress(Exception):  # an explanation must get through, in whatever names
        spelled = {letter: Spelling(it, it) for letter, it in found.others.items()}
        if arguments.site is not None:
            frame, others = arguments.site.frame, found.others.values()
            spelled = _spellings(arguments, frame, others) | spelled
        return replace(found, fix=_rewritten(found.fix, spelled))
    return found


def own_names(arguments: Arguments, letter: str) -> tuple[str, ...]:
    """Return what the caller calls the entries of an argument, or nothing.

    Only the source is read: looking at values might keep those of a good call alive.

    Args:
        arguments: The call.
        letter: ``"y"`` for outputs, ``"x"`` for inputs, ``"v"`` for grad_outputs.
    """
    with suppress(Exception):
        argument = arguments.by_letter[letter]
        written = expressions_by_letter(arguments)[letter]
        if _is_path(written.node):
            return replace(argument, letter=written.text).spelled
        if all(_is_path(it.node) for it in written.entries):
            return tuple(it.text for it in written.entries)
    return ()


def expressions_by_letter(arguments: Arguments) -> dict[str, Expression]:
    """Return what the caller wrote for each argument, by the letters of `own_names`."""
    found = expressions(arguments.site) if arguments.site else {}
    return {
        letter: found[name]
        for letter, names in _PARAMETERS.items()
        for name in names
        if name in found
    }


def _spellings(
    arguments: Arguments, frame: FrameType, others: Iterable[str]
) -> dict[str, Spelling]:
    """Return how code at the place of the call spells each argument.

    Args:
        arguments: The call.
        frame: The caller's frame.
        others: Other expressions that the code contains.
    """
    by_letter, written = arguments.by_letter, expressions_by_letter(arguments)
    own = {k: _own(it, written.get(k), frame) for k, it in by_letter.items()}
    taken = {
        node.id
        for expression in written.values()
        for node in ast.walk(expression.node)
        if isinstance(node, ast.Name)
    }
    known = names_in(frame)
    texts = [*others, *(it.text for it in own.values() if it is not None)]
    taken |= {re.split(r"\W", it)[0] for it in texts}
    spelled: dict[str, Spelling] = {}
    for letter, argument in by_letter.items():
        it = own[letter]
        # Where no inputs were given, code only reads x: the caller's own x will do.
        is_bound = letter != "x" or not arguments.into_leaves
        variable = _free(letter, argument, taken | known if is_bound else taken)
        taken.add(variable)
        if it is None:
            before = _binding(variable, argument, written.get(letter), frame)
            it = Spelling(variable, variable, before)
        elif it.text == letter or _is_recomputed(it.text, argument):
            variable = it.text
        spelled[letter] = replace(it, variable=variable)
    return spelled | {it: Spelling(name, name) for it, name in _placeholders(frame)}


def _placeholders(frame: FrameType) -> Iterator[tuple[str, str]]:
    """Yield names for a loop variable and a function that the caller does not use."""
    names = names_in(frame)
    yield "i", next(it for it in _longer("i") if it not in names)
    f = value_of(ast.Name("f"), frame)
    if f is not UNKNOWN and not callable(f):
        yield "f", next(it for it in _longer("f") if it not in names)


def _longer(letter: str) -> Iterator[str]:
    return (letter + "_" * n for n in count())


def _own(
    argument: Argument, written: Expression | None, frame: FrameType
) -> Spelling | None:
    """Return the spelling of an argument that the caller has a short name for."""
    spelling = None if written is None else _as_written(argument, written, frame)
    if spelling is None and not argument.several:
        name = variable_of(argument.values[0], frame)
        spelling = Spelling(name) if name else None
    return spelling


def _as_written(
    argument: Argument, written: Expression, frame: FrameType
) -> Spelling | None:
    """Return the caller's expression, if it is short and gives the same value again."""
    if _is_wrapped(argument, written, frame) and len(written.text) <= LONG:
        return Spelling(written.text, entries=(written.text,))
    if not argument.several and len(written.entries) == 1:
        (written,) = written.entries  # torch wraps a single tensor in a tuple
    if written.entries:
        # A star in the list may open nothing.
        pairs = zip(written.entries, argument.values, strict=False)
        if not all(_gives(it.node, partial(is_, value), frame) for it, value in pairs):
            return None
    elif not _gives(written.node, partial(_holds, argument), frame):
        return None
    texts = tuple(it.text for it in written.entries)
    return Spelling(written.text, entries=texts) if len(written.text) <= LONG else None


def _is_wrapped(argument: Argument, written: Expression, frame: FrameType) -> bool:
    """Tell whether the caller wrote a tensor that torch has put into a tuple."""
    if written.entries or len(argument.values) != 1:
        return False
    is_it = partial(is_, argument.values[0])
    return argument.several and _gives(written.node, is_it, frame)


def _gives(node: ast.expr, is_it: Any, frame: FrameType) -> bool:
    """Tell whether an expression, written again, gives the same value again.

    A number does, and so does a path of attributes and subscripts from a variable, but
    not through a tensor: ``x[0]`` and ``x.T`` are new tensors each time.
    """
    if isinstance(node, ast.Constant):
        return isinstance(node.value, int | float)
    value = value_of(node, frame)
    if value is not UNKNOWN:
        return is_it(value)
    if not isinstance(node, ast.Attribute):
        return False
    owner = value_of(node.value, frame)
    if owner is UNKNOWN:
        return _is_path(node.value)
    return not issubclass(type(owner), Tensor | ModuleType)


def _is_path(node: ast.expr) -> bool:
    """Tell whether a node is a name, with attributes and constant subscripts if any."""
    while isinstance(node, ast.Attribute | ast.Subscript):
        if isinstance(node, ast.Subscript) and not isinstance(node.slice, ast.Constant):
            return False
        node = node.value
    return isinstance(node, ast.Name)


def _holds(argument: Argument, value: Any) -> bool:
    """Tell whether a value is the argument, or a list or dict of just its entries."""
    if not argument.several:
        return value is argument.values[0]
    if issubclass(type(value), dict):
        value = tuple(value if _are_keys(argument) else value.values())
    if not issubclass(type(value), list | tuple | nn.ParameterList):
        return False  # an iterator is used up
    entries = tuple(value)
    return len(entries) == len(argument.values) and all(
        map(is_, entries, argument.values)
    )


def _are_keys(argument: Argument) -> bool:
    """Tell whether the entries are strings: torch has taken the keys of a dict."""
    return {str} == set(map(type, argument.values))


def _is_recomputed(text: str, argument: Argument) -> bool:
    """Tell whether `text` is a variable for outputs, which code may compute again."""
    first = argument.values[0] if argument.values else None
    return argument.letter == "y" and text.isidentifier() and isinstance(first, Tensor)


def _free(letter: str, argument: Argument, taken: set[str]) -> str:
    """Return a name for a variable that is not taken."""
    own = [letter, *[argument.name] * argument.name.isidentifier()]
    names = chain(own, _longer(letter))
    return next(name for name in names if name not in taken)


def _binding(
    variable: str, argument: Argument, written: Expression | None, frame: FrameType
) -> str:
    """Return the line that sets a variable to what the caller wrote, or ``""``."""
    if written is None:
        return ""
    value = value_of(written.node, frame)
    if value is not UNKNOWN:
        if not _opens_to(value, argument):
            return ""  # its value has changed since
        if not argument.several:
            return f"({variable},) = {written.text}"  # as torch unpacks it
    if any(isinstance(it, ast.Await | ast.Yield) for it in ast.walk(written.node)):
        return ""
    text = written.text
    if _is_list(written.node):
        if not argument.several:
            return ""  # torch has unpacked it
    elif argument.several and argument.keys is None and not _are_keys(argument):
        text = f"list({text})"  # an iterator is used up by one use
    return f"{variable} = {text}" if len(text) <= LONGEST else ""


def _opens_to(value: Any, argument: Argument) -> bool:
    """Tell whether a value held just the entries that were given, before the call."""
    if issubclass(type(value), Iterator):
        return True  # before the call it is not used up
    entries = list(value) if type(value) in _OPENED else None
    return _holds(replace(argument, several=True), entries)


def _is_list(node: ast.expr) -> bool:
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
        return node.func.id in ("list", "tuple")
    return isinstance(node, ast.List | ast.Tuple | ast.ListComp)


def _rewritten(code: str, spelled: dict[str, Spelling]) -> str:
    """Return code with its letters replaced by their spellings.

    A letter becomes the caller's expression until a line sets it, then the variable.
    """
    nodes = list(ast.walk(ast.parse(code)))
    names = [it for it in nodes if isinstance(it, ast.Name) and it.id in spelled]
    bound: dict[str, int] = {}
    for name in names:
        if isinstance(name.ctx, ast.Store):
            bound[name.id] = min(name.lineno, bound.get(name.id, name.lineno))
    edits: dict[ast.expr, str] = {}
    before: dict[str, None] = {}
    for name in names:
        it = spelled[name.id]
        is_read = isinstance(name.ctx, ast.Load) and name.lineno <= bound.get(
            name.id, name.lineno
        )
        edits[name] = it.text if is_read else it.variable
        if is_read and it.before:
            before[it.before] = None
    for node in nodes:
        match node:
            case ast.Subscript(
                value=ast.Name() as name, slice=ast.Constant(value=int(i))
            ):
                it = spelled.get(name.id)
                if it and it.entries and edits[name] == it.text:
                    del edits[name]
                    edits[node] = it.entries[i]
            case _:
                pass
    return "\n".join([*before, _edited(code, edits)])


def _edited(code: str, edits: dict[ast.expr, str]) -> str:
    """Return code with the text of some nodes replaced."""
    lines = [line.encode() for line in code.splitlines()]  # columns count bytes
    for node in sorted(edits, key=lambda it: it.col_offset, reverse=True):
        line = lines[node.lineno - 1]
        start, end = line[: node.col_offset], line[node.end_col_offset :]
        lines[node.lineno - 1] = start + edits[node].encode() + end
    return "\n".join(line.decode() for line in lines)
