"""What stands above a page's title is read, and not dropped for a slip in its YAML."""

from pathlib import Path

import pytest
from mkdocs.utils import meta

PAGES = sorted(Path(__file__).parents[2].glob("docs/**/*.md"))


@pytest.mark.parametrize(
    "page", [it for it in PAGES if it.name != "README.md"], ids=str
)
def test_front_matter_is_read(page: Path) -> None:
    text, told = meta.get_data(page.read_text(encoding="utf-8"))
    assert text.lstrip().startswith(("# ", "<")), "mkdocs drops what it cannot read"
    tags = told.get("tags", [])
    assert all(isinstance(it, str) for it in tags)
    assert len(set(tags)) == len(tags)
