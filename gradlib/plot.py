"""Figures, drawn with matplotlib from plain numbers."""

# matplotlib's own annotations leave the keywords of its methods open.
# pyright: reportUnknownMemberType=false

import importlib
import math
from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any, cast

import matplotlib as mpl
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullFormatter

# Blue, orange and green of the Okabe-Ito palette: told apart by colour-blind readers
# too, and by their markers.
STYLES = (("#0072B2", "o"), ("#D55E00", "s"), ("#009E73", "^"))

# What flows from module to module is joined by a line.
FLOWING = ("grad_output", "grad_input")

LINE = 0.34  # inches a module
LINES = 100  # modules a figure has room for; with more, some go unnamed


def gradient_flow(
    labels: Sequence[str],
    norms: Mapping[str, Sequence[Sequence[float]]],
    ax: Axes | None = None,
) -> Figure:
    """Draw gradient norms on a logarithmic axis, one line of text a module.

    Args:
        labels: The modules, in forward order: the first is drawn on top.
        norms: For each kind of gradient, the norms found at each label: none, one, or
            several. Several are drawn as their median with a band from the smallest
            to the largest.
        ax: Where to draw; a new figure without it.

    Returns:
        The figure drawn on.
    """
    if ax is None:
        ax = _new_axes(height=1.4 + LINE * min(max(len(labels), 3), LINES))
    for (kind, columns), (colour, marker) in zip(norms.items(), STYLES, strict=False):
        # A logarithmic axis has no place for zero: a gap shows it.
        found = [[v for v in column if 0 < v < math.inf] for column in columns]
        at = [i for i, column in enumerate(found) if column]
        low, middle, high = (
            [statistic(found[i]) for i in at] for statistic in (min, median, max)
        )
        flows = kind in FLOWING
        line = "-" if flows else "none"
        ax.plot(middle, at, label=kind, color=colour, marker=marker, linestyle=line)
        if flows:
            ax.fill_betweenx(at, low, high, color=colour, alpha=0.15, linewidth=0)
        else:
            ax.hlines(at, low, high, color=colour, alpha=0.4)
    values = [v for columns in norms.values() for column in columns for v in column]
    if any(0 < v < math.inf for v in values):
        _scale(ax)
    _mark_nonfinite(norms, ax)
    every = math.ceil(len(labels) / LINES) or 1
    ax.set_yticks(range(0, len(labels), every), labels[::every])
    ax.set_ylim(max(len(labels), 1) - 0.5, -0.5)
    ax.set_ylabel("the gradient flows upwards")
    ax.set_xlabel("norm of the gradient")
    ax.grid(axis="x", alpha=0.3)
    if values:
        ax.legend(frameon=False, loc="lower right", bbox_to_anchor=(1, 1), ncols=4)
    else:
        ax.set_title("no backward pass was recorded")
    figure = ax.get_figure(root=True)
    assert figure is not None
    return figure


def _mark_nonfinite(norms: Mapping[str, Sequence[Sequence[float]]], ax: Axes) -> None:
    """Put a cross beside every module whose gradients hold NaN or infinity."""
    at = {
        i
        for columns in norms.values()
        for i, column in enumerate(columns)
        if not all(map(math.isfinite, column))
    }
    if at:
        ax.scatter(
            [1.02] * len(at),
            sorted(at),
            marker="x",
            color="#CC0000",
            clip_on=False,
            transform=ax.get_yaxis_transform(),  # 1 is the right edge
            label="nan or inf",
        )


def _scale(ax: Axes) -> None:
    """Make the horizontal axis logarithmic, with plain numbers on it."""
    ax.set_xscale("log")
    ax.xaxis.set_major_formatter("{x:g}")
    low, high = ax.get_xlim()
    if high < 100 * low:  # hardly a power of ten in sight: label 2, 3 and 5 as well
        ax.xaxis.set_minor_locator(LogLocator(subs=(2, 3, 5)))
        ax.xaxis.set_minor_formatter("{x:g}")
    else:
        ax.xaxis.set_minor_formatter(NullFormatter())


class _ShownOnce(Figure):
    """A figure that a notebook shows once, also where the cell ends with it."""

    def _ipython_display_(self) -> None:
        if "inline" in mpl.get_backend():
            plt.close(self)  # or pyplot would show it again at the end of the cell
        cast(Any, self).__class__ = Figure  # the notebook knows how to show that
        importlib.import_module("IPython.display").display(self)


def _new_axes(height: float) -> Axes:
    """Return the axes of a new figure, `height` inches high."""
    figure = plt.figure(
        FigureClass=_ShownOnce, figsize=(6, height), layout="constrained"
    )
    return figure.subplots()
