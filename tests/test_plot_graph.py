"""The figure of a graph: what is in it can be read, whatever its size."""

from itertools import combinations
from random import Random
from typing import Any, cast

import pytest
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.colors import to_hex
from matplotlib.figure import Figure
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch, Rectangle

from gradlib.layered import Arrow, Key
from gradlib.plot_graph import (
    ABOVE,
    BELOW,
    INSIDE,
    LOWER_EDGE,
    UPPER_EDGE,
    Box,
    framed_graph,
)

BOXES: dict[Key, Box] = {
    "y": Box("output [4, 30]", BELOW),
    "full": Box("grad_output[0] [4, 30]", LOWER_EDGE, fill="#0067A3"),
    "node": Box("AddmmBackward0", INSIDE, outlined=True),
    "b": Box("bias [30]"),
    "w": Box("weight [30, 20]"),
    "none": Box("grad_input[0] None", UPPER_EDGE, fill="0.5"),
    "x": Box("input [4, 20]", ABOVE, faint=True),
}
ARROWS: list[Arrow] = [("y", "full"), ("full", "node"), ("node", "b"), ("node", "w")]
LEGEND = {"the gradient flows upwards": "", "a full backward hook": "#0067A3"}


def drawn(title: str = "Linear", ax: Axes | None = None) -> Figure:
    return framed_graph(title, BOXES, ARROWS, LEGEND, ax)


def extents(figure: Figure) -> dict[str, Any]:
    figure.canvas.draw()
    return {it.get_text(): it.get_window_extent() for it in figure.axes[0].texts}


def test_every_text_is_there_and_none_is_over_another() -> None:
    figure = drawn()
    found = extents(figure)
    assert found.keys() == {
        *(box.text for box in BOXES.values()),
        *LEGEND,
        "Linear",
        "↑",
    }
    for (a, first), (b, second) in combinations(found.items(), 2):
        assert not first.overlaps(second), (a, b)
    for text, extent in found.items():
        assert figure.bbox.x0 <= extent.x0 <= extent.x1 <= figure.bbox.x1, text
        assert figure.bbox.y0 <= extent.y0 <= extent.y1 <= figure.bbox.y1, text


def test_a_text_has_room_in_its_box() -> None:
    figure = drawn()
    found = extents(figure)
    outlines = [it.get_window_extent() for it in figure.axes[0].patches]
    for box in BOXES.values():
        if box.fill or box.outlined:
            text = found[box.text]
            assert any(
                around.x0 <= text.x0
                and text.x1 <= around.x1
                and around.y0 <= text.y0
                and text.y1 <= around.y1
                and around.height < 2 * text.height + 12
                for around in outlines
            ), box.text


def test_the_title_has_room_in_a_narrow_frame() -> None:
    title = "AModuleOfARatherLongNameInAFrameThatIsNarrow"
    boxes: dict[Key, Box] = {"y": Box("y", BELOW), "x": Box("x", ABOVE)}
    figure = framed_graph(title, boxes, [("y", "x")], {})
    found = extents(figure)
    frame = figure.axes[0].patches[0].get_window_extent()
    assert frame.x0 < found[title].x0
    assert found[title].x1 < frame.x1


def test_the_title_has_room_below_what_is_on_the_edge() -> None:
    boxes: dict[Key, Box] = {
        "a": Box("a" * 9, fill="0.5"),
        "b": Box("b" * 30, UPPER_EDGE),
    }
    found = extents(framed_graph("Conv2d", boxes, [("a", "b")], {}))
    assert found["Conv2d"].y1 < found["b" * 30].y0
    assert found["a" * 9].y1 < found["Conv2d"].y0


def test_an_arrow_beside_all_boxes_is_in_the_frame_too() -> None:
    boxes: dict[Key, Box] = {i: Box("y" * 30, BELOW) for i in range(3)}
    boxes |= {-i: Box("x", ABOVE) for i in range(1, 4)}
    arrows: list[Arrow] = [(0, -1), (1, -2), (2, -3)]
    ax = framed_graph("F", boxes, arrows, {}).axes[0]
    frame, *_ = ax.patches
    assert isinstance(frame, Rectangle)
    across = [
        x
        for it in ax.patches
        if isinstance(it, FancyArrowPatch)
        for x, _ in cast(Any, it)._path_original.vertices
    ]
    assert frame.get_x() < min(across)
    assert max(across) < frame.get_x() + frame.get_width()


@pytest.mark.parametrize("seed", range(8))
def test_no_arrow_goes_through_a_box_or_a_text(seed: int) -> None:
    chance = Random(seed)
    boxes: dict[Key, Box] = {i: Box("AddBackward0", outlined=True) for i in range(9)}
    boxes[9] = Box("grad_input[0] [4, 20]", UPPER_EDGE, fill="#0067A3")
    pairs = combinations(boxes, 2)
    arrows: list[Arrow] = [pair for pair in pairs if chance.random() < 0.3]
    figure = framed_graph("TransformerEncoderLayer", boxes, arrows, {})
    figure.canvas.draw()
    (ax,) = figure.axes
    places: list[Any] = [it for it in ax.patches if isinstance(it, FancyBboxPatch)]
    for place in (*places, *ax.texts):
        around = place.get_window_extent().padded(-3)
        for it in ax.patches:
            if isinstance(it, FancyArrowPatch):
                along = cast(Any, it)._path_original.transformed(ax.transData)
                assert not along.intersects_bbox(around, filled=False), place


def test_on_a_black_ground_what_is_written_is_white() -> None:
    with plt.style.context("dark_background"):
        figure = drawn()
    (ax,) = figure.axes
    written = {it.get_text(): to_hex(cast(Any, it.get_color())) for it in ax.texts}
    for text in ("output [4, 30]", "AddmmBackward0", "Linear", *LEGEND):
        assert written[text] == "#ffffff", text


def test_a_dollar_sign_is_no_formula() -> None:
    text = r"output['$\frac$'] [4]"
    assert text in extents(framed_graph("Of", {"y": Box(text)}, [], {}))


@pytest.mark.parametrize("size", [(4, 3), (3, 8), (10, 3)])
def test_given_axes_hold_all_of_it(size: tuple[float, float]) -> None:
    figure, ax = plt.subplots(figsize=size)
    assert drawn(ax=ax) is figure
    for text, extent in extents(figure).items():
        assert figure.bbox.x0 <= extent.x0 <= extent.x1 <= figure.bbox.x1, text
        assert figure.bbox.y0 <= extent.y0 <= extent.y1 <= figure.bbox.y1, text


def test_axes_of_no_room_at_all_raise_nothing() -> None:
    drawn(ax=plt.figure().add_axes((0, 0, 0.001, 0.001)))


def test_where_letters_would_be_too_small_it_says_so() -> None:
    _, ax = plt.subplots(figsize=(1.5, 1))
    figure = drawn(ax=ax)
    said = figure.axes[0].texts[0].get_text().replace("\n", " ")
    assert said == ("7 boxes have no room here. Give axes of 3 by 4 inches: plot(ax).")


def test_a_graph_of_any_size_is_no_figure_of_any_size() -> None:
    boxes: dict[Key, Box] = {i: Box(f"grad_input[{i}] [64, 64]") for i in range(13)}
    width, height = framed_graph("Wide", boxes, [], {}).get_size_inches()
    assert width <= 12
    assert height <= 12


def test_what_has_no_room_in_a_new_figure_is_said_in_a_readable_one() -> None:
    boxes: dict[Key, Box] = {i: Box("grad_input[0] [64, 64]") for i in range(200)}
    figure = framed_graph("Wide", boxes, [], {})
    (said,) = extents(figure).items()
    assert said[0].startswith("200 boxes have no room here. Give axes of ")
    assert figure.bbox.y0 < said[1].y0 < said[1].y1 < figure.bbox.y1


def test_axes_that_are_large_enough_show_it_all() -> None:
    boxes: dict[Key, Box] = {i: Box("grad_input[0] [64, 64]") for i in range(20)}
    _, ax = plt.subplots(figsize=(60, 5))
    found = framed_graph("Wide", boxes, [], {}, ax).axes[0].texts
    assert sum(it.get_text() == "grad_input[0] [64, 64]" for it in found) == 20


def test_an_arrow_has_a_head_but_where_it_goes_on() -> None:
    patches = drawn().axes[0].patches
    styles = [it.get_arrowstyle() for it in patches if isinstance(it, FancyArrowPatch)]
    heads = [type(style).__name__ == "CurveFilledB" for style in styles]
    assert heads == [False, True, True, True]
