"""The figure of a graph in layers, part of it inside a frame."""

# matplotlib's own annotations leave the keywords of its methods open.
# pyright: reportUnknownMemberType=false

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch, Rectangle
from matplotlib.path import Path
from matplotlib.transforms import Bbox

from gradlib.figure import figure_of, inches_of, message, new_axes
from gradlib.layered import Arrow, Key, Layout, laid_out

# Where a box may stand, from the bottom up.
ZONES = BELOW, LOWER_EDGE, INSIDE, UPPER_EDGE, ABOVE = range(5)

SIZE = 9  # size of a letter, in points
SMALLEST = 4.5  # the smallest size that can be read, in points
LETTER = 0.08  # width of a letter, in inches
BOLD = 0.1  # width of a letter of the title, in inches
HEIGHT = 0.26  # height of a box, in inches
LAYER = 0.52  # inches from one layer to the next
TITLE = 0.3  # inches more for the title, below the upper edge
LINE = 0.26  # height of a line of the legend, in inches
MARGIN = 0.25  # inches from the boxes to the frame
LARGEST = 12  # the most inches of a new figure, across and down
FAINT = "0.55"


@dataclass(frozen=True)
class Box:
    """A text in the graph.

    Attributes:
        text: What is written.
        zone: `BELOW` the frame, on its `LOWER_EDGE`, `INSIDE`, on its `UPPER_EDGE`, or
            `ABOVE` it.
        fill: The background colour, under white letters; without one, the letters have
            the colour of the style.
        outlined: Whether there is a line around the box.
        faint: Whether the box is grey, as nothing flows there.
    """

    text: str
    zone: int = INSIDE
    fill: str = ""
    outlined: bool = False
    faint: bool = False

    @property
    def width(self) -> float:
        """The width of the box, in inches."""
        return LETTER * len(self.text) + 0.2


def framed_graph(
    title: str,
    boxes: Mapping[Key, Box],
    arrows: Sequence[Arrow],
    legend: Mapping[str, str],
    ax: Axes | None = None,
) -> Figure:
    """Draw a graph without cycles, in layers from the bottom up.

    Args:
        title: What is written into the frame.
        boxes: The boxes of the graph. Those of a layer stand in this order unless the
            arrows ask for another.
        arrows: The boxes that each leads from and to, in the same zone or a higher one.
        legend: The text and the colour of each line. A line without a colour tells what
            the arrows mean.
        ax: Where to draw; a new figure if left out.

    Returns:
        The figure drawn on. If its letters would be too small, it only says so.
    """
    zones = [[key for key, it in boxes.items() if it.zone == zone] for zone in ZONES]
    layout = laid_out(zones, {key: box.width for key, box in boxes.items()}, arrows)
    at = {key: (x, _height(layout, key)) for key, x in layout.middle.items()}
    frame = _frame(title, boxes, at, layout)
    shown = _extent(boxes, at, frame, legend)
    room = inches_of(ax) if ax else Bbox.from_bounds(0, 0, LARGEST, LARGEST)
    scale = min(1.0, room.width / shown.width, room.height / shown.height)
    if scale * SIZE < SMALLEST:
        needed = f"{shown.width:.0f} by {shown.height:.0f} inches"
        return message(
            f"{len(boxes)} boxes have no room here. Give axes of {needed}: plot(ax).",
            ax,
        )
    ax = ax or new_axes(shown.width * scale, shown.height * scale)
    ax.set_axis_off()
    ax.set_aspect("equal")
    ax.set(xlim=shown.intervalx, ylim=shown.intervaly)
    pen = _Pen(ax, scale)
    pen.frame(title, frame)
    for keys in layout.lines:
        pen.arrow([at[key] for key in keys], boxes[keys[0]], boxes[keys[-1]])
    for key, box in boxes.items():
        pen.box(box, *at[key])
    for i, (meaning, colour) in enumerate([*legend.items()][::-1]):
        pen.meaning(meaning, colour, shown.x0, shown.y0 + (i + 0.5) * LINE)
    return figure_of(ax)


def _height(layout: Layout, key: Key) -> float:
    layer = layout.layer[key]
    return layer * LAYER + (TITLE if layer >= layout.first[UPPER_EDGE] else 0.0)


def _frame(
    title: str,
    boxes: Mapping[Key, Box],
    at: Mapping[Key, tuple[float, float]],
    layout: Layout,
) -> Bbox:
    """Return the frame, in inches."""
    sides = [
        at[key][0] + side * box.width / 2
        for key, box in boxes.items()
        for side in (-1, 1)
        if BELOW < box.zone < ABOVE
    ]
    sides += [at[key][0] for line in layout.lines for key in line[1:-1]]
    upper = layout.first[UPPER_EDGE]
    steps = (step for line in layout.lines for step in pairwise(line))
    passing = [
        at[key][0] for step in steps if layout.layer[step[1]] == upper for key in step
    ]
    room = BOLD * len(title)  # for the title, left of the arrows that pass it
    left = min([*sides, min(passing, default=room) - room])
    right = max([*sides, left + room])
    low, high = (layout.first[zone] * LAYER for zone in (LOWER_EDGE, UPPER_EDGE))
    return Bbox.from_extents(left - MARGIN, low, right + MARGIN, high + TITLE)


def _extent(
    boxes: Mapping[Key, Box],
    at: Mapping[Key, tuple[float, float]],
    frame: Bbox,
    legend: Mapping[str, str],
) -> Bbox:
    """Return the box around all that the figure shows, in inches."""
    texts = [
        Bbox.from_bounds(
            at[key][0] - it.width / 2, at[key][1] - LINE, it.width, 2 * LINE
        )
        for key, it in boxes.items()
    ]
    drawn = Bbox.union([frame, *texts])
    longest = max(map(len, legend), default=0) * LETTER + 0.4
    left, right = drawn.x0 - 0.05, max(drawn.x1 + 0.05, drawn.x0 + longest)
    return Bbox.from_extents(left, drawn.y0 - len(legend) * LINE, right, drawn.y1)


@dataclass(frozen=True)
class _Pen:
    """Draws on axes whose unit is `scale` inches."""

    ax: Axes
    scale: float

    @property
    def ink(self) -> str:
        """The colour of texts and lines: white if the style's background is black."""
        return mpl.rcParams["text.color"]

    def write(self, text: str, x: float, y: float, **style: Any) -> None:
        # A dollar sign begins no formula.
        self.ax.text(x, y, text, size=SIZE * self.scale, parse_math=False, **style)

    def frame(self, title: str, frame: Bbox) -> None:
        style: Any = {"fill": False, "edgecolor": FAINT, "linestyle": "--"}
        self.ax.add_patch(Rectangle(frame.p0, frame.width, frame.height, **style))
        self.write(title, frame.x0 + 0.08, frame.y1 - 0.18, va="top", weight="bold")

    def box(self, box: Box, x: float, y: float) -> None:
        if box.fill or box.outlined:
            patch = FancyBboxPatch(
                (x - box.width / 2, y - HEIGHT / 2),
                box.width,
                HEIGHT,
                boxstyle="round,pad=0,rounding_size=0.06",
                facecolor=box.fill or "none",
                edgecolor=box.fill or (FAINT if box.faint else self.ink),
                zorder=3,
            )
            self.ax.add_patch(patch)
        colour = "white" if box.fill else FAINT if box.faint else self.ink
        self.write(box.text, x, y, color=colour, ha="center", va="center", zorder=4)

    def arrow(self, along: Sequence[tuple[float, float]], start: Box, end: Box) -> None:
        (first, low), *between, (last, high) = along
        # In each layer it passes: upright for the height of the boxes beside it.
        sides = [(x, y + dy) for x, y in between for dy in (-HEIGHT / 2, HEIGHT / 2)]
        # At each end: the place on the box's edge that is nearest to where it goes.
        ends = (
            (_nearest(start, first, along[1][0]), low + HEIGHT / 2),
            (_nearest(end, last, along[-2][0]), high - HEIGHT / 2),
        )
        patch = FancyArrowPatch(
            path=Path([ends[0], *sides, ends[1]]),
            arrowstyle="-" if end.fill else "-|>",
            mutation_scale=10 * self.scale,
            color=self.ink,
            linewidth=self.scale,
            zorder=2,
        )
        self.ax.add_patch(patch)

    def meaning(self, meaning: str, colour: str, x: float, y: float) -> None:
        if colour:
            self.ax.add_patch(Rectangle((x, y - 0.07), 0.2, 0.14, color=colour))
        else:
            self.write("↑", x + 0.1, y, color=self.ink, ha="center", va="center")
        self.write(meaning, x + 0.3, y, va="center", color=self.ink)


def _nearest(box: Box, middle: float, x: float) -> float:
    """Return the place on a box, off its corners, that is nearest to `x`."""
    half = max(box.width / 2 - 0.1, 0)
    return min(max(x, middle - half), middle + half)
