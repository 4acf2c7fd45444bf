"""The figures of timings show what was measured, and say so to who cannot see them."""

import re
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, cast

import pytest
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from mkdocs.structure.pages import Page

from mkdocs_hooks import benchmark_figures as figures
from mkdocs_hooks import benchmark_tables as tables

PAGE = cast(Page, SimpleNamespace(file=SimpleNamespace(src_uri="how-fast.md")))
FIGURES = {
    "jacobian-ratios": "jacobian-cpu",
    "jacobian-ranks": "jacobian-random-cpu",
    "recorder-ratios": "recorder-cpu",
    "measured-and-counted": "jacobian-cpu",
}


def test_every_figure_is_tried() -> None:
    assert FIGURES.keys() == figures.MADE.keys()


def results(kind: str) -> dict[str, Any]:
    return tables.load(FIGURES[kind], PAGE)


def drawn(kind: str, found: dict[str, Any]) -> tuple[Axes, str]:
    figure, alt = figures.MADE[kind](found)
    (ax,) = figure.axes
    return ax, alt


def numbers(ax: Axes, axis: str) -> list[float]:
    """Return what stands along an axis, of all dots."""
    dots = [line for line in ax.lines if line.get_marker() != "None"]
    return [float(it) for line in dots for it in getattr(line, f"get_{axis}data")()]


def rows_of(found: dict[str, Any]) -> Iterator[dict[str, Any]]:
    return (row for row in found["rows"] if row["threads"] == 1 and "ms" in row)


def test_each_ratio_is_a_dot_in_the_line_of_its_network() -> None:
    found = results("jacobian-ratios")
    ax, _ = drawn("jacobian-ratios", found)
    nets = [label.get_text() for label in ax.get_yticklabels()]
    dots = {*zip(numbers(ax, "x"), numbers(ax, "y"), strict=True)}
    for row in rows_of(found):
        dot = row["to_gradlib"]["median"], nets.index(row["net"])
        is_ours = row["contender"].startswith("gradlib")
        if row["contender"].endswith("a loss"):
            continue
        if not is_ours or row["contender"] == figures.OURS_CHECKED:
            assert dot in dots


def test_the_fastest_stands_out() -> None:
    found = results("jacobian-ratios")
    ax, _ = drawn("jacobian-ratios", found)
    line = next(it for it in ax.lines if it.get_label() == "the fastest of them")
    for net, ratio in enumerate(cast(Any, line.get_xdata())):
        others = [
            dot
            for it in ax.lines
            if it.get_color() == figures.GREY and it.get_marker() == "o"
            for dot, place in zip(
                cast(Any, it.get_xdata()), cast(Any, it.get_ydata()), strict=True
            )
            if place == net
        ]
        assert ratio == min(others)


def test_networks_drawn_by_chance_stand_in_the_order_of_their_ratios() -> None:
    found = results("jacobian-ranks")
    ax, alt = drawn("jacobian-ranks", found)
    for line in ax.lines[:2]:
        ratios = [*cast(Any, line.get_ydata())]
        assert ratios == sorted(ratios)
        assert len(ratios) == len({row["net"] for row in found["rows"]})
        assert f"{ratios[0]:.2f} to {ratios[-1]:.2f} times" in alt


def test_each_recorder_has_a_mark_for_each_network() -> None:
    found = results("recorder-ratios")
    ax, alt = drawn("recorder-ratios", found)
    names = [label.get_text() for label in ax.get_yticklabels()]
    dots = {*zip(numbers(ax, "x"), numbers(ax, "y"), strict=True)}
    for row in found["times"]:
        if row["threads"] == 1 and row["use"] and row["contender"] != "no hooks":
            ratio = row["use"]["to_none"]["median"]
            assert (ratio, names.index(row["contender"])) in dots
            if row["contender"] == "gradlib":
                assert f"{ratio:.2f} times for {row['net']}" in alt


def test_ours_stand_out() -> None:
    ax, _ = drawn("recorder-ratios", results("recorder-ratios"))
    labels: Any = ax.get_yticklabels()
    bold = [it.get_text() for it in labels if it.get_weight() == "bold"]
    assert bold == ["gradlib", "gradlib, tensor_stats"]


def test_each_way_that_was_counted_is_a_point() -> None:
    found = results("measured-and-counted")
    ax, _ = drawn("measured-and-counted", found)
    counted = found["plans"][0]["multiply_adds"]["loop"]
    assert counted in numbers(ax, "x")
    found["plans"][0]["multiply_adds"]["loop"] = 10**15
    changed, _ = drawn("measured-and-counted", found)
    assert 10**15 in numbers(changed, "x")
    assert len(numbers(changed, "x")) == len(numbers(ax, "x"))


@pytest.mark.parametrize("kind", FIGURES)
def test_what_is_named_has_room(kind: str) -> None:
    with figures.style():
        figure, alt = figures.MADE[kind](results(kind))
        canvas = FigureCanvasAgg(figure)
        canvas.draw()
        renderer = canvas.get_renderer()
        whole = figure.bbox
        (ax,) = figure.axes
        legends = [*figure.legends, *filter(None, [ax.get_legend()])]
        texts = [it for legend in legends for it in legend.get_texts()]
        texts += [*ax.get_yticklabels(), ax.xaxis.label, ax.yaxis.label]
        for text in filter(lambda it: it.get_text(), texts):
            box = text.get_window_extent(renderer)
            assert whole.x0 <= box.x0 <= box.x1 <= whole.x1, text.get_text()
    assert re.search(r"\d", alt)
