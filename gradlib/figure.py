"""Figures and axes, for everything that is drawn with matplotlib."""

# matplotlib's own annotations leave the keywords of its methods open.
# pyright: reportUnknownMemberType=false

import importlib
from textwrap import fill
from typing import Any, cast

import matplotlib as mpl
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.transforms import Bbox

from gradlib.errors import RecordingArgumentError
from gradlib.render import in_one_line

LETTER = 0.075  # inches per letter of a sentence
NAME = 0.15  # inches that the name of a row is high
LONG = 100  # letters of a name beyond which its middle is left out


class _ShownOnce(Figure):
    """A figure that a notebook shows once, even if it is the cell's last value."""

    def _ipython_display_(self) -> None:
        if "inline" in mpl.get_backend():
            plt.close(self)  # or pyplot would show it again at the end of the cell
        cast(Any, self).__class__ = Figure  # the notebook can show a plain one
        importlib.import_module("IPython.display").display(self)


def new_axes(width: float, height: float) -> Axes:
    """Return the axes of a new figure of `width` by `height` inches."""
    figure = plt.figure(
        FigureClass=_ShownOnce, figsize=(width, height), layout="constrained"
    )
    return figure.subplots()


def message(text: str, ax: Axes | None = None) -> Figure:
    """Write a text where a figure would be.

    Args:
        text: Why there is no figure.
        ax: Where to write; a new figure if left out.

    Returns:
        The figure written on.
    """
    ax = ax or new_axes(5, 1.5)
    ax.set_axis_off()
    letters = max(int(inches_of(ax).width / LETTER), 1)
    ax.text(
        0.5, 0.5, fill(text, letters), transform=ax.transAxes, ha="center", va="center"
    )
    return figure_of(ax)


def in_short(label: str, most: int = LONG) -> str:
    """Return a name, without its middle if it has more letters than can be shown."""
    label, half = in_one_line(label), most // 2
    return label if len(label) <= most else f"{label[: half - 1]}…{label[-half:]}"


def require_axes(ax: object) -> None:
    """Raise unless `ax` is Axes or ``None``."""
    if not (ax is None or isinstance(ax, Axes)):
        raise RecordingArgumentError(
            "plot(ax=...): ax must be the Axes to draw on, but it is of type "
            f"{type(ax).__name__}. Give one of those that plt.subplots() makes."
        )


def inches_of(ax: Axes) -> Bbox:
    """Return the box that axes take on their figure, in inches."""
    return ax.get_window_extent().transformed(figure_of(ax).dpi_scale_trans.inverted())


def figure_of(ax: Axes) -> Figure:
    """Return the figure that axes belong to."""
    figure = ax.get_figure(root=True)
    assert figure is not None
    return figure
