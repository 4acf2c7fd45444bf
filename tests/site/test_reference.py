"""The reference has every public name of gradlib, and no other."""

import re
from pathlib import Path

import gradlib

REFERENCE = Path(__file__).parents[2] / "docs/reference"


def documented(folder: Path) -> list[str]:
    """Return the names that the reference pages of a folder document."""
    pages = [page.read_text(encoding="utf-8") for page in folder.glob("*.md")]
    return sorted(re.findall(r"^::: gradlib\.(\w+)$", "\n".join(pages), re.MULTILINE))


def test_every_public_name_is_documented_once() -> None:
    assert documented(REFERENCE) == sorted(gradlib.__all__)


def test_a_missing_name_is_noticed(tmp_path: Path) -> None:
    for page in REFERENCE.glob("*.md"):
        text = page.read_text(encoding="utf-8")
        (tmp_path / page.name).write_text(text.replace("::: gradlib.Pass\n", ""))
    assert set(gradlib.__all__) - set(documented(tmp_path)) == {"Pass"}
