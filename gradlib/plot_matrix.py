"""The figure of a matrix with a vector beside its rows and one below its columns."""

# matplotlib's own annotations leave the keywords of its methods open.
# pyright: reportUnknownMemberType=false

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from gradlib.figure import LETTER, NAME, figure_of, in_short, inches_of, new_axes

# Orange and blue of the Okabe-Ito palette, so pale that black numbers are readable.
SIGNED = LinearSegmentedColormap.from_list(
    "signed", ["#EE9E66", "white", "#66AADD"]
).with_extremes(bad="0.8")

CELL = (0.5, 0.27)  # inches per number in a new figure, across and down
LARGEST = 7  # the most inches of a new figure, across and down
SMALLEST = 6  # the smallest size of a number that can be read, in points
FEW = 400  # the most numbers that are written
CENTRED: Any = {"ha": "center", "va": "center"}
_NAMES: Any = {"size": "small", "parse_math": False}  # a key may hold two dollar signs
MOST = 50  # letters of a name, which may stand upright below a column
NOTHING = 0.01  # times the largest term: sums far below this are left white


def weighted_rows(
    rows: Sequence[Sequence[str]],
    columns: Sequence[Sequence[str]],
    v: Sequence[Sequence[float]],
    blocks: Sequence[Sequence[Sequence[Sequence[float]]]],
    sums: Sequence[Sequence[float]],
    is_what: str,
    ax: Axes | None = None,
) -> Figure:
    """Draw a matrix J, with v beside its rows and vᵀJ below its columns.

    Each of the three has its own colour scale, with white at zero. The numbers are
    written into the cells if they have room there.

    Args:
        rows: The names of the rows, by block; the first is drawn on top.
        columns: The names of the columns, by block.
        v: The weight of each row, by block.
        blocks: J: by block of rows, then of columns, the numbers row by row.
        sums: vᵀJ: the sum of each column, by block.
        is_what: What J is, as ``" = dy/dx"``, written behind it if there is room.
        ax: Where to draw; a new figure if left out.

    Returns:
        The figure drawn on.
    """
    down, across = _Side.along(rows), _Side.along(columns)
    ax = ax or _new_axes(down, across)
    left, below = -across.gap - across.strip, down.end + down.gap
    ax.set(xlim=(left, across.end), ylim=(below + down.strip, 0))
    weights = [
        _Part(left, y, across.strip, len(it), [[weight] for weight in it])
        for y, it in zip(down.starts, v, strict=True)
    ]
    matrix = [
        _Part(x, y, len(names), len(block), block)
        for y, row in zip(down.starts, blocks, strict=True)
        for x, names, block in zip(across.starts, columns, row, strict=True)
    ]
    product = [
        _Part(x, below, len(it), down.strip, [it])
        for x, it in zip(across.starts, sums, strict=True)
    ]
    ends = _strongest(weights, matrix, product)
    for parts, end in zip((weights, matrix, product), ends, strict=True):
        _paint(parts, end or 1, ax)
    if not _write_numbers([*weights, *matrix, *product], ax):
        told = "v ±{:.2g}, J ±{:.2g}, vᵀJ ±{:.2g}".format(*ends)
        ax.set_xlabel(f"blue above 0, orange below: {told}")
    _write_above("v", left + across.strip / 2, ax)
    has_room = LETTER * len(is_what) <= (across.length + across.gap) * _cell(ax)[0]
    _write_above(f"J{is_what if has_room else ''}", across.end / 2, ax)
    _name_rows(down, below + down.strip / 2, ax)
    _name_columns(across, ax)
    ax.tick_params(length=0)
    ax.spines[:].set_visible(False)
    ax.grid(visible=False)  # the grid of some styles would cross out the numbers
    return figure_of(ax)


@dataclass(frozen=True)
class _Side:
    """Where the blocks of a matrix are along one side, in rows or columns.

    Attributes:
        names: The names of the rows or columns.
        at: Where the middle of each is.
        starts: Where each block begins.
        end: Where the last one ends.
        strip: The width of the vector beside the matrix.
        gap: The free space between blocks.
    """

    names: Sequence[str]
    at: Sequence[float]
    starts: Sequence[float]
    end: float
    strip: float
    gap: float

    @classmethod
    def along(cls, blocks: Sequence[Sequence[str]]) -> "_Side":
        """Put the blocks one after the other."""
        names = [in_short(name, MOST) for block in blocks for name in block]
        strip = max(1, len(names) / 20)
        gap = strip / 3
        *starts, end = accumulate((len(it) + gap for it in blocks), initial=0.0)
        at = [
            start + i + 0.5
            for start, block in zip(starts, blocks, strict=True)
            for i in range(len(block))
        ]
        return cls(names, at, starts, end - gap, strip, gap)

    @property
    def length(self) -> float:
        """The length of the side together with the vector."""
        return self.strip + self.gap + self.end

    @property
    def longest(self) -> int:
        """How many letters the longest name has."""
        return max(map(len, self.names), default=0)


@dataclass(frozen=True)
class _Part:
    """Numbers, and the rectangle they are drawn in."""

    x: float
    y: float
    width: float
    height: float
    numbers: Sequence[Sequence[float]]

    def cells(self) -> Iterator[tuple[float, float, float]]:
        """Yield the middle of each cell, and its number."""
        for i, row in enumerate(self.numbers):
            for j, number in enumerate(row):
                x = self.x + (j + 0.5) * self.width / len(row)
                yield x, self.y + (i + 0.5) * self.height / len(self.numbers), number


def _strongest(
    weights: list[_Part], matrix: list[_Part], product: list[_Part]
) -> tuple[float, float, float]:
    """Return what the strongest colour of v, of J and of vᵀJ stands for."""
    v, j, sums = map(_largest, (weights, matrix, product))
    # Where sums are tiny beside their terms, full colours would show only rounding.
    return v, j, max(sums, NOTHING * v * j)


def _largest(parts: Sequence[_Part]) -> float:
    sizes = (abs(number) for part in parts for *_, number in part.cells())
    return max(filter(math.isfinite, sizes), default=0.0)


def _paint(parts: Sequence[_Part], end: float, ax: Axes) -> None:
    """Colour the cells; `end` is what the strongest colour stands for."""
    for part in parts:
        if not any(True for _ in part.cells()):
            continue
        limits = ax.get_xlim(), ax.get_ylim()
        ax.imshow(
            part.numbers,
            extent=(part.x, part.x + part.width, part.y + part.height, part.y),
            cmap=SIGNED,
            vmin=-end,
            vmax=end,
            aspect="auto",
            interpolation="nearest",
        )
        ax.set(xlim=limits[0], ylim=limits[1])
        corner = part.x, part.y
        frame = Rectangle(corner, part.width, part.height, fill=False, edgecolor="0.6")
        ax.add_patch(frame).set_clip_on(False)


def _write_numbers(parts: Sequence[_Part], ax: Axes) -> bool:
    """Write the numbers into their cells if readable there; tell whether they are."""
    texts = [(x, y, f"{v + 0.0:.3g}") for part in parts for x, y, v in part.cells()]
    longest = max((len(text) for *_, text in texts), default=0)
    width, height = _cell(ax)
    points = min(9, 72 * width / (0.65 * longest + 0.5), 72 * height / 1.4)
    if points < SMALLEST or len(texts) > FEW:
        return False
    for x, y, text in texts:
        ax.text(x, y, text, size=points, color="black", **CENTRED)
    return True


def _write_above(text: str, x: float, ax: Axes) -> None:
    ax.annotate(
        text, (x, 0), (0, 4), textcoords="offset points", ha="center", va="bottom"
    )


def _name_rows(side: _Side, product: float, ax: Axes) -> None:
    """Write the names beside the rows, as many as have room, and that of vᵀJ."""
    step = math.ceil(NAME / _cell(ax)[1])
    at, names = side.at[::step], side.names[::step]
    ax.set_yticks([*at, product], [*names, "vᵀJ"], **_NAMES)


def _name_columns(side: _Side, ax: Axes) -> None:
    """Write the names below the columns, as many as have room."""
    width = _cell(ax)[0]
    upright = side.longest * LETTER > width
    step = math.ceil(NAME / width) if upright else 1
    rotation = 90 if upright else 0
    ax.set_xticks(side.at[::step], side.names[::step], rotation=rotation, **_NAMES)


def _cell(ax: Axes) -> tuple[float, float]:
    """Return the width and height of one number's cell, in inches."""
    box, (left, right), (bottom, top) = inches_of(ax), ax.get_xlim(), ax.get_ylim()
    return box.width / (right - left), box.height / (bottom - top)


def _new_axes(down: _Side, across: _Side) -> Axes:
    """Return the axes of a new figure, with room for names, and for numbers if few."""
    width, height = CELL
    name = LETTER * across.longest
    wide = max(width, name) * across.length
    if wide > LARGEST:
        wide = width * across.length
    wide = min(max(wide + 1.4, 3), LARGEST)
    upright = name if name > (wide - 1.4) / across.length else 0
    return new_axes(wide, min(height * down.length + 1.1 + upright, LARGEST))
