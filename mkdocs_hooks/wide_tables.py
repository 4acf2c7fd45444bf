"""Let a table too wide for the screen scroll by itself, with the keyboard too.

One with many numbers says how many: on a phone a row of it takes two lines, its texts
above its numbers. Long names, and those in the headings of the
reference, get places to break at: between their words, not within one. In tables only
phones use these.
"""

import re

TABLE = re.compile(r"<table>.*?</table>", re.DOTALL)
HEAD = re.compile("<th(?: [^>]*)?>")

MANY = 4
"""So many columns of numbers get a line of their own on a phone."""

TEXTS = 2
"""So many columns of text have room in the line above the numbers."""

CODE = re.compile(r"(?<=<code>)[^<]{13,}")
"""Short names stay whole."""

HEADING = re.compile(r'(?<=-name">)[^<]+')
END = re.compile(r"(?<=[a-z])[_.](?=[A-Za-z])")
"""The end of a word in a name, where another follows."""


def on_page_content(content: str, **_: object) -> str:
    """Wrap every table of a page."""
    return TABLE.sub(wide, HEADING.sub(breakable, content))


def wide(table: re.Match[str]) -> str:
    """Return a table in a box in which it scrolls."""
    heads = HEAD.findall(table[0])
    numbers = sum("right" in head for head in heads)
    two_lines = numbers >= MANY and len(heads) - numbers <= TEXTS
    many = f' style="--numbers: {numbers}"' * two_lines
    opening = f'<div class="wide" tabindex="0" role="group" aria-label="Table"{many}>'
    return f"{opening}{CODE.sub(breakable, table[0])}</div>"


def breakable(name: re.Match[str]) -> str:
    """Return a name with places to break at."""
    return END.sub(r"\g<0><wbr>", name[0])
