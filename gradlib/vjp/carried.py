"""State carried from step to step: by a loop around a call, or in an attribute."""

import ast
from collections.abc import Iterator, Sequence
from contextlib import suppress
from inspect import getsource
from textwrap import dedent
from typing import Any, cast

from torch import Tensor, nn
from torch.autograd.graph import Node

from gradlib.edges import edges_of, nodes_behind
from gradlib.tree import tensors_in
from gradlib.vjp.arguments import Arguments, written_key
from gradlib.vjp.source import Site, parsed, position_of, tree_of, value_of
from gradlib.vjp.spelling import own_names
from gradlib.vjp.tensor_names import attribute


def carried(arguments: Arguments) -> dict[str, str]:
    """Return the variables through which a graph reaches back into earlier steps.

    Each step reads such a variable before it sets it, as a hidden state or a sum of
    losses. Its value may be this step's by now: outside the graph, but sharing nodes.

    Returns:
        By name, the code that detaches each, with ``{0}`` for the variable. They are
        those of the innermost loop that has any, or else attributes. Empty where the
        source cannot be read.
    """
    site = arguments.site
    if site is None:
        return {}
    with suppress(Exception):  # there may be no source
        for loop in _loops_around(site):
            kept = {it: ast.parse(it, mode="eval").body for it in _read_then_set(loop)}
            values = {it: value_of(node, site.frame) for it, node in kept.items()}
            found = {
                name: code
                for name, value in values.items()
                if (code := _detached(value)) and _leads_back(name, value, arguments)
            }
            if found:
                return found
        return dict(_in_attributes(arguments, site))
    return {}


def _in_attributes(arguments: Arguments, site: Site) -> Iterator[tuple[str, str]]:
    """Yield each attribute that a method reads, then sets, and the code to detach it.

    The methods are the one that makes the call, and each module's ``forward``.
    """
    graph = nodes_behind(arguments.outputs.values)
    for owner, held, function in _owners(site):
        states = {
            name: code
            for name, value in held.items()
            if (code := _detached(value)) and _is_in(graph, value)
        }
        if states:
            method = parsed(dedent(getsource(function))).body[0]
            own = method.args.args[0].arg
            kept = _read_then_set(method)
            yield from (
                (f"{owner}.{name}", code)
                for name, code in states.items()
                if f"{own}.{name}" in kept
            )


def _owners(site: Site) -> Iterator[tuple[str, dict[str, Any], Any]]:
    """Yield what may hold state: its name at the call, its attributes, and a method."""
    frame = site.frame
    # The local ones come first, and hide global ones.
    variables = {**frame.f_locals, **frame.f_globals} | frame.f_locals
    for own in frame.f_code.co_varnames[: min(1, frame.f_code.co_argcount)]:
        held: dict[str, Any] = getattr(variables.get(own), "__dict__", {})
        yield own, held, frame.f_code
        variables |= {f"{own}.{name}": it for name, it in held.items()}
    seen = set[nn.Module]()
    for name, it in variables.items():
        if issubclass(type(it), nn.Module):
            modules: Iterator[tuple[str, nn.Module]] = it.named_modules(seen, name)
            for path, module in modules:
                held = vars(module) | dict(module.named_buffers(recurse=False))
                yield attribute(path)[1:], held, type(module).forward


def _leads_back(name: str, value: object, arguments: Arguments) -> bool:
    """Tell whether the outputs were computed from a variable's value, or with it.

    A recurrent layer computes output and state in one node, whose results are then
    only moved about.
    """
    outputs = arguments.outputs.values
    if any(value is it for it in outputs):
        return name in own_names(arguments, "y")  # else it got this value later
    return _is_in(nodes_behind(outputs), value)


def _is_in(graph: set[Node], value: object) -> bool:
    """Tell whether a graph holds a node that computed a value."""
    made_by = (it.grad_fn for it in tensors_in(value) if it.grad_fn is not None)
    return any(node in graph for it in made_by for node in _makers(it))


def _makers(node: Node) -> Iterator[Node]:
    """Yield a node, and those behind it whose results it only moves about."""
    yield node
    if node.name().rstrip("012") in _MOVES:
        for before, _ in edges_of(node):
            yield from _makers(before)


_MOVES = {
    f"{it}Backward"
    for it in (
        *("Alias", "Cat", "Permute", "Select", "Slice", "Split", "SplitWithSizes"),
        *("Squeeze", "Stack", "Transpose", "T", "Unbind", "UnsafeView", "Unsqueeze"),
        "View",
    )
}


def _detached(value: object) -> str:
    """Return the code that detaches a variable's value, ``{0}``, or ``""``."""
    if isinstance(value, Tensor):
        return "{0}.detach()"
    if type(value) is dict:
        held = cast(dict[Any, Any], value).values()
        each = "{{key: it.detach() for key, it in {0}.items()}}"
        return each * all(isinstance(it, Tensor) for it in held)
    is_named = issubclass(type(value), tuple) and hasattr(value, "_make")
    if type(value) not in (tuple, list) and not is_named:
        return ""
    if not all(isinstance(it, Tensor) for it in cast(Sequence[Any], value)):
        return ""
    each = "it.detach() for it in {0}"
    if is_named:
        return f"{{0}}._make({each})"
    return f"[{each}]" if type(value) is list else f"tuple({each})"


def _loops_around(site: Site) -> Iterator[ast.stmt]:
    """Yield the loops around a call, the innermost first."""
    line = position_of(site)[0]
    for it in reversed([*ast.walk(tree_of(site.frame))]):
        is_loop = isinstance(it, ast.For | ast.AsyncFor | ast.While)
        if is_loop and it.lineno <= line <= (it.body[-1].end_lineno or 0):
            yield it


def _read_then_set(code: Any) -> list[str]:
    """Return the variables that a loop or method reads before it sets them."""
    read: dict[str, None] = {}
    kept: dict[str, None] = {}
    was_set: set[str] = set()
    for name, is_set in _uses(code.body):
        if not is_set and name not in was_set:
            read[name] = None
        elif is_set:
            was_set.add(name)
            if name in read:
                kept[name] = None
    return [*kept]


def _uses(node: Any) -> Iterator[tuple[str, bool]]:
    """Yield the variable of each use, in the order they run, and whether it is set."""
    match node:
        case list():
            for it in cast(list[Any], node):
                yield from _uses(it)
        case ast.Name(id=name, ctx=ctx):
            yield name, isinstance(ctx, ast.Store)
        case ast.Attribute(attr="detach"):
            pass  # it reads no graph
        case ast.Attribute(value=ast.Name(id=name), attr=attr, ctx=ctx):
            yield name, False
            yield f"{name}.{attr}", isinstance(ctx, ast.Store)
        case ast.Subscript(value=ast.Name(id=name), ctx=ctx):
            yield name, False
            yield from _uses(node.slice)
            if isinstance(node.slice, ast.Constant):
                name = f"{name}[{written_key(node.slice.value)}]"
            yield name, isinstance(ctx, ast.Store)
        case ast.AugAssign():
            yield from ((name, False) for name, _ in _uses(node.target))
            yield from _uses(node.value)
            yield from _uses(node.target)
        case ast.Assign():
            yield from _uses(node.value)
            yield from _uses(node.targets)
        case _:
            for it in ast.iter_child_nodes(node):
                yield from _uses(it)
