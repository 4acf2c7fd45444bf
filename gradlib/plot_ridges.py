"""How the entries of gradients are distributed: a ridge for each module."""

# matplotlib's own annotations leave the keywords of its methods open.
# pyright: reportUnknownMemberType=false

from collections.abc import Sequence
from dataclasses import dataclass

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import StepPatch

from gradlib.log_axes import label_powers_of_ten
from gradlib.module_rows import (
    LINE,
    NONFINITE,
    STYLES,
    axes_for,
    finished,
    mark_beside,
    name_rows,
)


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
    ax = ax or axes_for(labels, LINE)
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
    named = name_rows(labels, ax)
    ax.set_xlim(low, high)
    label_powers_of_ten(ax.xaxis, low, high)
    if not any(any(ridge.counts) for ridge in distributions):
        ax.set_xticks([])
    _tell_zeros(distributions, named, ax)
    nonfinite = {i for i, it in enumerate(distributions) if it.nonfinite}
    mark_beside(nonfinite, 1.02, ax, **NONFINITE)
    ax.set_xlabel(f"magnitude of the entries of {kind}")
    ax.grid(axis="x", alpha=0.3)
    ax.set_axisbelow(True)
    something = any(any(it.counts) or it.zeros or it.nonfinite for it in distributions)
    return finished(ax, "" if something else nothing)


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
