"""What makes an example fail as a program, or look wrong as a page."""

import ast
import re

import jupytext

_MAGIC = re.compile(r"(# )?(%(?!%)\w|%%\w|!\w)")
# Methods that give back nothing, so that a page shows nothing below the cell.
_RETURNS_NONE = {"close", "draw", "grid", "savefig", "show", "tight_layout"}
_FIGURES = re.compile(r"(plt|fig(ure)?|ax(es|is|s)?)\b")


def misfits(name: str, text: str) -> list[str]:
    """What a program must not hold that is also shown as a page."""
    return [*_docstring(name, text), *_magics(name, text), *_shown_objects(name, text)]


def _docstring(name: str, text: str) -> list[str]:
    if ast.get_docstring(ast.parse(_without_magics(text))) is None:
        return []
    return [
        f"{name}:1: a module docstring prints itself on the page: write it as a "
        "# %% [markdown] cell"
    ]


def _magics(name: str, text: str) -> list[str]:
    return [
        f"{name}:{number}: a notebook's magic is no Python: write a plain statement"
        for number, line in enumerate(text.split("\n"), start=1)
        if _MAGIC.match(line)
    ]


def _shown_objects(name: str, text: str) -> list[str]:
    """Cells that end in a call of matplotlib, whose result the page would show."""
    return [
        f"{name}: the page shows what the last line of this cell returns: end it with "
        f"plt.show(): {last}"
        for last in _last_expressions(text)
        if _FIGURES.match(last) and _method(last) not in _RETURNS_NONE
    ]


def _last_expressions(text: str) -> list[str]:
    cells = jupytext.reads(_without_magics(text), fmt="py:percent").cells
    bodies = [ast.parse(c.source).body for c in cells if c.cell_type == "code"]
    return [
        ast.unparse(body[-1])
        for body in bodies
        if body and isinstance(body[-1], ast.Expr)
    ]


def _method(expression: str) -> str:
    call = ast.parse(expression, mode="eval").body
    if isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute):
        return call.func.attr
    return ""


def _without_magics(text: str) -> str:
    return "\n".join("" if _MAGIC.match(line) else line for line in text.split("\n"))
