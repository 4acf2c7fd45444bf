"""Run the code of a page or an example, and collect what it prints and draws.

This changes the whole process, so `fresh.call` runs it in one of its own.
"""

import ast
import functools
import io
import os
import sys
from collections.abc import Iterable
from pathlib import Path
from types import ModuleType
from typing import Any

import matplotlib as mpl
import matplotlib.pyplot as plt
from matplotlib.figure import Figure

from mkdocs_hooks.fresh import Written

Output = tuple[str, str]
"""The kind of an output (stdout, stderr, text, html or svg), and its text."""

BY_LIGHTNESS = 'data-scale="lightness"'
"""Marks a drawing in which lightness shows how large a number is."""

TOLD_BY_LIGHTNESS = ("viridis", "RdBu", "PuOr")
"""The colour maps that do so; the last two are white in the middle."""


def last_figure(code: str, filename: str, line: int, background: str) -> str | None:
    """Return the last figure that a block makes, by pyplot or otherwise, as SVG."""
    begin()
    made: list[Figure] = []
    figure_init = Figure.__init__

    @functools.wraps(figure_init)
    def remember(self: Figure, *args: Any, **kwargs: Any) -> None:
        figure_init(self, *args, **kwargs)
        made.append(self)

    Figure.__init__ = remember
    for stream in (sys.stdout, sys.stderr):  # the page shows the drawing alone
        Written(stream)
    execute(code, filename, line)
    return svg(made[-1], facecolor=background) + "\n" if made else None


def outputs_of(cells: Iterable[tuple[str, int]], filename: str) -> list[list[Output]]:
    """Run cells, each with its line, and return what a notebook shows below each."""
    begin()
    shown: list[Output] = []
    stdout, stderr = Written(sys.stdout), Written(sys.stderr)

    def show_text() -> None:
        streams = (("stdout", stdout.take()), ("stderr", stderr.take()))
        shown.extend(output for output in streams if output[1])

    def show_figures(*_: object, **__: object) -> None:
        show_text()
        for number in plt.get_fignums():
            shown.append(("svg", svg(plt.figure(number), bbox_inches="tight")))
        plt.close("all")

    plt.show = show_figures
    below: list[list[Output]] = []
    for code, line in cells:
        shown = []
        value = execute(code, filename, line)
        show_text()
        if value is not None:
            shown.append(as_output(value))
        show_figures()
        below.append(shown)
    return below


def begin() -> None:
    """Set the site's drawing style, and a new __main__ for what the code defines."""
    style = mpl.rc_params_from_file(Path(__file__).with_name("matplotlibrc"))
    mpl.rcParams.update(style)  # not rc_file, which leaves out svg.hashsalt
    mpl.use("Agg")
    os.environ["SOURCE_DATE_EPOCH"] = "0"  # no date: the same drawing, the same file
    sys.modules["__main__"] = ModuleType("__main__")


def execute(code: str, filename: str, line: int) -> object:
    """Run code that begins on a line of a file; return its last expression's value."""
    # With blank lines in front, a traceback shows the line of the file.
    tree = ast.parse("\n" * (line - 1) + code, filename)
    names = vars(sys.modules["__main__"])
    *body, last = tree.body or [ast.Pass()]
    if not isinstance(last, ast.Expr):
        exec(compile(tree, filename, "exec"), names)
        return None
    tree.body = body
    exec(compile(tree, filename, "exec"), names)
    return eval(compile(ast.Expression(last.value), filename, "eval"), names)


def as_output(value: object) -> Output:
    """Return what a notebook shows for the value of a cell's last line."""
    if isinstance(value, Figure):
        return "svg", svg(value, bbox_inches="tight")
    if html := getattr(value, "_repr_html_", None):
        return "html", html()
    return "text", repr(value)


def svg(figure: Figure, **options: Any) -> str:
    """Return a drawing as SVG."""
    file = io.StringIO()
    figure.savefig(file, format="svg", **options)
    images = [image for ax in figure.axes for image in ax.images]
    if any(image.get_cmap().name in TOLD_BY_LIGHTNESS for image in images):
        return file.getvalue().replace("<svg ", f"<svg {BY_LIGHTNESS} ", 1)
    return file.getvalue()
