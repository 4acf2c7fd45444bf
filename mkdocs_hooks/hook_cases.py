"""The code of the cases that tools/record_hooks.py records; it is read, not run."""

import ast
from collections.abc import Iterator
from functools import cache as once
from typing import Any, NamedTuple

from mkdocs_hooks import cache

PROGRAM = cache.ROOT / "tools" / "record_hooks.py"
INPUTS = {
    "grad": "requires grad",
    "data": "requires no grad",
    "computed": "made by another operation",
    "turned": "requires grad, not contiguous",
    "indices": "integers",
}


class Case(NamedTuple):
    """What is hooked: a module's code, its forward if not torch's own, its inputs."""

    module: str
    forward: str
    inputs: list[str]
    notes: list[str]

    def given(self) -> str:
        """Return the inputs, without the usual ", requires grad", and the notes."""
        inputs = [it.removesuffix(", requires grad") for it in self.inputs]
        return ", ".join(["; ".join(inputs), *self.notes])


@once
def cases() -> dict[str, Case]:
    """Return the cases of the recording program by name."""
    program = ast.parse(PROGRAM.read_text(encoding="utf-8"))
    table = next(
        node.value
        for node in program.body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "CASES"
    )
    assert isinstance(table, ast.Dict)
    defined = {
        node.name: node
        for node in program.body
        if isinstance(node, ast.FunctionDef | ast.ClassDef)
    }
    return {
        str(ast.literal_eval(key)): described(call, defined)
        for key, call in zip(table.keys, table.values, strict=True)
        if key is not None and isinstance(call, ast.Call)
    }


def described(call: ast.Call, defined: dict[str, Any]) -> Case:
    """Return a case from the call that makes it."""
    make, *inputs = call.args
    options = {str(option.arg): option.value for option in call.keywords}
    module = inlined(
        make.body if isinstance(make, ast.Lambda) else ast.Call(make, [], []), defined
    )
    code = ast.unparse(module)
    made_by = defined.get(code.partition("(")[0])
    shown = [shown_input(it) for given in inputs for it in repeated(given)]
    if kwargs := options.get("kwargs"):
        assert isinstance(kwargs, ast.Dict)
        shown += [
            f"{ast.literal_eval(key)}: {shown_input(value)}"
            for key, value in zip(kwargs.keys, kwargs.values, strict=True)
            if key is not None
        ]
    return Case(code, forward_of(made_by), shown, list(notes(options)))


def inlined(code: ast.expr, defined: dict[str, Any]) -> ast.expr:
    """Replace calls of the program's own functions by what these return."""

    class Inline(ast.NodeTransformer):
        def visit_Call(self, node: ast.Call) -> ast.AST:
            self.generic_visit(node)
            function = defined.get(ast.unparse(node.func))
            if not isinstance(function, ast.FunctionDef):
                return node
            given = {str(it.arg): it.value for it in node.keywords}
            return returned(function, given)

    return Inline().visit(code)


def returned(function: ast.FunctionDef, given: dict[str, ast.expr]) -> ast.expr:
    """Return the call that a function returns, without arguments left at defaults."""
    last = function.body[-1]
    assert isinstance(last, ast.Return)
    assert last.value
    call = ast.parse(ast.unparse(last.value), mode="eval").body  # a copy
    assert isinstance(call, ast.Call)
    parameters = {argument.arg for argument in function.args.args}
    kept: list[ast.keyword] = []
    for keyword in call.keywords:
        name = ast.unparse(keyword.value)
        if name in given or name not in parameters:
            kept.append(ast.keyword(keyword.arg, given.get(name, keyword.value)))
    call.keywords = kept
    return call


def forward_of(made_by: ast.ClassDef | None) -> str:
    """Return the forward of a class of the program, unless it only calls `function`."""
    if made_by is None or "function" in ast.unparse(made_by):
        return ""
    forward = next(
        node
        for node in made_by.body
        if isinstance(node, ast.FunctionDef) and node.name == "forward"
    )
    return "\n".join(ast.unparse(line) for line in forward.body[1:])


def repeated(given: ast.expr) -> list[ast.expr]:
    """Return the inputs that `*[one] * 3` stands for, or the single input given."""
    if not isinstance(given, ast.Starred):
        return [given]
    assert isinstance(given.value, ast.BinOp)
    assert isinstance(given.value.left, ast.List)
    return given.value.left.elts * ast.literal_eval(given.value.right)


def shown_input(call: ast.expr) -> str:
    """Return an input's shape and kind."""
    assert isinstance(call, ast.Call)
    kind = ast.unparse(call.func)
    sizes = [ast.literal_eval(size) for size in call.args]
    return f"{sizes[kind == 'indices' :]}, {INPUTS[kind]}"


def notes(options: dict[str, ast.expr]) -> Iterator[str]:
    """Yield what else is special about a case."""
    if "hooked" in options:
        yield f"the hook is on {ast.literal_eval(options['hooked'])}"
    if "frozen" in options:
        yield "no parameter requires grad"
    if "used" in options:
        used = ast.literal_eval(options["used"])
        yield f"only output {', '.join(map(str, used))} reaches the loss"
