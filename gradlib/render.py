"""Tables as terminal text and as notebook HTML, from plain rows of strings."""

from collections.abc import Iterable
from dataclasses import dataclass
from html import escape
from textwrap import fill, wrap

# Of a title or footer, so that it fits a terminal, and a docstring behind "#> ".
WIDTH = 77
NARROWEST = 30
"""How wide the last column of a table may be, however wide the others are."""

# Grey lines and the page's own colours: readable on a light and on a dark notebook.
# Doubled names, as Jupyter Lab's own rules for cells of tables outweigh a single one.
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
    """Rows of text under column names, with a line above and lines below."""

    title: str
    columns: tuple[str, ...]
    rows: list[tuple[str, ...]]
    footer: tuple[str, ...] = ()

    def text(self) -> str:
        """Return the table for a terminal, columns aligned, no trailing spaces.

        What is long in the last column goes on below.
        """
        lines = [self.columns, *self.rows] if self.columns else []
        widths = [max(map(len, cells)) for cells in [*zip(*lines, strict=True)][:-1]]
        body = [below for line in lines for below in _lines(line, widths)]
        lines = [_filled(self.title), *body, *map(_filled, self.footer)]
        return "\n".join(line.rstrip() for line in lines if line)

    def html(self) -> str:
        """Return the table as HTML that takes its colours from the notebook."""
        head = "".join(f"<th>{escape(name)}</th>" for name in self.columns)
        body = "".join(
            "<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>"
            for row in self.rows
        )
        rows = f"<thead><tr>{head}</tr></thead><tbody>{body}</tbody>"
        table = f"<table>{rows}</table>" if self.columns else ""
        footer = "".join(f"<p>{escape(line)}</p>" for line in self.footer if line)
        title = f"<p>{escape(self.title)}</p>"
        return f'{STYLE}<div class="gradlib">{title}{table}{footer}</div>'


def _lines(row: tuple[str, ...], widths: list[int]) -> list[str]:
    """Return the lines of a row: `widths` of all its columns but the last."""
    *cells, last = row
    head = "".join(f"{it:{width}}  " for it, width in zip(cells, widths, strict=True))
    room = max(WIDTH - len(head), NARROWEST)
    indent = " " * len(head)
    if len(last) <= room:
        return [head + last]
    return wrap(
        last,
        len(head) + room,
        initial_indent=head,
        subsequent_indent=indent + "  ",
        break_long_words=False,
        break_on_hyphens=False,
    )


def _filled(line: str) -> str:
    return fill(
        line,
        WIDTH,
        subsequent_indent="  ",
        break_long_words=False,  # an address, or the name of a module
        break_on_hyphens=False,
    )


class Printable:
    """What prints as a table: give it `_table`, or `_tables` if there are several."""

    def _table(self) -> Table:
        raise NotImplementedError

    def _tables(self) -> Iterable[Table]:
        return (self._table(),)

    def __str__(self) -> str:
        """Return the tables as text."""
        return "\n\n".join(table.text() for table in self._tables())

    def _repr_html_(self) -> str:
        return "".join(table.html() for table in self._tables())
