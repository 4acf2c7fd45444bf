"""The theme's search is mended, or the build ends."""

from pathlib import Path

import pytest
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files

from mkdocs_hooks.searched_numbers import RIGHT, WRONG, on_files


def files(folder: Path, *contents: str) -> Files:
    """Return the theme's workers, with these texts."""
    made: list[File] = []
    for i, content in enumerate(contents):
        name = f"assets/javascripts/workers/search.{i}.min.js"
        made.append(File(name, str(folder), str(folder / "site"), True))
        Path(folder, name).parent.mkdir(parents=True, exist_ok=True)
        Path(folder, name).write_text(content, encoding="utf-8")
    return Files(made)


def test_one_line_is_replaced(tmp_path: Path) -> None:
    (mended,) = on_files(files(tmp_path, f"before{WRONG}after"))
    assert mended.content_string == f"before{RIGHT}after"
    assert RIGHT != WRONG
    mended.copy_file()
    built = tmp_path / "site" / mended.src_uri
    assert built.read_text(encoding="utf-8") == f"before{RIGHT}after"


@pytest.mark.parametrize("contents", [[], ["other"], [WRONG + WRONG], [WRONG, WRONG]])
def test_another_search_ends_the_build(tmp_path: Path, contents: list[str]) -> None:
    with pytest.raises(PluginError, match="another one"):
        on_files(files(tmp_path, *contents))
