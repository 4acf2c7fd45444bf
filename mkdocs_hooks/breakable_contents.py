"""Let a long name in the table of contents break where a word of it begins."""

import re
from collections.abc import Iterable

from mkdocs.structure.pages import Page
from mkdocs.structure.toc import AnchorLink

TAG_OR_NAME = re.compile(r"<[^>]*>|\w{16,}")
"""A name that is shorter has room."""

WORD = re.compile(r"(?<=[a-z])(?=[A-Z])|(?<=[a-z]_)(?=[a-z])")
"""Where another word of a name begins."""


def on_page_content(content: str, page: Page, **_: object) -> str:
    """Give the names in the page's contents places to break at."""
    break_names(page.toc)
    return content


def break_names(entries: Iterable[AnchorLink]) -> None:
    """Give the names in these entries, and in those below them, places to break at."""
    for entry in entries:
        entry.title = TAG_OR_NAME.sub(breakable, entry.title)
        break_names(entry.children)


def breakable(found: re.Match[str]) -> str:
    """Return a tag as it is, and a name with places to break at."""
    return found[0] if found[0][0] == "<" else WORD.sub("<wbr>", found[0])
