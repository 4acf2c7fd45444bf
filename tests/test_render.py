"""Tables as text fit a terminal."""

import io
import os
import sys
from typing import Any, cast
from unicodedata import east_asian_width

import pytest

from gradlib.render import NARROWEST, SHORTEST, WIDEST, WIDTH, Table

WORDS = " and ".join(f"of p{number}" for number in range(40))


def test_what_is_long_in_the_last_column_goes_on_below() -> None:
    rows = [("grad_input[0]", WORDS), ("x", "short")]
    title, head, *body, last = (
        Table("title", ("entry", "what"), rows).text().split("\n")
    )
    assert (title, head) == ("title", "entry          what")
    assert max(map(len, body)) <= WIDTH
    assert body[0].startswith("grad_input[0]  of p0 and of p1 ")
    assert all(line.startswith(" " * 17 + "o") or "and" in line for line in body[1:])
    assert " ".join(" ".join(body).split()) == f"grad_input[0] {WORDS}"
    assert last == "x              short"


def test_beside_wide_columns_there_is_room_for_some_words() -> None:
    rows = [("e" * WIDTH, WORDS)]
    body = Table("title", ("entry", "what"), rows).text().split("\n")[2:]
    assert max(map(len, body)) <= WIDTH + 2 + NARROWEST
    assert len(body) < 20


def test_an_address_below_a_table_stays_in_one_piece() -> None:
    address = f"https://example.org/{'long-' * 20}page.html#part"
    text = Table("title", (), [], (f"More is at {address} and so on.",)).text()
    assert address in text


def test_a_number_stays_beside_its_unit() -> None:
    for before in range(1, WIDTH):
        line = f"{'a' * before} 388.4 KiB, of 12 bytes"
        text = Table(line, (), []).text()
        assert " ".join(text.split()) == line
        assert "388.4 KiB" in text
        assert "12 bytes" in text


def test_a_table_without_rows() -> None:
    assert Table("title", (), [], ("below",)).text() == "title\nbelow"


def test_html_has_nothing_that_is_empty() -> None:
    html = Table("title", (), [], ("", "below")).html()
    assert "<p></p>" not in html
    assert "<table>" not in html
    assert "<p>below</p>" in html
    assert Table("title", ("one",), []).html().count("<table>") == 1


def test_a_name_that_leaves_no_room_stands_on_a_line_of_its_own() -> None:
    columns = "module", "type", "output", "norm"
    name, kind = "layers.0." * 8, "Layer" * 9
    rows = [(name, kind, "[2, 3, 8]", "1.5"), ("layers.0", kind, "[2]", "21")]
    _, head, alone, others, last = Table("title", columns, rows).text().split("\n")
    assert alone == name
    assert others.strip().startswith(f"{kind}  [2, 3, 8]  1.5")
    assert others.index(kind) == last.index(kind) == head.index("type")
    assert max(map(len, (head, others, last))) <= WIDEST
    short = [("layer", "t" * WIDEST, "[2]", "1"), ("a" * SHORTEST, "u", "[2]", "2")]
    assert len(Table("title", columns, short).text().split("\n")) == 4


@pytest.mark.parametrize("columns", [80, 250, 0])
def test_a_table_is_at_most_as_wide_as_the_terminal(
    columns: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    heads = "module", "type", "output", "norm"
    rows = [("layers.0." * 12, "Layer" * 9, "[2, 3, 8]", "1.5")]
    elsewhere = Table("title", heads, rows).text()
    short = [("layers.0.conv", "Layer", "[2]" * 30, "1.5")]  # a line for its name ...
    sizes = {7: os.terminal_size((columns, 24))}
    monkeypatch.setattr(sys, "stdout", Terminal())
    monkeypatch.setattr(os, "get_terminal_size", sizes.__getitem__)
    text = Table("title", heads, rows).text()
    if columns == 250:  # the name is in the row
        assert len(text.split("\n")) == 3
    elif columns == 80:
        _, head, name, row = text.split("\n")
        assert name == rows[0][0]
        assert max(len(head), len(row)) <= 80
        # ... would not help where the other columns do not fit
        assert len(Table("title", heads, short).text().split("\n")) == 3
    else:  # a terminal that does not know its size
        assert text == elsewhere
        assert max(len(it) for it in text.split("\n") if it != rows[0][0]) > 80


@pytest.mark.parametrize(("columns", "lines"), [(63, 2), (64, 1), (0, 1)])
def test_names_of_columns_take_two_lines_where_one_is_too_wide(
    columns: int, lines: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    heads = "module", "type", "grad_output", "grad_input", "param_grads"
    rows = [("(root)", "MultiheadAttention", "12.6", "5.83", "33.8")]
    sizes = {7: os.terminal_size((columns, 24))}
    monkeypatch.setattr(sys, "stdout", Terminal())
    monkeypatch.setattr(os, "get_terminal_size", sizes.__getitem__)
    _, *above, row = Table("title", heads, rows).text().split("\n")
    assert len(above) == lines
    assert max(map(len, (*above, row))) == (64 if lines == 1 else 49)
    for name, cell in zip(heads, rows[0], strict=True):
        place = row.index(cell)
        assert "".join(it[place:].split("  ")[0].strip() for it in above) == name


@pytest.mark.parametrize("stdout", [None, io.BytesIO(), io.StringIO()])
def test_a_table_needs_no_terminal(
    stdout: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdout", stdout)
    assert Table("title", ("a", "b"), [("x", "y")]).text() == "title\na  b\nx  y"
    if stdout is not None:
        cast(Any, stdout).close()
        assert Table("title", ("a", "b"), [("x", "y")]).text() == "title\na  b\nx  y"


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True

    def fileno(self) -> int:
        return 7


def test_wide_characters_take_two_columns() -> None:
    rows = [("\u5c42.\u4e00", "x"), ("e\u0301", "y"), ("layer", "z")]  # an accent alone
    lines = Table("title", ("module", "type"), rows).text().split("\n")[1:]
    columns = [sum(1 + (east_asian_width(it) == "W") for it in line) for line in lines]
    assert columns == [len("module  type"), 9, 10, 9]  # the accent takes no column


def test_what_moves_the_cursor_is_escaped() -> None:
    table = Table(
        "a\x1b[2Jb", ("module", "what"), [("new\nline", "said\nso")], ("one\ntwo\x07",)
    )
    text = table.text()
    assert text.split("\n") == [
        *("a\\x1b[2Jb", "module     what"),
        *("new\\nline  said so", "one two\\x07"),
    ]
    assert "<td>new\\nline</td>" in table.html()
    assert "\x1b" not in table.html()
