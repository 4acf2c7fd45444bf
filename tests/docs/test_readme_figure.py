"""The README's figure is a committed file: it must be what the README's block draws.

It is the only one: every other picture is drawn while the site is built.
"""

import re
from pathlib import Path

import pytest

from mkdocs_hooks import figures

DOCS = figures.cache.ROOT / "docs"
FIGURE = DOCS / "assets" / "readme-figure.svg"
PICTURES = {".svg", ".png", ".jpg", ".jpeg", ".gif", ".webp", ".avif"}
NUMBER = re.compile(r"-?\d+\.\d+")
NAMED_AFTER_NUMBERS = re.compile(r"\b[mp][0-9a-f]{10}\b")


def drawn() -> str:
    """Draw what the README's block with a `figure` attribute draws, on white."""
    readme = (figures.cache.ROOT / "README.md").read_text(encoding="utf-8")
    (block,) = figures.FENCE.finditer(readme)
    assert f"![{block['alt']}](docs/assets/{FIGURE.name})" in readme
    return figures.draw(block["code"], "README.md", background="white")


def differences(a: str, b: str) -> list[str]:
    """Say where two drawings differ, other than by a fraction of a point.

    Another processor rounds otherwise, and the last digits of a coordinate follow, and
    so do the names of shapes, which are made of them.
    """
    a, b = (NAMED_AFTER_NUMBERS.sub("", it) for it in (a, b))
    if NUMBER.sub("#", a) != NUMBER.sub("#", b):
        return ["they do not have the same parts"]
    pairs = zip(NUMBER.findall(a), NUMBER.findall(b), strict=True)
    return [f"{x} is {y}" for x, y in pairs if abs(float(x) - float(y)) > 0.2]


def test_the_committed_figure_is_the_one_drawn(request: pytest.FixtureRequest) -> None:
    if request.config.getoption("update_examples"):
        FIGURE.write_text(drawn(), encoding="utf-8")
    found = differences(FIGURE.read_text(encoding="utf-8"), drawn())
    assert not found, f"run `make update-docs`: {FIGURE.name}: {found[:3]}"


def test_a_changed_figure_is_noticed() -> None:
    svg = '<path d="M 10.0 20.0"/>'
    assert differences(svg, '<path d="M 10.1 20.0"/>') == []
    assert differences(svg, '<path d="M 10.0 21.5"/>') == ["20.0 is 21.5"]
    assert differences(svg, '<path d="M 10.0 20.0"/><g/>')


def pictures(folder: Path) -> set[Path]:
    """Every picture in a folder and the folders inside it."""
    return {path for path in folder.rglob("*") if path.suffix.lower() in PICTURES}


def test_no_other_picture_is_committed() -> None:
    others = pictures(DOCS) - {FIGURE}
    assert not others, f"nobody computes what these show: {sorted(others)}"


def test_a_committed_picture_is_noticed(tmp_path: Path) -> None:
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / "plot.PNG").touch()
    assert pictures(tmp_path) == {tmp_path / "deep" / "plot.PNG"}
