"""Figures, drawn with matplotlib from plain numbers."""

# matplotlib's own annotations leave the keywords of its methods open.
# pyright: reportUnknownMemberType=false

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import StepPatch
from matplotlib.ticker import FuncFormatter, MaxNLocator

from gradlib.figure import LONG, NAME, figure_of, in_short, inches_of, new_axes
from gradlib.log_axes import label_powers_of_ten, make_logarithmic

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
RING: Any = {
    "marker": "o",
    "markersize": 14,
    "markerfacecolor": "none",
    "markeredgewidth": 2,
    "color": WARNING,
}

# A line joins the values that flow from module to module.
FLOWING = ("output", "grad_output", "grad_input")

NO_PASS = "no backward pass was recorded"

LINE = 0.34  # inches per module
ROW = 0.2  # inches per module in a heat map, which has no markers
LINES = 100  # modules a figure has room for; with more, some go unnamed
LETTER = 0.085  # width of a letter of a name, about, in inches
SHORT = 24  # letters of a name that fit a figure of the usual width
ENTRY = 1.4  # width of an entry of the legend, in inches


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
    ax = ax or _axes_for(labels, LINE)
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
    nonfinite = {i for i, column in columns if any(map(_is_nonfinite, column))}
    _mark_beside(zero, 1.05, ax, **ZERO)
    _mark_beside(nonfinite, 1.02, ax, **NONFINITE)
    _name_rows(labels, ax)
    ax.set_ylabel(_upright("the gradient", "flows upwards", ax))
    ax.set_xlabel(f"norm of {of}")
    ax.grid(axis="x", alpha=0.3)
    return _finished(ax, "" if values else NO_PASS)


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
    ax = ax or _axes_for(labels, ROW)
    found = [v for row in norms for v in row if v is not None]
    colours = [math.log10(v) for v in found if 0 < v < math.inf]
    if colours:
        _draw_colours(norms, colours, of, ax)
    _mark_cells(norms, lambda v: v == 0, ax, **ZERO)
    _mark_cells(norms, _is_nonfinite, ax, **NONFINITE)
    _name_rows(labels, ax)
    ax.set_xlim(-0.5, max(len(steps), 1) - 0.5)
    ax.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    ax.xaxis.set_major_formatter(FuncFormatter(partial(_number_of, steps)))
    ax.set_xlabel("forward pass")
    ax.grid(visible=False)  # the grid of some styles would lie over the cells
    return _finished(ax, "" if found else NO_PASS)


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
    ax = ax or _axes_for(labels, LINE)
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
    _mark_beside(infinite, 1.02, ax, **NONFINITE | {"label": "incomparable"})
    if first and first[1] == math.inf:
        _mark_beside({first[0]}, 1.02, ax, label=first[2], **RING)
    _name_rows(labels, ax)
    ax.set_ylabel(_upright("the forward", "goes downwards", ax))
    ax.set_xlabel("difference, as a part of the value")
    ax.grid(axis="x", alpha=0.3)
    return _finished(ax, "" if any(values) else nothing)


@dataclass(frozen=True)
class Ridge:
    """How the entries of one module's gradients are distributed.

    Attributes:
        counts: How many entries have a magnitude in each bin.
        zeros: How many are exactly zero.
        nonfinite: How many are NaN or infinite.
    """

    counts: Sequence[float]
    zeros: int
    nonfinite: int


def ridges(
    labels: Sequence[str],
    distributions: Sequence[Ridge],
    powers: tuple[float, float],
    kind: str,
    nothing: str,
    ax: Axes | None = None,
) -> Figure:
    """Draw how large the entries of gradients are, one distribution per module.

    Each is drawn as high as its row. The share of zeros, which have no place on a
    logarithmic axis, is written beside it.

    Args:
        labels: The modules, in forward order: the first is drawn on top.
        distributions: One for each label.
        powers: The powers of ten where the first bin begins and the last one ends.
        kind: What the entries are of.
        nothing: What to say if there are no entries.
        ax: Where to draw; a new figure if left out.

    Returns:
        The figure drawn on.
    """
    ax = ax or _axes_for(labels, LINE)
    low, high = powers
    colour = STYLES[kind][0]
    for row, ridge in enumerate(distributions):
        highest = max(ridge.counts)
        if highest:
            width = (high - low) / len(ridge.counts)
            edges = [low + width * i for i in range(len(ridge.counts) + 1)]
            tops = [row + 0.4 - 0.8 * count / highest for count in ridge.counts]
            steps = StepPatch(tops, edges, baseline=row + 0.4, facecolor=colour, lw=0)
            ax.add_artist(steps)  # ax.stairs() would rescale the axis each time
    named = _name_rows(labels, ax)
    ax.set_xlim(low, high)
    label_powers_of_ten(ax.xaxis, low, high)
    if not any(any(ridge.counts) for ridge in distributions):
        ax.set_xticks([])
    _tell_zeros(distributions, named, ax)
    nonfinite = {i for i, it in enumerate(distributions) if it.nonfinite}
    _mark_beside(nonfinite, 1.02, ax, **NONFINITE)
    ax.set_xlabel(f"magnitude of the entries of {kind}")
    ax.grid(axis="x", alpha=0.3)
    ax.set_axisbelow(True)
    something = any(any(it.counts) or it.zeros or it.nonfinite for it in distributions)
    return _finished(ax, "" if something else nothing)


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
    bar.set_label(_upright("norm of", of, ax))
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


def _is_nonfinite(norm: float) -> bool:
    return not math.isfinite(norm)


def _tell_zeros(distributions: Sequence[Ridge], named: Sequence[int], ax: Axes) -> None:
    """Write the share of zeros beside each named row, if there are any at all."""
    if not any(ridge.zeros for ridge in distributions):
        return
    beside = ax.get_yaxis_transform()  # 1 is the right edge
    ax.text(1.05, -0.6, "zeros", transform=beside, va="bottom")
    for row in named:
        ridge = distributions[row]
        count = sum(ridge.counts) + ridge.zeros + ridge.nonfinite
        if count:
            text = f"{ridge.zeros / count:.0%}"
            ax.text(1.05, row, text, transform=beside, va="center")


def _mark_beside(rows: set[int], x: float, ax: Axes, **style: Any) -> None:
    """Put a marker beside some rows, at `x`; 1 is the right edge."""
    if rows:
        style |= {"transform": ax.get_yaxis_transform(), "clip_on": False}
        ax.plot([x] * len(rows), sorted(rows), linestyle="none", **style)


def _name_rows(labels: Sequence[str], ax: Axes) -> list[int]:
    """Write names beside the rows, the first on top; return the rows that got one."""
    room = min(max(int(inches_of(ax).height / NAME), 1), LINES)
    named = list(range(0, len(labels), math.ceil(len(labels) / room) or 1))
    # A dollar sign in a name begins no formula.
    ax.set_yticks(named, [in_short(labels[row]) for row in named], parse_math=False)
    ax.set_ylim(max(len(labels), 1) - 0.5, -0.5)
    return named


def _number_of(steps: Sequence[int], at: float, _place: int) -> str:
    """Return the label below a column: the number of its step."""
    return str(steps[int(at)]) if 0 <= at < len(steps) else ""


def _upright(first: str, rest: str, ax: Axes) -> str:
    """Return the label of an upright axis: in two lines if the axis is short."""
    is_short = inches_of(ax).height < LETTER * len(f"{first} {rest}")
    return ("\n" if is_short else " ").join([first, rest])


def _finished(ax: Axes, nothing: str) -> Figure:
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


def _axes_for(labels: Sequence[str], line: float) -> Axes:
    """Return the axes of a new figure, with `line` inches for each module."""
    longest = max(map(len, labels), default=0)
    beyond = max(0, min(longest, LONG) - SHORT)
    return new_axes(6 + LETTER * beyond, 1.4 + line * min(max(len(labels), 3), LINES))
