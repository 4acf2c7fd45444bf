"""The theme's search is changed, or the build ends."""

from pathlib import Path
from types import ModuleType

import pytest
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files

from mkdocs_hooks import (
    search_worker,
    searched_common_words,
    searched_messages,
    searched_numbers,
    searched_word_forms,
)

LINES = {"one": "1", "two": "2"}


def files(folder: Path, *contents: str) -> Files:
    """Return the theme's workers, with these texts."""
    made: list[File] = []
    for i, content in enumerate(contents):
        name = f"assets/javascripts/workers/search.{i}.min.js"
        made.append(File(name, str(folder), str(folder / "site"), True))
        Path(folder, name).parent.mkdir(parents=True, exist_ok=True)
        Path(folder, name).write_text(content, encoding="utf-8")
    return Files(made)


def test_lines_are_replaced(tmp_path: Path) -> None:
    given = files(tmp_path, "zero one two three")
    (changed,) = search_worker.replace(given, "hook.py", LINES, "added ")
    assert changed.content_string == "added zero 1 2 three"
    changed.copy_file()
    built = tmp_path / "site" / changed.src_uri
    assert built.read_text(encoding="utf-8") == "added zero 1 2 three"


@pytest.mark.parametrize(
    "contents",
    [[], ["other"], ["one"], ["one two two"], ["one two", "one two"], ["one", "two"]],
)
def test_another_search_ends_the_build(tmp_path: Path, contents: list[str]) -> None:
    with pytest.raises(PluginError, match=r"hook\.py: the theme's search is another"):
        search_worker.replace(files(tmp_path, *contents), "hook.py", LINES)


# Each hook that changes the search, what it looks for, and what it adds.
CHANGES: list[tuple[ModuleType, list[str], str]] = [
    (searched_numbers, [searched_numbers.WRONG], ""),
    (searched_messages, list(searched_messages.LINES), searched_messages.ADDED),
    (
        searched_common_words,
        list(searched_common_words.LINES),
        searched_common_words.ADDED,
    ),
    (searched_word_forms, list(searched_word_forms.LINES), searched_word_forms.ADDED),
]


@pytest.mark.parametrize(("hook", "lines", "added"), CHANGES)
def test_a_hook_changes_each_of_its_lines(
    tmp_path: Path, hook: ModuleType, lines: list[str], added: str
) -> None:
    (changed,) = hook.on_files(files(tmp_path, "; ".join(lines)))
    assert changed.content_string.startswith(added)
    left = changed.content_string.removeprefix(added).split("; ")
    assert all(new != line for new, line in zip(left, lines, strict=True))
