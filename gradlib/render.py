"""Tables as terminal text and as notebook HTML, from plain rows of strings."""

import math
import os
import re
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from html import escape
from operator import add
from textwrap import fill, wrap
from unicodedata import combining, east_asian_width

from gradlib.private.compiling import as_written

# The width of a title or footer: it fits a terminal, and a docstring behind "#> ".
WIDTH = 77
NARROWEST = 30
"""The room that the last column of a table has at least, however wide the others."""

WIDEST = 100
"""How wide a table is at most, as far as narrowing its first column can help.

Printed on a terminal, it is as wide as that at most.
"""
SHORTEST = 20
"""The least width of the first column. A wider cell there gets a line of its own."""
NARROW = 6
"""The same where the other columns fit without the first."""

# Grey lines and the page's own colours are readable in a light and a dark notebook.
# A class is named twice where Jupyter Lab's rules for table cells outweigh one name.
STYLE = """<style>
.gradlib { overflow-x: auto; }
.gradlib table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
.gradlib.gradlib th, .gradlib.gradlib td { text-align: left; }
.gradlib th, .gradlib td { padding: 0.2em 1.2em 0.2em 0; }
.gradlib tr { border-bottom: 1px solid rgba(128, 128, 128, 0.4); }
.gradlib p { margin: 0.5em 0; }
.gradlib pre { font-family: monospace; }
</style>"""


@dataclass(frozen=True)
class Table:
    """Rows of text under column names, with a title above and a footer below."""

    title: str
    columns: tuple[str, ...]
    rows: list[tuple[str, ...]]
    footer: tuple[str, ...] = ()

    def text(self) -> str:
        """Return the table for a terminal, columns aligned, no trailing spaces.

        Long cells of the last column are wrapped.
        """
        lines = [*_heads(self.columns, self.rows), *self.rows] if self.columns else []
        lines = [(*map(in_one_line, it[:-1]), _as_prose(it[-1])) for it in lines]
        widths = _widths(lines)
        body = [below for line in lines for below in _lines(line, widths)]
        lines = [_wrapped(self.title), *body, *map(_wrapped, self.footer)]
        return "\n".join(line.rstrip() for line in lines if line)

    def html(self) -> str:
        """Return the table as HTML that takes its colours from the notebook."""
        head = "".join(f"<th>{_escaped(name)}</th>" for name in self.columns)
        body = "".join(
            "<tr>" + "".join(f"<td>{_escaped(cell)}</td>" for cell in row) + "</tr>"
            for row in self.rows
        )
        rows = f"<thead><tr>{head}</tr></thead><tbody>{body}</tbody>"
        table = f"<table>{rows}</table>" if self.columns else ""
        footer = "".join(f"<p>{_escaped(line)}</p>" for line in self.footer if line)
        title = f"<p>{_escaped(self.title)}</p>"
        return f'{STYLE}<div class="gradlib">{title}{table}{footer}</div>'


def in_one_line(cell: str) -> str:
    """Return a cell with escapes for unprintable characters, such as a newline."""
    if cell.isprintable():
        return cell
    return "".join(
        it if it.isprintable() else it.encode("unicode_escape").decode() for it in cell
    )


def _as_prose(prose: str) -> str:
    """Return prose in one line, with spaces for its newlines."""
    return in_one_line(prose.translate(_SPACES))


_SPACES = dict.fromkeys(map(ord, "\n\r\t"), " ")


def _escaped(text: str) -> str:
    return escape(in_one_line(text))


def _width(text: str) -> int:
    """Return how many columns of a terminal a text takes."""
    if text.isascii():
        return len(text)
    return sum(1 + (east_asian_width(it) in "WF") for it in text if not combining(it))


def _heads(
    columns: tuple[str, ...], rows: list[tuple[str, ...]]
) -> list[tuple[str, ...]]:
    """Return the names of the columns: in two lines where they do not fit the terminal.

    Those with an underscore are divided behind the last.
    """
    *widths, last = _widths_of([columns, *rows])
    needed = sum(widths) + 2 * len(widths) + min(last, NARROWEST)
    if needed <= (_terminal() or math.inf):
        return [columns]
    first, underscores, lower = zip(
        *(it.rpartition("_") for it in columns), strict=True
    )
    upper = tuple(map(add, first, underscores))
    return [upper, lower] if any(upper) else [columns]


def _widths_of(lines: list[tuple[str, ...]]) -> list[int]:
    return [max(map(_width, cells)) for cells in zip(*lines, strict=True)]


def _widths(lines: list[tuple[str, ...]]) -> list[int]:
    """Return the widths of all columns but the last."""
    *widths, last = _widths_of(lines) or [0]
    if widths:
        others = sum(widths[1:]) + 2 * len(widths) + min(last, NARROWEST)
        room = (_terminal() or WIDEST) - others
        widths[0] = min(widths[0], max(room, SHORTEST if room < 0 else NARROW))
    return widths


def _terminal() -> int:
    """Return how wide the terminal is that is printed on; 0 if there is none."""
    try:
        if sys.stdout.isatty():
            return os.get_terminal_size(sys.stdout.fileno()).columns
    except (AttributeError, OSError, ValueError):  # there is none, or it is closed
        pass
    return 0


def _lines(row: tuple[str, ...], widths: list[int]) -> list[str]:
    """Return the lines of a row; `widths` are those of all columns but the last."""
    *cells, last = row
    alone: list[str] = []
    if cells and _width(cells[0]) > widths[0]:
        alone, cells[0] = [cells[0]], ""
    head = "".join(
        it + " " * (width - _width(it) + 2)
        for it, width in zip(cells, widths, strict=True)
    )
    indent = " " * (sum(widths) + 2 * len(widths))
    room = max(WIDTH - len(indent), NARROWEST)
    if _width(last) <= room:
        return [*alone, head + last]
    return alone + wrap(
        last,
        len(head) + room,
        initial_indent=head,
        subsequent_indent=indent + "  ",
        break_long_words=False,
        break_on_hyphens=False,
    )


def _wrapped(line: str) -> str:
    filled = fill(
        _BEFORE_UNIT.sub(_KEPT, _as_prose(line)),
        WIDTH,
        subsequent_indent="  ",
        break_long_words=False,  # an address, or the name of a module
        break_on_hyphens=False,
    )
    return filled.replace(_KEPT, " ")


_BEFORE_UNIT = re.compile(r"(?<=\d) (?=(?:bytes|[KMGT]iB)\b)")
_KEPT = "\0"
"""Stands for a space where a line must not end; `in_one_line` leaves none in a text."""


class Printable:
    """Prints as a table: a subclass defines `_table`, or `_tables` for several."""

    def _table(self) -> Table:
        raise NotImplementedError

    def _tables(self) -> Iterable[Table]:
        return (self._table(),)

    @as_written
    def __str__(self) -> str:
        """Return the tables as text."""
        return "\n\n".join(table.text() for table in self._tables())

    @as_written
    def _repr_html_(self) -> str:
        return "".join(table.html() for table in self._tables())
