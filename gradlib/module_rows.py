"""Figures with a row for each module: the names, marks and legend that all have."""

# matplotlib's own annotations leave the keywords of its methods open.
# pyright: reportUnknownMemberType=false

import math
from collections.abc import Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from gradlib.figure import LONG, NAME, figure_of, in_short, inches_of, new_axes

# Grey, and blue, orange and green of the Okabe-Ito palette: colour-blind readers can
# tell them apart too, also by their markers.
STYLES = {
    "output": ("#555555", "D"),
    "grad_output": ("#0072B2", "o"),
    "grad_input": ("#D55E00", "s"),
    "param_grads": ("#009E73", "^"),
}
WARNING = "#CC0000"
NONFINITE: Any = {"label": "nan or inf", "color": WARNING, "marker": "x"}
ZERO: Any = {"label": "zero", "color": "0.5", "marker": "o"}

NO_PASS = "no backward pass was recorded"

LINE = 0.34  # inches per module
LINES = 100  # modules a figure has room for; with more, some go unnamed
LETTER = 0.085  # width of a letter of a name, about, in inches
SHORT = 24  # letters of a name that fit a figure of the usual width
ENTRY = 1.4  # width of an entry of the legend, in inches


def axes_for(labels: Sequence[str], line: float) -> Axes:
    """Return the axes of a new figure, with `line` inches for each module."""
    longest = max(map(len, labels), default=0)
    beyond = max(0, min(longest, LONG) - SHORT)
    return new_axes(6 + LETTER * beyond, 1.4 + line * min(max(len(labels), 3), LINES))


def mark_beside(rows: set[int], x: float, ax: Axes, **style: Any) -> None:
    """Put a marker beside some rows, at `x`; 1 is the right edge."""
    if rows:
        style |= {"transform": ax.get_yaxis_transform(), "clip_on": False}
        ax.plot([x] * len(rows), sorted(rows), linestyle="none", **style)


def is_nonfinite(norm: float) -> bool:
    """Tell whether a norm is NaN or infinite."""
    return not math.isfinite(norm)


def name_rows(labels: Sequence[str], ax: Axes) -> list[int]:
    """Write names beside the rows, the first on top; return the rows that got one."""
    room = min(max(int(inches_of(ax).height / NAME), 1), LINES)
    named = list(range(0, len(labels), math.ceil(len(labels) / room) or 1))
    # A dollar sign in a name begins no formula.
    ax.set_yticks(named, [in_short(labels[row]) for row in named], parse_math=False)
    ax.set_ylim(max(len(labels), 1) - 0.5, -0.5)
    return named


def upright(first: str, rest: str, ax: Axes) -> str:
    """Return the label of an upright axis: in two lines if the axis is short."""
    is_short = inches_of(ax).height < LETTER * len(f"{first} {rest}")
    return ("\n" if is_short else " ").join([first, rest])


def finished(ax: Axes, nothing: str) -> Figure:
    """Add the legend, or say why there is nothing, and return the figure."""
    labels = ax.get_legend_handles_labels()[1]
    if nothing:
        ax.set_title(nothing)
    elif labels:
        columns = min(max(int(inches_of(ax).width / ENTRY), 1), 3)
        lines = math.ceil(len(labels) / columns)
        columns = math.ceil(len(labels) / lines)  # lines of about equal length
        ax.legend(
            frameon=False, loc="lower right", bbox_to_anchor=(1, 1), ncols=columns
        )
    return figure_of(ax)
