"""Make the search find the page of a Jacobian error by the messages it shows.

The messages become the page's tags, by which `searched_messages.py` finds it.
"""

import re

from mkdocs.structure.pages import Page

CODE = re.compile(r"errors/(GL3\d\d)\.md")
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
PRINTED = re.compile(r"^ *#>(.*)$", re.MULTILINE)
END = "More in gradlib's documentation"


def on_page_markdown(markdown: str, *, page: Page, **_: object) -> None:
    """Set the tags of a page."""
    if code := CODE.fullmatch(page.file.src_uri):
        page.meta["tags"] = messages(markdown, code[1])


def messages(markdown: str, code: str) -> list[str]:
    """Return the messages with a code that the blocks of a page print.

    The ending that all messages share is left out: it would find any of the pages.
    """
    found: list[str] = []
    for block in BLOCK.findall(markdown):
        text = " ".join(" ".join(PRINTED.findall(block)).split())
        said = text.split(f"[{code}] ")[1:]
        found += [f"[{code}] {it.partition(END)[0].strip()}" for it in said]
    return list(dict.fromkeys(found))
