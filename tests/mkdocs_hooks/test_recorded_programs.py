"""Programs and what they print come from the recordings, and from them alone."""

import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from bs4 import BeautifulSoup
from mkdocs.exceptions import PluginError

from mkdocs_hooks import recorded_programs
from mkdocs_hooks.hook_recordings import span

PAGE: Any = SimpleNamespace(file=SimpleNamespace(src_uri="versions/migrating.md"))
NAME = "vector_of_one_entry"
BUILDS = list(recorded_programs.builds())
NEWEST = BUILDS[-1]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a copy of the recordings, which pages are made of."""
    shutil.copytree(recorded_programs.FOLDER, tmp_path, dirs_exist_ok=True)
    monkeypatch.setattr(recorded_programs, "FOLDER", tmp_path)
    return tmp_path


def built(marker: str) -> BeautifulSoup:
    content = recorded_programs.on_page_content(f"<h1>.</h1>{marker}", page=PAGE)
    return BeautifulSoup(content, "html.parser")


def recorded(build: str) -> dict[str, Any]:
    path = recorded_programs.FOLDER / f"{build}.json"
    return json.loads(path.read_text())["programs"][NAME]


def test_a_program_is_shown_as_it_was_run() -> None:
    page = built(f'<div class="program" data-name="{NAME}"></div>')
    (code,) = page.select("pre code")
    assert code.get_text() == recorded(NEWEST)["source"]


def test_a_program_in_a_box_is_in_no_paragraph() -> None:
    marker = f'<div class="program" data-name="{NAME}"></div>'
    assert built(f"<p>{marker}</p>") == built(marker)


@pytest.mark.parametrize("build", ["1.2.0", "1.7.1", "newest"])
def test_what_it_gives_in_one_build(build: str) -> None:
    page = built(f'<div class="ran" data-name="{NAME}" data-torch="{build}"></div>')
    version = NEWEST if build == "newest" else build
    ran = recorded(version)
    assert [it.get_text() for it in page.find_all("p")] == [f"torch {version}:"]
    assert [it.get_text() for it in page.select(".no-copy code")] == [ran["stdout"]]
    messages = [*ran["warnings"], *filter(None, [ran["error"]])]
    assert [it.get_text() for it in page.select(".said")] == messages


def test_what_it_gives_in_every_build() -> None:
    page = built(f'<div class="ran" data-name="{NAME}"></div>')
    accepted = [build for build in BUILDS if recorded(build)["error"] is None]
    assert accepted == BUILDS[: len(accepted)]
    assert [it.get_text() for it in page.find_all("p")] == [
        f"torch {span(accepted)}:",
        f"torch {span(BUILDS[len(accepted) :])}:",
    ]


def test_what_it_prints_folds_where_it_is_too_long() -> None:
    marker = '<div class="ran" data-name="hook_source" data-torch="1.7.1"></div>'
    folds = built(marker).select(".printed > .folds")
    texts = [it.get_text() for it in folds]
    assert "_global_backward_hooks.values()," in "".join(texts)
    assert all(text == text.strip() for text in texts)


def test_a_program_that_gives_nothing() -> None:
    marker = '<div class="ran" data-name="first_layer_full_hook" data-torch="1.8.1">'
    page = built(f"{marker}</div>")
    said = [it.get_text() for it in page.find_all("p")]
    assert said == ["torch 1.8.1:", "It prints nothing."]


def test_two_programs_side_by_side() -> None:
    other = f"{NAME}_mended"
    names = f'data-before="{NAME}" data-torch="1.2.0" data-after="{other}"'
    page = built(f'<div class="sides" {names}></div>')
    (sides,) = page.select(".sides")
    before, after = sides.find_all("div", recursive=False)
    for column, title, build in (before, "Before", "1.2.0"), (after, "After", NEWEST):
        said = [it.get_text() for it in column.find_all("p")]
        assert said == [title, f"torch {build}:"]
    assert before.select("pre code")[0].get_text() == recorded("1.2.0")["source"]
    assert before.select("pre code")[1].get_text() == recorded("1.2.0")["stdout"]
    marked = [it.get_text() for it in after.select(".hll")]
    assert marked == ["out.backward(torch.tensor(1.0))\n"]


def test_changing_one_recording_changes_the_page(folder: Path) -> None:
    marker = f'<div class="ran" data-name="{NAME}"></div>'
    whole = json.loads((folder / "1.7.1.json").read_text())
    whole["programs"][NAME].update(stdout="<changed>\n", warnings=["W: w"], error=None)
    (folder / "1.7.1.json").write_text(json.dumps(whole))
    page = built(marker)
    assert "torch 1.7.1:" in [it.get_text() for it in page.find_all("p")]
    assert "<changed>\n" in [it.get_text() for it in page.select("pre code")]
    assert "W: w" in [it.get_text() for it in page.select(".said")]


@pytest.mark.parametrize(
    "marker",
    [
        '<div class="program" data-name="none"></div>',
        f'<div class="ran" data-name="{NAME}" data-torch="1.6.0"></div>',
        '<div class="ran"></div>',
        f'<div class="ran" data-name="{NAME}" data-build="1.7.1"></div>',
        f'<div class="sides" data-before="{NAME}" data-after="{NAME}"></div>',
    ],
)
def test_what_is_not_recorded_is_refused(marker: str) -> None:
    with pytest.raises(PluginError, match=r"versions/migrating\.md: <div"):
        built(marker)
