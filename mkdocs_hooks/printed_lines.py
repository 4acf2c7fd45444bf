"""Mark the lines a block prints (`#> ...`), so that they look unlike its comments.

Sentences among them, and among what a cell of an example prints, are marked as
paragraphs too: a telephone breaks these where its screen ends, and the lines of code in
a message. Tables and tensors keep their lines there.
"""

import html
import re
from itertools import groupby
from typing import NamedTuple

from mkdocs_hooks.long_words import SHORTEST, breakable

LINE = re.compile(r'( *)<span class="c1">#&gt;( *)(.*)</span>')
LINES = re.compile(r'(?:^ *<span class="c1">#&gt;.*</span>$\n?)+', re.MULTILINE)
OUTPUT = re.compile(
    r'(<div class="[^"]*\boutput\b[^"]*"><pre><span></span><code>)(.*?)(\n?</code>)',
    re.DOTALL,
)
WIDTH = 76  # to which a message is filled
CODE = 4  # spaces before code in a message; sentences stand further left
HANGING = 2  # spaces before what is below the start of code, or of an output's sentence
SHAPE = re.compile(r"\[\d+(?:, \d+){1,4}\]")  # stays on one line
FIRST_WORD = re.compile(r"^ *(\S+(?: (?:bytes|[KMGT]iB)\b)?)")  # and a number's unit
COMMENT = '<span class="c1 printed">', "</span>"
ALIKE = 9  # two lines that begin with so many characters in common are those of a list


class Line(NamedTuple):
    """A printed line: the spaces before its mark, those after it, and the rest."""

    column: str
    space: str
    text: str
    sign: str = "#&gt;"  # none in an output

    @property
    def shown(self) -> str:
        """What was printed."""
        space = self.space[1:] if self.sign else self.space
        return space + html.unescape(self.text)

    def has_columns(self) -> bool:
        """Return whether the line is of a table."""
        return bool(self.columns())

    def columns(self) -> set[int]:
        """Return where the columns of a row begin, but for the first."""
        return {gap.end() for gap in re.finditer(r"(?<=\S)  +", self.shown)}

    def is_row_beside(self, other: "Line") -> bool:
        """Return whether a word begins in the line where each column of a row does.

        Or one more digit stands before the place: numbers are set to the right.
        """
        begins = {gap.end() for gap in re.finditer(r" +|\d(?=\d)", self.shown)}
        columns = other.columns()
        return bool(columns) and columns <= begins

    def has_sentences(self) -> bool:
        """Return whether the line is not of a table, of a tensor or of code."""
        letters = sum(map(str.isalpha, self.shown))
        return (
            len(self.shown) - len(self.shown.lstrip()) < CODE
            and not self.has_columns()
            and 0 < len(self.shown.replace(" ", "")) <= 3 * letters
        )

    def is_indented(self) -> bool:
        """Return whether the line stands as far right as code does, or further."""
        return bool(self.text) and self.shown[:CODE].isspace()

    def ends_a_sentence(self) -> bool:
        """Return whether the line may be the end of one, as `"fc1", "fc2".` is."""
        return self.text.endswith(".") and not self.has_columns()

    def begins_a_message(self) -> bool:
        """Return whether the line begins with the code of an error."""
        return self.text.lstrip("[").startswith("GL")

    def goes_on_in(self, other: "Line") -> bool:
        """Return whether the line ends only where the next word had no room in it."""
        (next_word,) = FIRST_WORD.findall(other.shown) or [""]
        return (
            self.has_sentences()
            and (other.has_sentences() or other.ends_a_sentence())
            and self.column == other.column
            and len(self.space) <= len(other.space)
            and len(self.shown) + 1 + len(next_word) > WIDTH
            and not other.begins_a_message()
        )


def on_page_content(content: str, **_: object) -> str:
    """Give the comments that hold printed text classes of their own."""
    return OUTPUT.sub(marked_output, LINES.sub(marked, content))


def marked(found: re.Match[str]) -> str:
    """Return printed lines that follow each other, marked."""
    end = "\n" if found[0].endswith("\n") else ""
    return joined([Line(*parts) for parts in LINE.findall(found[0])]) + end


def marked_output(found: re.Match[str]) -> str:
    """Return what a cell of an example prints, with its sentences marked."""
    opening, text, closing = found.groups()
    parts = re.findall(r"^( *)(.*)$", text, re.MULTILINE)
    lines = [Line("", space, rest, sign="") for space, rest in parts]
    return opening + joined(lines) + closing


def joined(lines: list[Line]) -> str:
    """Return lines that follow each other as HTML."""
    paragraphs = in_paragraphs(lines)
    above, below = [[], *paragraphs[:-1]], [*paragraphs[1:], []]
    around = [before + after for before, after in zip(above, below, strict=True)]
    code = code_in(lines)
    return "\n".join(
        breaking(paragraph, HANGING)
        if paragraph[0] in code
        else as_html(paragraph, beside)
        for paragraph, beside in zip(paragraphs, around, strict=True)
    )


def code_in(lines: list[Line]) -> list[Line]:
    """Return the lines of code in a message: they stand alone, or below a sentence."""
    empty = Line("", "", "")
    runs = [[*run] for _, run in groupby(lines, Line.is_indented)]
    beside = zip([[empty], *runs], runs, [*runs[1:], [empty]], strict=False)
    return [
        line
        for above, run, below in beside
        if run[0].is_indented() and not run[0].shown[: CODE + 1].isspace()
        if not above[-1].text or above[-1].ends_a_sentence()
        if not below[0].text
        for line in run
    ]


def in_paragraphs(lines: list[Line]) -> list[list[Line]]:
    """Return the lines by paragraph; one that is of none is alone."""
    paragraphs: list[list[Line]] = []
    for line in lines:
        if paragraphs and goes_on(paragraphs[-1], line):
            paragraphs[-1].append(line)
        else:
            paragraphs.append([line])
    return paragraphs


def goes_on(paragraph: list[Line], line: Line) -> bool:
    """Return whether a line is the next of a paragraph, and not the next of a list."""
    first, *others = paragraph
    in_list = not others and first.text[:ALIKE] == line.text[:ALIKE]
    return not in_list and paragraph[-1].goes_on_in(line)


def as_html(lines: list[Line], around: list[Line]) -> str:
    """Return the lines of a paragraph, or a single line that is kept as it is.

    One beside a row of a table is another row of it, however narrow its gaps are, and
    one that has not its columns is the title of the table, or a note below it. A name
    is not broken.
    """
    first = lines[0]
    opening, closing = COMMENT if first.sign else ("", "")
    kept = any(map(first.is_row_beside, around)) or " " not in first.shown
    if (len(lines) == 1 and kept) or not first.has_sentences():
        whole = f"{first.sign}{first.space}{first.text}"
        return f"{first.column}{opening}{whole}{closing}"
    return breaking(lines, 0 if first.sign else HANGING)


def breaking(lines: list[Line], hanging: int) -> str:
    """Return lines that a telephone breaks, with spaces before all but the first."""
    first = lines[0]
    opening, closing = COMMENT if first.sign else ("", "")
    mark = len("#>") * bool(first.sign) + len(first.space) + hanging
    room = SHORTEST - len(first.column) - mark
    marks = ["mark"] + ["mark again"] * (len(lines) - 1)
    body = "\n".join(
        f'{line.column}{opening}<span class="{each}">{line.sign}{line.space}</span>'
        f"{with_breaks(line.text, room)}{closing}"
        for each, line in zip(marks, lines, strict=True)
    )
    where = f"--column: {len(first.column)}; --mark: {mark}"
    return f'<span class="sentences" style="{where}">{body}</span>'


def with_breaks(text: str, room: int) -> str:
    """Return text that breaks inside of words with no room, but in no shape."""
    return SHAPE.sub(r'<span class="whole">\g<0></span>', breakable(text, room))
