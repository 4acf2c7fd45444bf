"""What a page says of each release comes from the recordings, and from them alone."""

import json
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
import yaml
from bs4 import BeautifulSoup
from mkdocs.exceptions import PluginError
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from mkdocs_hooks import error_wordings, recorded_programs
from mkdocs_hooks.hook_recordings import release, span

ROOT = Path(__file__).parents[2]
PAGE: Any = SimpleNamespace(file=SimpleNamespace(src_uri="errors/GL109.md"), meta={})
SOURCE = (ROOT / "docs/errors/GL109.md").read_text()
BUILDS = sorted(
    (path.stem for path in error_wordings.FOLDER.glob("*.json")), key=release
)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a copy of the recordings, which pages are made of."""
    shutil.copytree(error_wordings.FOLDER, tmp_path, dirs_exist_ok=True)
    monkeypatch.setattr(error_wordings, "FOLDER", tmp_path)
    return tmp_path


def built(source: str = SOURCE) -> str:
    return error_wordings.on_page_content(source, page=PAGE)


def entries(content: str) -> list[list[tuple[str, str]]]:
    """Return the releases and what they say, a list for each mistake."""
    page = BeautifulSoup(content, "html.parser")
    return [
        [
            (releases.get_text(), said.get_text())
            for releases, said in zip(
                listed.find_all("dt"), listed.find_all("dd"), strict=True
            )
        ]
        for listed in page.find_all("dl")
    ]


def change(path: Path, error: str | None) -> None:
    whole = json.loads(path.read_text())
    whole["mistakes"]["GL109"][0]["error"] = error
    path.write_text(json.dumps(whole))


def test_successive_releases_that_say_the_same_stand_together() -> None:
    first, second = entries(built())
    assert [releases for releases, _ in first] == [
        f"torch {span([it for it in BUILDS if release(it) < (2, 13)])}",
        f"torch {span([it for it in BUILDS if release(it) >= (2, 13)])}",
    ]
    assert first[0][1].startswith("RuntimeError: One of the differentiated Tensors")
    assert first[1][1].startswith("RuntimeError: The differentiated Tensor at index 0")
    assert second[1][1].startswith("RuntimeError: The differentiated Tensor at index 1")


def test_every_word_is_that_of_a_recording(folder: Path) -> None:
    for path in folder.glob("*.json"):
        change(path, "Error: <the same>")
    (only,), _ = entries(built())
    assert only == (f"torch {span(BUILDS)}", "Error: <the same>")


def test_changing_one_recording_changes_the_page(folder: Path) -> None:
    before = built()
    change(folder / "1.7.0.json", "RuntimeError: something else")
    assert built() != before
    first, _ = entries(built())
    at = BUILDS.index("1.7.0")
    assert [releases for releases, _ in first][:2] == [
        f"torch {span(BUILDS[:at])}",
        "torch 1.7.0",
    ]
    assert first[1][1] == "RuntimeError: something else"
    assert first[2][1] == first[0][1]


def test_a_mistake_that_was_accepted(folder: Path) -> None:
    change(folder / f"{BUILDS[0]}.json", None)
    first, _ = entries(built())
    assert first[0] == (f"torch {BUILDS[0]}", "no error")


def test_the_program_is_the_recorded_one() -> None:
    newest = json.loads((error_wordings.FOLDER / f"{BUILDS[-1]}.json").read_text())
    wanted = [newest["start"], *(it["program"] for it in newest["mistakes"]["GL109"])]
    page = BeautifulSoup(built(), "html.parser")
    assert [code.get_text() for code in page.select("pre code")] == wanted


def test_an_unknown_code_is_refused() -> None:
    with pytest.raises(PluginError, match="GL999"):
        built('<div class="wordings" data-code="GL999"></div>')


def test_no_marker_changes_nothing() -> None:
    assert built("<p>GL109</p>") == "<p>GL109</p>"


def test_the_site_is_built_with_it() -> None:
    hooks = yaml.safe_load((ROOT / "mkdocs.yml").read_text())["hooks"]
    assert "mkdocs_hooks/error_wordings.py" in hooks
    assert "mkdocs_hooks/recorded_programs.py" in hooks


def test_the_search_knows_what_the_newest_release_says() -> None:
    PAGE.meta["tags"] = ["of the page itself"]
    built()
    newest = json.loads((error_wordings.FOLDER / f"{BUILDS[-1]}.json").read_text())
    errors = [it["error"] for it in newest["mistakes"]["GL109"]]
    first, *tags = PAGE.meta["tags"]
    assert first == "of the page itself"
    assert tags
    assert all(any(error.endswith(tag) for error in errors) for tag in tags)


def tags_of(page: str) -> list[str]:
    text = (ROOT / f"docs/{page}.md").read_text()
    return yaml.safe_load(text.split("---")[1])["tags"]


def test_the_search_knows_a_message_of_hooks_as_torch_says_it() -> None:
    tags = tags_of("questions/why-does-my-hook-not-fire")[:2]
    paths = sorted(
        recorded_programs.FOLDER.glob("*.json"), key=lambda path: release(path.stem)
    )
    recorded = [json.loads(path.read_text())["programs"] for path in paths]
    errors = [it["inplace_full_hook"]["error"] for it in recorded]
    assert f": {tags[0]}" in errors[-1]
    assert all(any(f": {tag}" in error for error in errors) for tag in tags)
    index = " ".join((ROOT / "docs/errors/index.md").read_text().split())
    assert f"[{tags[0].rstrip('.')}]" in index


class ToDict(nn.Module):
    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {"y": x.exp()}


def _both_kinds_of_hooks() -> None:
    layer = nn.Linear(2, 2)
    for register in layer.register_backward_hook, layer.register_full_backward_hook:
        register(lambda *_: None)


def _hooked(module: nn.Module, x: Tensor) -> None:
    module.register_full_backward_hook(lambda *_: None)
    y: Any = module(x)
    y = y["y"] if isinstance(y, dict) else y
    y.sum().backward()


def _assigned() -> None:
    torch.zeros(2)[torch.tensor([0])] = torch.ones(1).half()


def _changed_in_between() -> None:
    batches = [torch.ones(2, 2), torch.ones(1, 2)]
    layer = nn.Sequential(nn.Linear(2, 2), nn.Tanh())
    y = cast(Any, checkpoint)(lambda: layer(batches.pop()), use_reentrant=False)
    y.sum().backward()


HOOKS = "questions/why-does-my-hook-not-fire"
CHECKPOINTS = "questions/gradient-checkpointing"
DTYPES = "questions/dtype-errors"
SAID: dict[tuple[str, str], Callable[[], object]] = {
    (HOOKS, "For backward hooks"): lambda: _hooked(
        ToDict(), torch.ones(2, requires_grad=True)
    ),
    (HOOKS, "Full backward hook"): lambda: _hooked(nn.Linear(2, 2), torch.ones(2)),
    ("versions/migrating", "Cannot use both"): _both_kinds_of_hooks,
    (CHECKPOINTS, "None of the inputs"): lambda: cast(Any, checkpoint)(
        nn.Linear(2, 2), torch.ones(2), use_reentrant=True
    ),
    (CHECKPOINTS, "torch.utils.checkpoint: Recomputed"): _changed_in_between,
    (DTYPES, "Found dtype Double"): lambda: nn.functional.huber_loss(
        torch.ones(2, requires_grad=True), torch.ones(2).double()
    ).backward(),
    (DTYPES, "expected scalar type Half"): lambda: (
        torch.ones(1, 2, 2).half() @ torch.ones(1, 2, 2)
    ),
    (DTYPES, "Index put"): _assigned,
}
"""Pages, how a tag of theirs begins, and a program of which torch says that."""


@pytest.mark.parametrize(("where", "program"), SAID.items())
def test_the_search_knows_what_torch_says(
    where: tuple[str, str], program: Callable[[], object]
) -> None:
    page, begins = where
    (tag,) = [it for it in tags_of(page) if it.startswith(begins)]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            program()
            said = [str(it.message) for it in caught]
        except RuntimeError as error:
            said = [str(error)]
    assert any(tag in it for it in said), said
