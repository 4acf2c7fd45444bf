"""What mistakes and programs say in each build: the tools, and what they recorded."""

import json
import re
import subprocess
import sys
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from gradlib.vjp.cases import CASES

from .tools import DATA, TOOLS, load, printed_alone

errors: Any = load("record_errors")
programs: Any = load("record_programs")
without_python: Any = load("check_versions").without_python
TODAY = torch.__version__.split("+")[0]
BUILDS = sorted(path.stem for path in (DATA / "hooks").glob("*.json"))
each_kind = pytest.mark.parametrize("kind", ["errors", "programs"])
each_build = pytest.mark.parametrize("build", BUILDS)


@cache
def recording(kind: str, build: str) -> dict[str, Any]:
    path = DATA / kind / f"{build}.json"
    return json.loads(path.read_text(encoding="utf-8"))


# ---- The tools.


def check_against_committed(kind: str, again: str) -> None:
    committed = DATA / kind / f"{TODAY}.json"
    if not committed.exists():
        pytest.skip(f"no recording of torch {TODAY} is committed")
    assert without_python(again) == without_python(committed.read_text())


def test_todays_errors_are_as_committed_from_one_file_alone(tmp_path: Path) -> None:
    check_against_committed("errors", printed_alone("record_errors", tmp_path))


def test_todays_programs_are_as_committed() -> None:
    command = [sys.executable, str(TOOLS / "record_programs.py")]
    again = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    check_against_committed("programs", again)


@pytest.mark.parametrize("tool", [errors, programs])
def test_it_writes_what_it_else_prints(
    tool: Any, monkeypatch: pytest.MonkeyPatch, capsys: Any, tmp_path: Path
) -> None:
    monkeypatch.setattr(errors, "MISTAKES", {"GL101": ["y.backward()"]})
    monkeypatch.setattr(programs, "FOLDER", tmp_path)
    out = tmp_path / "out.json"
    for arguments in [[], [str(out)]]:
        monkeypatch.setattr(sys, "argv", ["record.py", *arguments])
        tool.main()
    assert out.read_text() == capsys.readouterr().out
    assert json.loads(out.read_text())["torch"] == TODAY


def test_a_mistake_that_torch_accepts_has_no_error() -> None:
    assert errors.recorded("y.sum().backward()")["error"] is None
    said = errors.recorded("torch.autograd.grad(y, 1 / 0)")["error"]
    assert said == "ZeroDivisionError: division by zero"


@pytest.mark.parametrize(
    "text",
    [
        "bad (f at /pytorch/a.cpp:31)\nframe #0: x",
        "bad\nException raised from f at ../a.cpp:31 (most recent call first):",
        "bad\nframe #0: x",
    ],
)
def test_an_error_loses_what_differs_between_machines(text: str) -> None:
    assert errors.error_of(f"raise ValueError({text!r})") == "ValueError: bad"
    kept = "bad (got 1, but expected 3)\nand more"
    assert errors.error_of(f"raise ValueError({kept!r})") == f"ValueError: {kept}"


def test_what_a_program_prints_warns_of_and_raises() -> None:
    source = """\
import warnings
print("before")
for _ in range(2):
    warnings.warn("careful")
warnings.warn("CUDA initialization: no driver")
{}["key"]
print("never")
"""
    assert programs.recorded(source) == {
        "source": source,
        "stdout": "before\n",
        "warnings": ["UserWarning: careful"],
        "error": "KeyError: 'key'",
    }


def test_a_program_finds_nothing_of_another() -> None:
    programs.recorded("left = 1")
    assert programs.recorded("left")["error"].startswith("NameError")


# ---- The committed files.


@each_kind
@each_build
def test_every_build_has_a_recording_that_fits_the_schema(
    kind: str, build: str
) -> None:
    whole = recording(kind, build)
    text = (DATA / kind / f"{build}.json").read_text(encoding="utf-8")
    assert text == json.dumps(whole, indent=1, sort_keys=True) + "\n"
    assert whole["torch"] == build
    assert re.fullmatch(r"3\.\d+", whole["python"])
    own = {"errors": {"start", "mistakes"}, "programs": {"programs"}}[kind]
    assert whole.keys() == {"torch", "python"} | own
    assert not re.search(r"0x[0-9a-f]|\.(cpp|h):\d|frame #|CUDA init", text)


@each_build
def test_the_mistakes_are_those_of_the_tool(build: str) -> None:
    whole = recording("errors", build)
    assert whole["start"] == errors.START
    for code, mistakes in whole["mistakes"].items():
        wanted = [errors.recorded(it)["program"] for it in errors.MISTAKES[code]]
        assert [it["program"] for it in mistakes] == wanted
        assert all(it.keys() == {"program", "error"} for it in mistakes)
        texts = [it["error"] for it in mistakes if it["error"] is not None]
        assert all(re.match(r"\w+: \S", text) for text in texts)


@each_build
def test_the_programs_are_those_of_the_folder(build: str) -> None:
    recorded = recording("programs", build)["programs"]
    sources = {path.stem: path.read_text() for path in programs.FOLDER.glob("*.py")}
    assert {name: recorded[name]["source"] for name in recorded} == sources
    keys = {"source", "stdout", "warnings", "error"}
    assert all(it.keys() == keys for it in recorded.values())


def test_every_program_is_shown_on_a_page_with_what_it_gave() -> None:
    pages = "".join(
        path.read_text() for path in (DATA.parent / "versions").glob("*.md")
    )
    for name in recording("programs", BUILDS[0])["programs"]:
        assert re.search(rf'data-(name|before|after)="{name}"', pages), name


def test_every_code_with_a_page_has_its_mistakes() -> None:
    assert sorted(errors.MISTAKES) == sorted(CASES)


def test_a_mended_program_does_what_the_other_does_not_in_every_build() -> None:
    every = [recording("programs", build)["programs"] for build in BUILDS]
    mended = {name for name in every[0] if name.endswith("_mended")}
    for name in mended:
        other = [ran[name.removesuffix("_mended")] for ran in every]
        assert all(ran[name]["error"] is None for ran in every)
        (printed,) = {ran[name]["stdout"] for ran in every}
        assert any(ran["error"] or ran["stdout"] != printed for ran in other)


# ---- What is in them, where it is known by hand.


def test_a_vector_of_one_entry_for_a_number_was_accepted_once() -> None:
    for build in BUILDS:
        ran = recording("programs", build)["programs"]["vector_of_one_entry"]
        lines = ran["stdout"].splitlines()
        if tuple(map(int, build.split("."))) <= (1, 2, 0):
            assert lines == ["()", "the same as nothing: True"]
            assert ran["error"] is None
        else:
            assert lines == ["()"]
            assert ran["error"].startswith("RuntimeError: Mismatch in shape: ")


def test_the_cudnn_convolution_takes_a_bias_before_1_5_and_not_since() -> None:
    for build in BUILDS:
        ran = recording("programs", build)["programs"]["cudnn_schemas"]
        lines = ran["stdout"].splitlines()
        with_bias = {"weight, bias" in it for it in lines if "convolution(" in it}
        assert with_bias == {tuple(map(int, build.split("."))) < (1, 5)}


def test_the_old_hook_is_a_hook_on_the_last_node_in_every_build() -> None:
    attached: dict[str, str] = {}
    for build in BUILDS:
        ran = recording("programs", build)["programs"]
        lines = ran["node_hook_alike"]["stdout"].splitlines()
        assert len(lines) == 4
        assert all(it.endswith("last node: True") for it in lines)
        first, *_, last = ran["hook_source"]["stdout"].splitlines()
        assert first == "grad_fn = var.grad_fn"
        assert last.strip().startswith("grad_fn.register_hook(")
        attached[build] = ran["hook_source"]["stdout"]
    added = set(attached["1.7.1"].splitlines()) - set(attached["1.2.0"].splitlines())
    assert len(added) == 3  # of the loop: hooks for all modules stand before its own
    assert any("_global_backward_hooks" in it for it in added)


def test_a_larger_vector_was_summed_once() -> None:
    for build in BUILDS:
        ran = recording("programs", build)["programs"]["vector_of_another_shape"]
        was = tuple(map(int, build.split("."))) <= (1, 2, 0)
        shown = ["(1, 10)"] + ["[[20.0, 20.0, 20.0]]"] * was
        assert ran["stdout"].splitlines() == shown
        assert (ran["error"] is None) == was


def test_the_old_hook_warns_from_1_8_on() -> None:
    for build in BUILDS:
        ran = recording("programs", build)["programs"]["linear_old_hook"]
        assert ran["stdout"] == "[(2,), (4, 3), (3, 2)]\n"
        assert bool(ran["warnings"]) == (tuple(map(int, build.split("."))) >= (1, 8))


def test_wordings_differ_between_releases() -> None:
    order = sorted(BUILDS, key=lambda build: [*map(int, build.split("."))])
    said = [recording("errors", build)["mistakes"]["GL111"] for build in order]
    assert sum(a != b for a, b in pairwise(said)) >= 3
