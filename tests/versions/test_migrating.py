"""The page on migrating shows what was recorded, and what it says of that is so."""

import ast
import copy
import re
from types import SimpleNamespace
from typing import Any, cast

import pytest
from bs4 import BeautifulSoup
from mkdocs.structure.pages import Page

from mkdocs_hooks import hook_recordings, recorded_programs

from .tools import ROOT

NAME = "versions/migrating.md"
TEXT = (ROOT / "docs" / NAME).read_text(encoding="utf-8")
PROGRAMS = recorded_programs.builds()
OLD, NEWEST = "1.7.1", list(PROGRAMS)[-1]
PAIRS = re.findall(r'data-before="(\w+)" data-torch="1.7.1" data-after="(\w+)"', TEXT)
RUNS = re.findall(r'<div class="ran" data-name="(\w+)"', TEXT)
each_pair = pytest.mark.parametrize(("before", "after"), PAIRS)


def page() -> str:
    """Return the page's markers, replaced."""
    given = cast(Page, SimpleNamespace(file=SimpleNamespace(src_uri=NAME)))
    return recorded_programs.on_page_content(TEXT, page=given)


def lines(build: str, name: str) -> list[str]:
    return PROGRAMS[build][name]["stdout"].splitlines()


# ---- What it shows


def test_every_program_with_hooks_is_shown() -> None:
    shown = {name for pair in PAIRS for name in pair} | set(RUNS)
    hooks = {name for name in PROGRAMS[OLD] if re.search("_hooks?$", name)}
    assert hooks == shown


def test_every_pair_shows_both_programs_and_what_they_gave() -> None:
    found = BeautifulSoup(page(), "html.parser").select(".sides")
    assert len(found) == len(PAIRS) == TEXT.count('class="sides"')
    for sides, (before, after) in zip(found, PAIRS, strict=True):
        columns = sides.find_all("div", recursive=False)
        builds = [(before, OLD), (after, NEWEST)]
        for column, (name, build) in zip(columns, builds, strict=True):
            ran = PROGRAMS[build][name]
            assert f"torch {build}:" in column.get_text()
            codes = [code.get_text() for code in column.select("pre code")]
            assert codes == [ran["source"], ran["stdout"]]
            assert [it.get_text() for it in column.select(".said")] == ran["warnings"]


@pytest.mark.parametrize(
    ("build", "name"),
    sorted(
        {(OLD, before) for before, _ in PAIRS}
        | {(NEWEST, name) for name in [*RUNS, *(after for _, after in PAIRS)]}
    ),
)
def test_changing_one_recording_changes_the_page(
    build: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    changed: Any = copy.deepcopy(PROGRAMS)
    changed[build][name].update(stdout="changed\n")
    assert "changed\n" not in page()
    monkeypatch.setattr(recorded_programs, "builds", lambda: changed)
    assert "changed\n" in page()


# ---- What it says


def test_a_full_hook_stands_in_the_very_place_of_the_old_one() -> None:
    for name, full in PROGRAMS[OLD].items():
        if name.endswith("_full_hook"):
            old = PROGRAMS[OLD][name.replace("_full_", "_old_")]["source"]
            other = full["source"].replace("_full_backward_hook", "_backward_hook")
            assert other == old


@each_pair
def test_both_run_without_an_error_and_only_the_new_one_needs_today(
    before: str, after: str
) -> None:
    old, new = PROGRAMS[OLD][before], PROGRAMS[NEWEST][after]
    assert (old["error"], old["warnings"], new["error"]) == (None, [], None)
    error = PROGRAMS[OLD][after]["error"]
    full_hooks = "register_full_backward_hook" in new["source"]
    assert (error is not None and "register_full" in error) == full_hooks


def test_the_old_entries_are_those_of_the_last_operation() -> None:
    assert lines(OLD, "linear_old_hook") == ["[(2,), (4, 3), (3, 2)]"]
    assert lines(NEWEST, "linear_full_hook") == ["[(4, 3)]"]
    assert lines(OLD, "first_layer_old_hook") == ["(2,)", "None", "(3, 2)"]
    assert lines(NEWEST, "first_layer_full_hook") == ["None"]
    assert lines(OLD, "sequential_old_hook") == ["[(4, 5)]"]
    assert lines(NEWEST, "sequential_full_hook") == ["[(4, 3)]"]


def test_grad_output_of_a_linear_layer_stays_as_it_is() -> None:
    builds = hook_recordings.every_build()
    (old,) = builds[OLD]["linear-2d"]["legacy"]["calls"]
    (new,) = builds[NEWEST]["linear-2d"]["full"]["calls"]
    assert old["grad_output"] == new["grad_output"] != []


@pytest.mark.parametrize("name", ["residual", "two_inputs"])
def test_the_full_hook_tells_the_true_gradients_and_the_old_one_none(name: str) -> None:
    for build, kind in (OLD, "old"), (NEWEST, "full"):
        got, true = lines(build, f"{name}_{kind}_hook")
        assert got.startswith("hook ")
        entries = ast.literal_eval(got.removeprefix("hook "))
        gradients = ast.literal_eval(true.removeprefix("true "))
        assert (entries == gradients) == (kind == "full")
        assert not (kind == "old" and any(entry in gradients for entry in entries))


def test_a_dict_has_an_empty_entry_and_a_keyword_none() -> None:
    assert lines(NEWEST, "named_inputs_full_hook")[0] == "hook (None,)"


def test_in_place_the_full_hook_raises_and_the_tensor_hook_gets_the_same() -> None:
    assert "modified inplace" in PROGRAMS[NEWEST]["inplace_full_hook"]["error"]
    assert PROGRAMS[NEWEST]["inplace_full_hook"]["stdout"] == ""
    got = lines(OLD, "inplace_old_hook")
    assert got == lines(NEWEST, "inplace_tensor_hook") == ["output [[1.0, 0.0]]"]


def test_the_weight_hook_gets_what_the_old_hook_had_transposed() -> None:
    assert lines(OLD, "weight_old_hook") == lines(NEWEST, "weight_tensor_hook")
    first, second = lines(NEWEST, "weight_accumulated_hook")
    assert "4.0" in first
    assert "8.0" in second


def test_parameter_hooks_bring_back_what_the_old_hook_changed() -> None:
    old, parameters = lines(OLD, "scale_old_hook"), "scale_parameter_hooks"
    assert lines(NEWEST, parameters) == old
    full = lines(NEWEST, "scale_full_hook")
    changed = [a != b for a, b in zip(full, old, strict=True)]
    assert changed == [False, True, True]


def test_clipping_after_the_pass_gives_the_parameters_what_the_old_hook_did() -> None:
    assert lines(OLD, "clip_old_hook") == lines(NEWEST, "clip_without_hook")
    first, second = lines(NEWEST, "clip_without_hook")
    assert first.startswith("weight [[1.0, ")  # an entry was clipped,
    assert not first.endswith("1.0]]")  # another was not
    assert second == "bias [1.0]"


def test_a_shared_layer_is_clipped_for_each_call_or_once() -> None:
    assert lines(OLD, "clip_shared_old_hook") == ["weight [[2.0]]"]
    assert lines(NEWEST, "clip_shared_tensor_hook") == ["weight [[1.0]]"]


@pytest.mark.parametrize("kind", ["old", "full"])
def test_what_returns_gradients_bears_a_first_layer(kind: str) -> None:
    source = PROGRAMS[NEWEST][f"scale_{kind}_hook"]["source"]
    names: dict[str, Any] = {}
    exec(source.split("layer =")[0], names)
    assert names["halve"](None, (None,), ()) == (None,)


def test_one_module_takes_one_kind() -> None:
    assert "Cannot use both" in PROGRAMS[NEWEST]["both_hooks"]["error"]


def test_the_warning_depends_on_the_inputs() -> None:
    plain, named = (
        PROGRAMS[NEWEST][name]["warnings"]
        for name in ("linear_old_hook", "named_inputs_old_hook")
    )
    assert len(plain) == len(named) == 1
    assert plain != named
