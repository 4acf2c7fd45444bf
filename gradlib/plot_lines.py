"""Norms, or errors, on a logarithmic axis: a line with a row for each module."""

# matplotlib's own annotations leave the keywords of its methods open.
# pyright: reportUnknownMemberType=false

import math
from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from gradlib.log_axes import make_logarithmic
from gradlib.module_rows import (
    LINE,
    LINES,
    NO_PASS,
    NONFINITE,
    STYLES,
    WARNING,
    ZERO,
    axes_for,
    finished,
    is_nonfinite,
    mark_beside,
    name_rows,
    upright,
)

RING: Any = {
    "marker": "o",
    "markersize": 14,
    "markerfacecolor": "none",
    "markeredgewidth": 2,
    "color": WARNING,
}

# A line joins the values that flow from module to module.
FLOWING = ("output", "grad_output", "grad_input")


def gradient_flow(
    labels: Sequence[str],
    norms: Mapping[str, Sequence[Sequence[float]]],
    totals: Mapping[str, Sequence[Sequence[float]]],
    of: str = "the gradient",
    ax: Axes | None = None,
) -> Figure:
    """Draw gradient norms on a logarithmic axis, one row per module.

    Args:
        labels: The modules, in forward order: the first is drawn on top.
        norms: For each kind of gradient, the norms found at each label: none, one, or
            several. Several are drawn as their median with a band from the smallest
            to the largest.
        totals: The same for the totals, if they are to be drawn; only as the median.
        of: What the norms are of.
        ax: Where to draw; a new figure if left out.

    Returns:
        The figure drawn on.
    """
    ax = ax or axes_for(labels, LINE)
    for kind, columns in norms.items():
        if any(columns) or not any(map(any, norms.values())):
            _draw_norms(kind, columns, ax)  # else only the legend would show the kind
    for kind, columns in totals.items():
        _draw_totals(kind, columns, norms[kind], ax)
    every = [*norms.values(), *totals.values()]
    values = [v for columns in every for column in columns for v in column]
    if any(0 < v < math.inf for v in values):
        make_logarithmic(ax)
    else:
        ax.set_xticks([])
    columns = [(i, column) for it in every for i, column in enumerate(it)]
    zero = {i for i, column in columns if 0 in column}
    nonfinite = {i for i, column in columns if any(map(is_nonfinite, column))}
    mark_beside(zero, 1.05, ax, **ZERO)
    mark_beside(nonfinite, 1.02, ax, **NONFINITE)
    name_rows(labels, ax)
    ax.set_ylabel(upright("the gradient", "flows upwards", ax))
    ax.set_xlabel(f"norm of {of}")
    ax.grid(axis="x", alpha=0.3)
    return finished(ax, "" if values else NO_PASS)


def errors(
    labels: Sequence[str],
    found: Mapping[str, Sequence[float | None]],
    allowed: float,
    first: tuple[int, float, str] | None,
    nothing: str,
    ax: Axes | None = None,
) -> Figure:
    """Draw on a logarithmic axis how far apart two runs are, one row per module.

    Args:
        labels: The modules, in forward order: the first is drawn on top.
        found: For each kind of value the error at each label; ``None`` where there is
            none. An error of zero has no place on the axis: a gap shows it.
        allowed: The error that a single value may have.
        first: The row and the error where the runs first part, and what the legend
            calls it; ``None`` if they do not.
        nothing: What to say if there is nothing to draw.
        ax: Where to draw; a new figure if left out.

    Returns:
        The figure drawn on.
    """
    ax = ax or axes_for(labels, LINE)
    for kind, column in found.items():
        _draw_norms(kind, [[] if v is None else [v] for v in column], ax)
    values = [v for column in found.values() for v in column if v is not None]
    if any(0 < v < math.inf for v in values):
        if 0 < allowed < math.inf:  # else it has no place on the axis
            style: Any = {"color": "0.5", "linestyle": "--", "zorder": 0}
            ax.axvline(allowed, label=f"rtol {allowed:.2g}", **style)
        if first and first[1] < math.inf:
            row, at, label = first
            ax.plot([at], [row], label=label, linestyle="none", **RING)
        make_logarithmic(ax)
    else:
        ax.set_xticks([])
    infinite = {i for it in found.values() for i, v in enumerate(it) if v == math.inf}
    mark_beside(infinite, 1.02, ax, **NONFINITE | {"label": "incomparable"})
    if first and first[1] == math.inf:
        mark_beside({first[0]}, 1.02, ax, label=first[2], **RING)
    name_rows(labels, ax)
    ax.set_ylabel(upright("the forward", "goes downwards", ax))
    ax.set_xlabel("difference, as a part of the value")
    ax.grid(axis="x", alpha=0.3)
    return finished(ax, "" if any(values) else nothing)


def _draw_norms(kind: str, columns: Sequence[Sequence[float]], ax: Axes) -> None:
    colour, _ = STYLES[kind]
    # A logarithmic axis has no place for zero: a gap shows it.
    found = [[v for v in column if 0 < v < math.inf] for column in columns]
    at = [i for i, column in enumerate(found) if column]
    low, middle, high = (
        [statistic(found[i]) for i in at] for statistic in (min, median, max)
    )
    flows = kind in FLOWING
    style = _style(kind, columns)
    ax.plot(middle, at, label=kind, linestyle="-" if flows else "none", **style)
    if flows:
        ax.fill_betweenx(at, low, high, color=colour, alpha=0.15, linewidth=0)
    else:
        ax.hlines(at, low, high, color=colour, alpha=0.4)


def _draw_totals(
    kind: str,
    columns: Sequence[Sequence[float]],
    shares: Sequence[Sequence[float]],
    ax: Axes,
) -> None:
    """Draw totals as hollow markers, each with a dotted line to its share."""
    colour, _ = STYLES[kind]
    at = [i for i, it in enumerate(columns) if it and 0 < median(it) < math.inf]
    middle = [median(columns[i]) for i in at]
    if not at:
        return
    label = f"{kind}_total"
    style = _style(kind, columns)
    ax.plot(middle, at, label=label, linestyle="none", markerfacecolor="none", **style)
    for row, total in zip(at, middle, strict=True):
        share = median(shares[row]) if shares[row] else total
        if 0 < share < math.inf:
            ax.hlines(row, share, total, color=colour, linestyle=":")


def _style(kind: str, rows: Sequence[object]) -> dict[str, Any]:
    """Return how to draw a kind, with markers so small that each row shows its own."""
    colour, marker = STYLES[kind]
    points = min(6, max(6 * LINES / max(len(rows), 1), 2))
    return {"color": colour, "marker": marker, "markersize": points}
