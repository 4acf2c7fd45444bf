"""The Python blocks each page of the built site shows, and those run for it."""

import re
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path

import griffe
import jupytext
from bs4 import BeautifulSoup, Tag
from pytest_examples import CodeExample

from .snippets import ROOT

# The API reference adds signatures and source listings, which are no blocks.
BLOCK = "div[class*='language-py']:not(.doc-signature, .mkdocstrings-source *)"


def page_paths(site: Path) -> list[str]:
    """Every page of a built site, as a path inside the site."""
    return [page.relative_to(site).as_posix() for page in sorted(site.rglob("*.html"))]


def parsed(site: Path, path: str) -> BeautifulSoup:
    """The article of a page, where it shows blocks or documents a name, without spans.

    Most tags of the site are spans that colour words of code. To read them all takes
    many seconds, and they change no text.
    """
    text = (site / path).read_text(encoding="utf-8")
    (article,) = re.findall("<article.*?</article>", text, re.DOTALL)
    has_any = "language-py" in article or "doc-heading" in article
    plain = re.sub(r"</?span\b[^>]*>", "", article) if has_any else ""
    return BeautifulSoup(plain, "html.parser")


def shown(page: BeautifulSoup) -> list[str]:
    """The text of every Python block on a page."""
    blocks = (block.find("code") for block in page.select(BLOCK))
    return [block.get_text().strip() for block in blocks if isinstance(block, Tag)]


def cells(program: Path) -> list[str]:
    """The code cells of an example, whose page shows each as a block."""
    notebook = jupytext.read(program, fmt="py:percent")
    return [c.source.strip() for c in notebook.cells if c.cell_type == "code"]


def run_for(path: str, page: BeautifulSoup, run: Iterable[CodeExample]) -> list[str]:
    """The text of every block that was run for a page, whatever the page is made of."""
    if Path(path).name != "index.html":
        return []
    name = Path(path).parent
    program = ROOT / f"{name}.py"
    if name.parts[:1] == ("examples",) and program.exists():
        return cells(program)
    markdown = {ROOT / "docs" / name / "index.md", ROOT / "docs" / f"{name}.md"}
    places = list(_docstring_lines(page))
    return [
        block.source.strip()
        for block in run
        if block.path in markdown
        or any(block.path == p and block.start_line in lines for p, lines in places)
    ]


def _docstring_lines(page: BeautifulSoup) -> Iterator[tuple[Path, range]]:
    """Where the docstrings stand that a page of the API reference shows."""
    for heading in page.select(".doc-heading[id]"):
        documented = _package()[str(heading["id"]).removeprefix("gradlib.")]
        doc = documented.docstring
        if doc and doc.lineno and doc.endlineno:
            yield Path(str(documented.filepath)), range(doc.lineno, doc.endlineno + 1)


@cache
def _package() -> griffe.Object | griffe.Alias:
    return griffe.load("gradlib", search_paths=[ROOT])
