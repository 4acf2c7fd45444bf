"""A page is looked at again if anything changed by which something may be wrong."""

from collections.abc import Callable
from pathlib import Path

import pytest

from . import found_sound
from .found_sound import anchors, keep, state_of, was_found_sound

URL = "questions/why/"
PAGE = '<h1 id="why">Why</h1><img src="../../mine.svg"><a href="../how/#how">how</a>'


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(found_sound, "KEPT", tmp_path / "kept")
    site = tmp_path / "site"
    for file, text in {
        "questions/why/index.html": PAGE,
        "questions/how/index.html": '<h1 id="how">How</h1>',
        "mine.svg": "<svg/>",
        "other.svg": "<svg/>",
        "assets/all.css": "p {}",
        "search/search_index.json": "{}",
    }.items():
        (site / file).parent.mkdir(parents=True, exist_ok=True)
        (site / file).write_text(text)
    return site


def state(site: Path, browser: str = "150") -> str:
    # As in another run, nothing is known of the files yet.
    for known in (found_sound._of_all, found_sound._others, anchors):
        known.cache_clear()
    return state_of(site / URL / "index.html", site, browser)


def write(file: str, text: str) -> Callable[[Path], object]:
    return lambda site: (site / file).write_text(text)


CHANGES = {
    "the page": write(f"{URL}index.html", PAGE + "<p>more</p>"),
    "its picture": write("mine.svg", "<svg> </svg>"),
    "a style": write("assets/all.css", "p { color: #ccc }"),
    "a new script": write("assets/all.js", ""),
    "an anchor of another page": write("questions/how/index.html", "<h1>How</h1>"),
    "a page that is gone": lambda site: (site / "questions/how/index.html").unlink(),
}
NO_CHANGES = {
    "nothing": lambda _: None,
    "the words of another page": write(
        "questions/how/index.html", '<h1 id="how">How?</h1>'
    ),
    "another page's picture": write("other.svg", "<svg> </svg>"),
    "what the search finds": write("search/search_index.json", "{ }"),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_it_is_looked_at_again(site: Path, change: Callable[[Path], object]) -> None:
    assert not was_found_sound(URL, state(site))
    keep(URL, state(site))
    assert was_found_sound(URL, state(site))
    change(site)
    assert not was_found_sound(URL, state(site))


@pytest.mark.parametrize("change", NO_CHANGES.values(), ids=NO_CHANGES)
def test_it_is_not(site: Path, change: Callable[[Path], object]) -> None:
    keep(URL, state(site))
    change(site)
    assert was_found_sound(URL, state(site))
    assert not was_found_sound(URL, state(site, browser="151"))
    assert not was_found_sound("questions/how/", state(site))
