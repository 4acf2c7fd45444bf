"""Which pages were found sound before, and show nothing else since.

They are not opened again: a browser takes a minute and more to look at all of them. In
CI, where nothing is kept from before, each is looked at.
"""

import hashlib
import html
import re
from functools import cache
from importlib.metadata import version
from pathlib import Path

ROOT = Path(__file__).parents[2]
KEPT = ROOT / ".cache" / "sound_pages"
PICTURES = (".png", ".svg")
"""What a page shows only if it names it."""
UNSEEN = ("search_index.json", "sitemap.xml", "sitemap.xml.gz")
"""What no page shows by itself."""


def was_found_sound(url: str, state: str) -> bool:
    """Tell whether a page was found sound in a state."""
    kept = _kept(url)
    return kept.exists() and kept.read_text() == state


def keep(url: str, state: str) -> None:
    """Note that a page was found sound in a state."""
    KEPT.mkdir(parents=True, exist_ok=True)
    _kept(url).write_text(state)


def _kept(url: str) -> Path:
    return KEPT / (url.strip("/").replace("/", "_") or "home")


def state_of(file: Path, site: Path, *more: str) -> str:
    """Return a digest of all that decides what is found wrong with a page.

    Args:
        file: The page.
        site: The folder it is in: what all pages share, and where links may lead.
        more: What else decides, as the browser.
    """
    shown = file.read_bytes()
    state = hashlib.sha256("\n".join([*more, _of_all(site)]).encode() + shown)
    for picture in _others(site, pictures=True):
        if picture.name.encode() in shown:
            state.update(picture.read_bytes())
    return state.hexdigest()


@cache
def _of_all(site: Path) -> str:
    """Return a digest of the checks, and of what each page shows or may lead to."""
    state = hashlib.sha256(version("axe-playwright-python").encode())
    for check in sorted(Path(__file__).parent.glob("*.py")):
        state.update(check.read_bytes())
    for other in _others(site, pictures=False):
        state.update(f"{other.relative_to(site)}\n".encode() + other.read_bytes())
    for page in sorted(site.rglob("*.html")):
        state.update(f"{page.relative_to(site)} {sorted(anchors(page))}\n".encode())
    return state.hexdigest()


@cache
def _others(site: Path, *, pictures: bool) -> list[Path]:
    """Return the files of a site that are no pages: its pictures, or all but these."""
    left_out = (".html", *UNSEEN, *([] if pictures else PICTURES))
    return sorted(
        it
        for it in site.rglob("*")
        if it.is_file()
        and not it.name.endswith(left_out)
        and (it.name.endswith(PICTURES) or not pictures)
    )


@cache
def anchors(file: Path) -> set[str]:
    """Return where a link may lead to in a page."""
    found = re.findall(r'\b(?:id|name)="([^"]*)"', file.read_text(encoding="utf-8"))
    return set(map(html.unescape, found))
