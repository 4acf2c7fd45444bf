"""Draw the committed results of benchmarks, where a page holds a marker for them.

<div class="jacobian-ratios" data-results="jacobian-cpu"></div>
<div class="jacobian-ranks" data-results="jacobian-random-cpu"></div>
<div class="recorder-ratios" data-results="recorder-cpu"></div>
<div class="measured-and-counted" data-results="jacobian-cpu"></div>
"""

import io
import re
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import NullFormatter
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import Files
from mkdocs.structure.pages import Page

from benchmarks.names import (
    BATCHED,
    LOOP,
    NONE,
    OURS,
    OURS_CHECKED,
    UNIT_JVPS,
    counted_threads,
)
from mkdocs_hooks import figures
from mkdocs_hooks.benchmark_jacobians import best_other, by_net, others, to_ours
from mkdocs_hooks.benchmark_tables import grouped, load

COUNTED = {
    "reverse": BATCHED,
    "forward": UNIT_JVPS,
    "loop": LOOP,
}
"""The contender that goes the way a plan counts; gradlib goes its planned way."""

GREY = "#8a8a8a"

Results = dict[str, Any]


class Picture(NamedTuple):
    """A figure, and its alt text."""

    figure: Figure
    alt: str


def on_page_markdown(
    markdown: str, *, page: Page, config: MkDocsConfig, files: Files
) -> str:
    """Replace the markers of a page."""

    def made(marker: re.Match[str]) -> str:
        kind, name = marker[1], marker[2]
        with style():
            figure, alt = MADE[kind](load(name, page))
            svg = io.StringIO()
            figure.savefig(svg, format="svg", facecolor="none", metadata={"Date": None})
        uri = f"{page.file.src_uri.removesuffix('.md')}-{kind}-{name}.svg"
        return figures.image(svg.getvalue(), alt, uri, page, config, files)

    return MARKER.sub(made, markdown)


def style() -> AbstractContextManager[None]:
    """Return the context in which figures are drawn in the site's style."""
    chosen = mpl.rc_params_from_file(Path(__file__).with_name("matplotlibrc"))
    return mpl.rc_context(dict(chosen))


def jacobian_ratios(results: Results) -> Picture:
    """Draw, for each network, how long the other ways take on one thread."""
    nets = by_net([row for row in results["rows"] if row["threads"] == 1])
    figure, ax = _figure(len(nets))
    every = [[*map(to_ours, others(ways))] for ways in nets.values()]
    best = [to_ours(best_other(ways)) for ways in nets.values()]
    checked = [
        to_ours(ways[OURS_CHECKED]) for ways in nets.values() if OURS_CHECKED in ways
    ]
    for place, ratios in enumerate(every):
        label = "other ways" if not place else None
        ax.plot(ratios, [place] * len(ratios), "o", color=GREY, alpha=0.6, label=label)
    ax.plot(best, range(len(best)), "o", markersize=9, label="the fastest of them")
    ax.plot(checked, range(len(checked)), "^", label="gradlib with check=True")
    said = "time, as a multiple of\ngradlib's with check=False"
    _compared(ax, [*nets], said, columns=2)
    return Picture(
        figure,
        f"For {len(nets)} networks, the time of other ways as a multiple of gradlib's, "
        "with one thread, on a logarithmic axis. The fastest other way takes "
        f"{min(best):.2f} to {max(best):.2f} times as long, the slowest up to "
        f"{max(map(max, every)):.0f} times; gradlib with its check takes "
        f"{min(checked):.2f} to {max(checked):.2f} times.",
    )


def jacobian_ranks(results: Results) -> Picture:
    """Draw the times of the fastest other way on each network, in ascending order."""
    figure = Figure()
    ax = figure.subplots()
    said: list[str] = []
    for threads, rows in grouped(results["rows"], "threads"):
        nets = by_net(rows)
        ratios = sorted(to_ours(best_other(ways)) for ways in nets.values())
        name = counted_threads(threads)
        ax.plot(range(1, 1 + len(ratios)), ratios, ".", markersize=8, label=name)
        said.append(f"{name}, {ratios[0]:.2f} to {ratios[-1]:.2f} times as long")
    ax.axhline(1, color=GREY, linewidth=1)
    ax.set(yscale="log", xlabel="networks, in the order of the ratio")
    ax.set_ylabel("time of the fastest other way,\nas a multiple of gradlib's")
    _plain(ax.yaxis, 0.5, 1, 2, 5, 10, 20)
    ax.legend(loc="upper left")
    return Picture(
        figure,
        "The time of the fastest other way as a multiple of gradlib's, on a "
        "logarithmic axis, for each network drawn by chance, from the smallest ratio "
        f"to the largest: with {'; with '.join(said)}.",
    )


def recorder_ratios(results: Results) -> Picture:
    """Draw how long a whole use of each recorder takes on one thread, by network."""
    rows = [
        it
        for it in results["times"]
        if it["threads"] == 1 and it["use"] and it["contender"] != NONE
    ]
    names = [*dict.fromkeys(it["contender"] for it in rows)]
    figure, ax = _figure(len(names))
    said: list[str] = []
    for marker, (net, taken) in zip("osD^v", grouped(rows, "net"), strict=False):
        ratios = {it["contender"]: it["use"]["to_none"]["median"] for it in taken}
        places = [names.index(it) for it in ratios]
        ax.plot([*ratios.values()], places, marker, alpha=0.8, label=net)
        said.append(f"{ratios[OURS]:.2f} times for {net}")
    _compared(
        ax, names, "time of a step, as a multiple\nof that without hooks", columns=1
    )
    return Picture(
        figure,
        f"For {len(names)} ways to record a step, the time as a multiple of that "
        f"without hooks, on a logarithmic axis. gradlib takes {', '.join(said)}.",
    )


def measured_and_counted(results: Results) -> Picture:
    """Draw measured times against counted multiply-adds."""
    taken = {
        (row["net"], row["contender"]): row["ms"]["median"]
        for row in results["rows"]
        if row["threads"] == 1 and "ms" in row
    }
    figure = Figure(figsize=(6, 4.5))
    ax = figure.subplots()
    modes = dict.fromkeys(plan["mode"] for plan in results["plans"]) | COUNTED
    for mode, marker in zip(modes, "o^svDP", strict=False):
        points = [
            (plan["multiply_adds"][mode], taken[plan["net"], name])
            for plan in results["plans"]
            for name in [OURS if mode == plan["mode"] else COUNTED.get(mode)]
            if mode in plan["multiply_adds"] and (plan["net"], name) in taken
        ]
        if points:
            label = f"{mode}: {COUNTED.get(mode, OURS)}"
            ax.plot(*zip(*points, strict=True), marker, label=label, alpha=0.8)
    ax.set(xscale="log", yscale="log", xlabel="multiply-adds", ylabel="milliseconds")
    ax.legend()
    return Picture(
        figure,
        f"Milliseconds against multiply-adds, both on logarithmic axes, for "
        f"{len(results['plans'])} networks and the ways that a plan counts. More "
        "multiply-adds mostly take more time; below some there is a floor.",
    )


MADE: dict[str, Callable[[Results], Picture]] = {
    "jacobian-ratios": jacobian_ratios,
    "jacobian-ranks": jacobian_ranks,
    "recorder-ratios": recorder_ratios,
    "measured-and-counted": measured_and_counted,
}
"""What draws the results at a marker."""

MARKER = re.compile(rf'<div class="({"|".join(MADE)})" data-results="([\w-]+)"></div>')


def _figure(lines: int) -> tuple[Figure, Axes]:
    """Return a figure with room for `lines` rows."""
    figure = Figure(figsize=(6, 1.4 + 0.34 * lines))
    return figure, figure.subplots()


def _compared(ax: Axes, names: Sequence[str], what: str, *, columns: int) -> None:
    """Name the rows of a figure, and what is on its logarithmic axis.

    Args:
        ax: The axes.
        names: The names of the rows, from the top; gradlib's are bold.
        what: The label of the axis.
        columns: How many columns the legend has.
    """
    ax.axvline(1, color=GREY, linewidth=1, zorder=0)
    ax.set(xscale="log", xlabel=what, yticks=range(len(names)), yticklabels=names)
    ax.invert_yaxis()
    ax.grid(axis="y", alpha=0.25)
    ax.tick_params(axis="y", length=0)
    _plain(ax.xaxis, 1, 3, 10, 30, 100, 300)  # more would touch on a phone
    for label in ax.get_yticklabels():
        label.set_fontweight("bold" if label.get_text().startswith(OURS) else "normal")
    ax.figure.legend(loc="outside upper center", ncols=columns)


def _plain(axis: Any, *ticks: float) -> None:
    """Show the ticks that a logarithmic axis reaches, as plain numbers."""
    low, high = axis.get_view_interval()
    shown = [tick for tick in ticks if low <= tick <= high]
    axis.set_ticks(shown, [f"{tick:g}" for tick in shown])
    axis.set_minor_formatter(NullFormatter())
