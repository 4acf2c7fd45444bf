"""Tables as text fit a terminal."""

from gradlib.render import NARROWEST, WIDTH, Table

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


def test_a_table_without_rows() -> None:
    assert Table("title", (), [], ("below",)).text() == "title\nbelow"


def test_html_has_nothing_that_is_empty() -> None:
    html = Table("title", (), [], ("", "below")).html()
    assert "<p></p>" not in html
    assert "<table>" not in html
    assert "<p>below</p>" in html
    assert Table("title", ("one",), []).html().count("<table>") == 1
