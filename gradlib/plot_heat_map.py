"""Norms as colours: a row for each module, a column for each step."""

# matplotlib's own annotations leave the keywords of its methods open.
# pyright: reportUnknownMemberType=false

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator

from gradlib.figure import figure_of
from gradlib.log_axes import label_powers_of_ten
from gradlib.module_rows import (
    NO_PASS,
    NONFINITE,
    ZERO,
    axes_for,
    finished,
    is_nonfinite,
    name_rows,
    upright,
)

ROW = 0.2  # inches per module in a heat map, which has no markers


def heat_map(
    labels: Sequence[str],
    steps: Sequence[int],
    norms: Sequence[Sequence[float | None]],
    of: str,
    ax: Axes | None = None,
) -> Figure:
    """Draw gradient norms as colours, a row for each module, a column for each step.

    Args:
        labels: The modules, in forward order: the first is drawn on top.
        steps: The numbers of the steps, ascending.
        norms: For each label the norm in each step; ``None`` where there is none.
        of: What the norms are of.
        ax: Where to draw; a new figure if left out.

    Returns:
        The figure drawn on.
    """
    ax = ax or axes_for(labels, ROW)
    found = [v for row in norms for v in row if v is not None]
    colours = [math.log10(v) for v in found if 0 < v < math.inf]
    if colours:
        _draw_colours(norms, colours, of, ax)
    _mark_cells(norms, lambda v: v == 0, ax, **ZERO)
    _mark_cells(norms, is_nonfinite, ax, **NONFINITE)
    name_rows(labels, ax)
    ax.set_xlim(-0.5, max(len(steps), 1) - 0.5)
    ax.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    ax.xaxis.set_major_formatter(FuncFormatter(partial(_number_of, steps)))
    ax.set_xlabel("forward pass")
    ax.grid(visible=False)  # the grid of some styles would lie over the cells
    return finished(ax, "" if found else NO_PASS)


def _draw_colours(
    norms: Sequence[Sequence[float | None]], colours: list[float], of: str, ax: Axes
) -> None:
    """Draw the norms that have a logarithm, and leave the other cells blank."""
    low, high = min(colours), max(colours)
    widened = 0.5 if high - low < 0.1 else 0
    image = ax.imshow(
        [
            [math.log10(v) if v and 0 < v < math.inf else math.nan for v in row]
            for row in norms
        ],
        aspect="auto",
        interpolation="nearest",
        cmap="viridis",  # lightness alone tells it: to colour-blind readers, in grey
        vmin=low - widened,
        vmax=high + widened,
    )
    bar = figure_of(ax).colorbar(image, ax=ax)
    bar.set_label(upright("norm of", of, ax))
    label_powers_of_ten(bar.ax.yaxis, *image.get_clim())


def _mark_cells(
    norms: Sequence[Sequence[float | None]],
    belongs: Callable[[float], bool],
    ax: Axes,
    **style: Any,
) -> None:
    """Put a marker on each cell of a heat map for whose norm `belongs` holds."""
    at = [
        (column, row)
        for row, values in enumerate(norms)
        for column, v in enumerate(values)
        if v is not None and belongs(v)
    ]
    if at:
        across, down = zip(*at, strict=True)
        cells = max(len(norms), *map(len, norms))
        ax.scatter(across, down, max(36 / (1 + cells / 20), 3), **style)


def _number_of(steps: Sequence[int], at: float, _place: int) -> str:
    """Return the label below a column: the number of its step."""
    return str(steps[int(at)]) if 0 <= at < len(steps) else ""
