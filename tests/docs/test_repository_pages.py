"""The links of the pages that are read in the repository, and not on the site."""

import re
from pathlib import Path

import pytest

from .guards import outside_fences
from .snippets import ROOT, file_name

PAGES = sorted(ROOT.glob("*.md"))
LINK = re.compile(r"\]\(([^)\s]+)\)")


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(r"(?m)^#+ (.*)$", page.read_text(encoding="utf-8"))
    return {re.sub(r"[^\w -]", "", h.lower()).replace(" ", "-") for h in headings}


def broken_links(page: Path, text: str) -> list[str]:
    """Links to a file or heading that is not there, or to http, with their lines."""
    return [
        f"{file_name(page)}:{number}: broken link: {link}"
        for number, line in enumerate(outside_fences(text), start=1)
        for link in LINK.findall(line)
        if not (link.startswith("https://") or holds(page, link))
    ]


def holds(page: Path, link: str) -> bool:
    """Whether a link of a page leads to a file or a heading that is there."""
    path, _, anchor = link.partition("#")
    target = page.parent / path if path else page
    return target.is_file() and (not anchor or anchor in anchors(target))


@pytest.mark.parametrize("page", PAGES, ids=file_name)
def test_links_hold(page: Path):
    findings = broken_links(page, page.read_text(encoding="utf-8"))
    assert not findings, "\n".join(findings)


@pytest.mark.parametrize("link", ["docs/no.md", "#no", "CHANGELOG.md#no", "http://a"])
def test_a_broken_link_is_found(link: str):
    text = f"# A\n\n[x]({link}) and ![y](docs/assets/readme-figure.svg)\n"
    page = ROOT / "README.md"
    assert broken_links(page, text) == [f"README.md:3: broken link: {link}"]


def test_links_that_hold_pass():
    text = "[x](#on-a-gpu) [y](CHANGELOG.md#unreleased) [z](https://a.b/)"
    assert not broken_links(ROOT / "README.md", text)
