"""Run the code on stdin and write the last figure it made to stdout, as SVG.

A program of its own, so that every block starts from nothing, as a reader's copy does.
Arguments: the file and the line the code stands on, and the figure's background.
"""

import contextlib
import functools
import io
import sys
from typing import Any

import matplotlib as mpl
from matplotlib.figure import Figure


def last_figure(code: str, filename: str, line: int) -> Figure:
    """Run `code` and return the last figure it made, with pyplot or without."""
    made: list[Figure] = []
    figure_init = Figure.__init__

    @functools.wraps(figure_init)
    def remember(self: Figure, *args: Any, **kwargs: Any) -> None:
        figure_init(self, *args, **kwargs)
        made.append(self)

    Figure.__init__ = remember
    # Blank lines in front: a traceback then shows the line of the page.
    program = compile("\n" * (line - 1) + code, filename, "exec")
    with contextlib.redirect_stdout(io.StringIO()):
        exec(program, {"__name__": "__main__"})
    if not made:
        sys.exit("the block draws no matplotlib figure")
    return made[-1]


if __name__ == "__main__":
    filename, line, background = sys.argv[1:]
    mpl.use("Agg")
    figure = last_figure(sys.stdin.read(), filename, int(line))
    svg = io.StringIO()
    figure.savefig(svg, format="svg", facecolor=background)
    print(svg.getvalue())
