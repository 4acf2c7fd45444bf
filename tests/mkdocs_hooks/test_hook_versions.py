"""What pages show of the recordings of hooks is what the recordings hold."""

import importlib.util
import json
import re
import shutil
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from bs4 import BeautifulSoup, Tag
from mkdocs.exceptions import PluginError
from mkdocs.structure.pages import Page

from mkdocs_hooks import hook_cases, hook_recordings, hook_tables, hook_versions
from mkdocs_hooks.hook_recordings import HOOKS, Words

BUILDS = hook_recordings.every_build()
GPU = hook_recordings.on_gpu()
CASES = list(hook_cases.cases())
NEWEST = list(BUILDS)[-1]
Edit = Callable[[str, Callable[[dict[str, Any]], None]], None]


def a_page() -> Page:
    page = SimpleNamespace(
        file=SimpleNamespace(src_uri="versions/a.md"),
        url="versions/a/",
        present_anchor_ids=None,
    )
    return cast(Page, page)


def page_with(marker: str) -> str:
    return hook_tables.on_page_content(f"<p>a</p>{marker}<p>b</p>", page=a_page())


def soup(text: str) -> BeautifulSoup:
    return BeautifulSoup(text, "html.parser")


@pytest.fixture(scope="module")
def whole() -> BeautifulSoup:
    markers = f"{hook_versions.PICKER}\n{hook_versions.TABLES}"
    return soup(hook_versions.on_page_content(markers, page=a_page()))


@pytest.fixture(scope="module")
def anchors(whole: BeautifulSoup) -> dict[str, Tag]:
    return {str(it["id"]): it for it in whole.find_all(id=True)}


@pytest.fixture
def edit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Edit:
    """Change the recording of one build, in a copy of all."""
    folder = tmp_path / "hooks"
    shutil.copytree(hook_recordings.FOLDER, folder)
    monkeypatch.setattr(hook_recordings, "FOLDER", folder)

    def edited(version: str, change: Callable[[dict[str, Any]], None]) -> None:
        path = folder / f"{version}.json"
        whole = json.loads(path.read_text())
        change(whole["cases"])
        path.write_text(json.dumps(whole))

    return edited


def shapes(entries: list[dict[str, Any]] | None) -> list[list[int] | None] | None:
    return None if entries is None else [entry["shape"] for entry in entries]


def shown_shapes(cell: Tag) -> list[list[int] | None] | None:
    """Return the shapes that a cell shows, None where it says there are none."""
    if cell.select_one("p.none"):
        return None
    codes = [item.select_one("code") for item in cell.select("ol > li")]
    return [json.loads(code.text.replace("None", "null")) for code in codes if code]


# ---- The recordings


def test_builds_are_sorted_by_release() -> None:
    releases = [tuple(map(int, version.split("."))) for version in BUILDS]
    assert releases == sorted(releases)
    assert len(BUILDS) == len(list(hook_recordings.FOLDER.glob("*.json"))) >= 15


@pytest.mark.parametrize("case", CASES)
def test_a_row_stands_for_builds_that_agree(case: str) -> None:
    for hook in HOOKS:
        runs = hook_recordings.runs(BUILDS, case, hook)
        assert [v for run in runs for v in run.nodes] == list(BUILDS)
        for run in runs:
            outcomes = [
                hook_recordings.outcome(BUILDS[v][case][hook]) for v in run.nodes
            ]
            assert all(it == outcomes[0] for it in outcomes)
        for one, other in pairwise(runs):
            assert hook_recordings.outcome(one.got) != hook_recordings.outcome(
                other.got
            )


@pytest.mark.parametrize(
    ("label", "shown"),
    [
        ("arg0", "the input"),
        ("out0", "the output"),
        ("weight", "<code>weight</code>"),
        ("kwarg:scale", "<code>scale</code>"),
        ("T(1.weight)", "<code>1.weight</code>, transposed"),
        ("reshape(out0)", "the output, reshaped"),
        ("expand(bias)", "<code>bias</code>, repeated"),
        ("sum(out0)", "the output, summed"),
    ],
)
def test_labels_in_words(label: str, shown: str) -> None:
    assert Words(BUILDS, "linear-2d").label(label) == shown


def test_of_several_inputs_and_outputs_each_has_its_number() -> None:
    assert Words(BUILDS, "two-inputs-add").label("arg1") == "argument 1"
    assert Words(BUILDS, "two-inputs-add").label("out0") == "the output"
    assert Words(BUILDS, "two-outputs").label("out1") == "output 1"
    assert Words(BUILDS, "mseloss").label("arg0") == "argument 0"


def test_every_recorded_label_has_words() -> None:
    for case in CASES:
        words = Words(BUILDS, case)
        for cases in BUILDS.values():
            for hook in HOOKS:
                for call in cases[case][hook].get("calls", []):
                    for entry in (call["grad_input"] or []) + call["grad_output"]:
                        assert re.search(
                            r"gradient of|something else|None", words.entry(entry)
                        )


# ---- The code of the cases


def program() -> Any:
    spec = importlib.util.spec_from_file_location("program", hook_cases.PROGRAM)
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


PROGRAM = program()


@pytest.mark.parametrize("case", CASES)
def test_the_code_shown_makes_the_module_that_was_hooked(case: str) -> None:
    shown, one = hook_cases.cases()[case], PROGRAM.CASES[case]
    made = eval(shown.module, vars(PROGRAM))
    assert repr(made) == repr(one.make())
    sizes = [re.search(r"\[[\d, ]*\]", it) for it in shown.inputs]
    drawn = [PROGRAM.drawn("x", it, "cpu") for it in (*one.args, *one.kwargs.values())]
    assert [it and json.loads(it[0]) for it in sizes] == [
        list(it.shape) for it in drawn
    ]
    grads = [not re.search("requires no grad|integers", it) for it in shown.inputs]
    assert grads == [it.requires_grad for it in drawn]
    assert (f"the hook is on {one.hooked}" in shown.notes) == bool(one.hooked)
    assert ("no parameter requires grad" in shown.notes) == one.frozen
    assert any("reaches the loss" in it for it in shown.notes) == (one.used is not None)


def test_the_hooks_are_those_that_are_recorded() -> None:
    assert HOOKS == PROGRAM.KINDS


def test_the_forward_shown_is_that_of_the_class() -> None:
    shown = hook_cases.cases()["conv-then-bias-add"].forward
    module = PROGRAM.CASES["conv-then-bias-add"].make()
    x = torch.randn(2, 16, 5, 5)
    names = {"self": module, "x": x, "F": torch.nn.functional}
    value = eval(shown.removeprefix("return "), names)
    assert torch.equal(value, module(x))
    assert hook_cases.cases()["linear-2d"].forward == ""


# ---- A table


@pytest.mark.parametrize("case", CASES)
def test_tables_show_what_was_recorded(case: str, anchors: dict[str, Tag]) -> None:
    for hook in HOOKS:
        last: dict[str, Any] = {}
        for version in BUILDS:
            got = BUILDS[version][case][hook]
            anchor = anchors[f"{case}/{hook}/{version}"]
            row = anchor.find_parent("tr")
            assert row
            _, *cells, messages = row.find_all(["th", "td"], recursive=False)
            if calls := got.get("calls"):
                for cell, field in zip(cells, hook_tables.FIELDS, strict=True):
                    assert shown_shapes(cell) == shapes(calls[0][field])
            elif got.get("absent"):
                assert cells[0].text == "This release has no such hook."
            else:
                kind = (got["error"] or "").split(":")[0]
                assert cells[0].text == (
                    f"Not called: {kind}." if kind else "Never called."
                )
            said = [
                message(it)
                for it in messages.find_all("details")
                if version in str(it.attrs["data-torch"]).split()
            ]
            assert said == [*got.get("warnings", []), *filter(None, [got.get("error")])]
            node = BUILDS[version][case]["last_node"]["name"]
            assert anchor["data-node"] == (node or "")
            assert (node is None) == (version not in nodes_shown(row))
            assert nodes_shown(row).get(version) == node
            check_marks(row, cells, last, got)
            last = got


def nodes_shown(row: Tag) -> dict[str, str]:
    """Return the last node of each build of a row, as its first cell shows it."""
    among = [str(it["data-torch"]) for it in row.select("span[data-torch]")]
    shown: dict[str, str] = {}
    for it in row.select("th .node"):
        assert it.code
        first, _, last = it.text.removeprefix(it.code.text).strip().partition(" to ")
        start = among.index(first) if first else 0
        end = among.index(last) if last else start if first else len(among) - 1
        shown |= dict.fromkeys(among[start : end + 1], it.code.text)
    return shown


def message(details: Tag) -> str:
    """Return a folded warning or error as it was recorded."""
    assert details.summary
    kind = next(iter(details.summary.strings))
    return f"{kind}: {details.text.removeprefix(details.summary.text)}"


def check_marks(
    row: Tag, cells: list[Tag], last: dict[str, Any], got: dict[str, Any]
) -> None:
    """Check, at the first build of a row, that just what is new is marked."""
    same = hook_recordings.outcome(last) == hook_recordings.outcome(got)
    if not last or same:
        return
    assert ("change" in (row.get("class") or [])) == (not last.get("absent"))
    if not (last.get("calls") and got.get("calls")):
        return
    for cell, field in zip(cells, hook_tables.FIELDS, strict=True):
        before, now = last["calls"][0][field], got["calls"][0][field]
        marked = [bool(it.select(".changed")) for it in cell.select("li")]
        assert marked == [
            i >= len(before) or before[i] != entry for i, entry in enumerate(now or [])
        ]
        were = cell.select_one(".count .changed")
        assert (were is not None) == (before is not None and len(before) != len(now))


def test_a_message_names_just_the_builds_that_have_it() -> None:
    run = hook_recordings.Run(
        dict.fromkeys(["1.0", "1.1", "1.2", "1.3"], ""),
        {},
        {"a": ["1.1", "1.2"], "b": ["1.0", "1.2"], "c": ["1.3"]},
    )
    assert [run.builds_with(it) for it in "abc"] == ["1.1 to 1.2", "1.0, 1.2", "1.3"]


def test_a_table_of_one_hook_on_any_page() -> None:
    text = page_with(
        '<div class="recorded" data-case="linear-3d" data-hook="legacy"></div>'
    )
    made = soup(text)
    assert made.select_one("table.hook")
    assert not made.select("[id]")
    (link,) = made.select("figcaption a")
    assert link["href"] == f"../hooks-by-version/#linear-3d/legacy/{NEWEST}"
    (caption,) = made.select("figcaption")
    assert "nn.Linear(20, 30) on [4, 6, 20], register_backward_hook" in caption.text


@pytest.mark.parametrize(
    "marker",
    [
        '<div class="recorded" data-case="linear-5d" data-hook="legacy"></div>',
        '<div class="recorded" data-case="linear-3d" data-hook="old"></div>',
        '<div class="recorded" data-case="linear-3d"></div>',
        '<div class="recorded" data-case="linear-3d" data-hook="full" data-x=""></div>',
        '<div class="lengths" data-from="1.2.0" data-to="9.9.9"></div>',
    ],
)
def test_a_wrong_marker_is_named(marker: str) -> None:
    with pytest.raises(PluginError, match=r"versions/a\.md: <div class="):
        page_with(marker)


# ---- Two builds


def sizes(version: str) -> dict[str, int]:
    cases = BUILDS[version].items()
    return {
        name: len(case["legacy"]["calls"][0]["grad_input"])
        for name, case in cases
        if case["legacy"]["calls"]
    }


def test_lengths_in_two_builds() -> None:
    made = soup(
        page_with('<div class="lengths" data-from="1.2.0" data-to="1.7.1"></div>')
    )
    old, new = sizes("1.2.0"), sizes("1.7.1")
    seen: dict[str, tuple[int, int]] = {}
    for row in made.select("tbody tr"):
        first, second, which = row.find_all("td")
        names = [link.text for link in which.find_all("a")]
        assert which.text.startswith(f"{len(names)}: ")
        seen |= dict.fromkeys(names, (int(first.text), int(second.text)))
    assert seen == {name: (old[name], new[name]) for name in old.keys() & new.keys()}
    assert (
        f"In none of these {len(seen)} cases does the tuple get shorter." in made.text
    )
    left = made.select("p")[-2]
    assert left.text.startswith(f"Left out, of {len(CASES)} recorded cases: ")
    others = set(CASES) - seen.keys()
    assert {link.text for link in left.select("a")} == others != set()
    for case in others:
        for version in "1.2.0", "1.7.1":
            got = BUILDS[version][case]["legacy"]
            why = (got["error"] or "not called").split(":")[0]
            text = left.text.split(f"{case} (")[1].split(")")[0]
            said = re.search(rf"{why} in torch [^,]*{re.escape(version)}", text)
            assert bool(said) == (not got["calls"])


def test_where_none_is_left_out_it_is_said() -> None:
    assert hook_tables.left_out({}, 3, "", "1.7.1") == (
        "All 3 recorded cases are in the table."
    )


def test_a_tuple_that_gets_shorter_is_named(edit: Edit) -> None:
    def shorter(cases: dict[str, Any]) -> None:
        cases["conv2d"]["legacy"]["calls"][0]["grad_input"].pop()

    edit("1.7.1", shorter)
    text = page_with('<div class="lengths" data-from="1.2.0" data-to="1.7.1"></div>')
    assert "the tuple gets shorter in conv2d." in text


def test_what_the_page_says_of_the_tables_in_words() -> None:
    for version in ("1.7.0", "1.7.1"):
        old, new = sizes("1.2.0"), sizes(version)
        other = {name for name in old if old[name] != new.get(name)}
        assert other == {"mseloss"}
        assert new["mseloss"] > old["mseloss"]
        for case in ("linear-2d-no-bias", "linear-3d"):
            assert old[case] == new[case] == 2

    def rows(case: str, hook: str) -> int:
        return len(hook_recordings.runs(BUILDS, case, hook))

    assert rows("thread-conv", "legacy") == rows("thread-linear", "legacy") == 1
    assert rows("conv-then-bias-add", "legacy") == 1
    assert rows("linear-3d", "full") == 2  # without it, and with it


# ---- Change one recording, and the page changes


def test_one_changed_entry_shows_on_the_page(edit: Edit) -> None:
    marker = '<div class="recorded" data-case="thread-conv" data-hook="legacy"></div>'
    before = page_with(marker)

    def change(cases: dict[str, Any]) -> None:
        cases["thread-conv"]["legacy"]["calls"][0]["grad_input"][2]["shape"] = [1, 32]

    edit("1.7.0", change)
    after = page_with(marker)
    assert before != after
    rows = soup(after).select("tbody tr:not(.gpu) th")
    versions = list(BUILDS)
    at = versions.index("1.7.0")
    ranges = [versions[:at], versions[at : at + 1], versions[at + 1 :]]
    heads = [next(row.stripped_strings) for row in rows]
    assert heads == [hook_recordings.span(it) for it in ranges]
    assert "[1, 32]" in after
    assert "[1, 32]" not in before
    assert after.count("changed</em>") == 2  # at 1.7.0, and back again at 1.7.1


# ---- On a GPU


@pytest.fixture
def gpu(edit: Edit) -> Callable[[Callable[[dict[str, Any]], None]], None]:
    """Put a recording on a GPU beside the newest, the same but for a change."""

    def recorded(change: Callable[[dict[str, Any]], None]) -> None:
        folder = hook_recordings.FOLDER
        shutil.rmtree(folder / "cuda", ignore_errors=True)
        (folder / "cuda").mkdir()
        whole = json.loads((folder / f"{NEWEST}.json").read_text())
        change(whole["cases"])
        text = json.dumps(whole | {"device": "cuda"})
        (folder / "cuda" / f"{NEWEST}.json").write_text(text)

    edit(NEWEST, lambda _: None)
    return recorded


CONV = '<div class="recorded" data-case="thread-conv" data-hook="legacy"></div>'


def without_bias(cases: dict[str, Any]) -> None:
    cases["thread-conv"]["legacy"]["calls"][0]["grad_input"][1:] = [
        {"shape": [1, 32, 1, 1], "is": ["reshape(bias)"]}
    ]


def test_what_a_gpu_gave_stands_beside_the_cpu_and_is_marked(gpu: Any) -> None:
    on_cpu = soup(page_with(CONV)).select("tbody tr:not(.gpu)")
    gpu(without_bias)
    made = soup(page_with(CONV))
    assert made.select("tbody tr:not(.gpu)") == on_cpu
    (row,) = made.select("tbody tr.gpu")
    head, first, second, messages = row.find_all(["th", "td"], recursive=False)
    node = BUILDS[NEWEST]["thread-conv"]["last_node"]["name"]
    assert list(head.stripped_strings) == [f"{NEWEST} on a GPU", node]
    assert shown_shapes(first) == [[64, 16, 16, 16], [1, 32, 1, 1]]
    assert [bool(it.select(".changed")) for it in first.select("li")] == [False, True]
    assert first.select_one(".count .changed") is not None
    assert not second.select(".changed")
    got = BUILDS[NEWEST]["thread-conv"]["legacy"]
    assert [message(it) for it in messages.find_all("details")] == got["warnings"]


def test_what_is_the_same_is_said_to_be_so(gpu: Any) -> None:
    gpu(lambda _: None)
    (row,) = soup(page_with(CONV)).select("tbody tr.gpu")
    assert "The same as on the CPU." in row.text
    assert not row.select("ol")

    def warns(cases: dict[str, Any]) -> None:
        cases["thread-conv"]["legacy"]["warnings"].append("UserWarning: cuda only")

    gpu(warns)
    (row,) = soup(page_with(CONV)).select("tbody tr.gpu")
    assert "The same" not in row.text
    assert "cuda only" in row.text


def test_the_page_says_in_a_line_what_was_run_on_a_gpu(gpu: Any) -> None:
    marker = '<div class="devices"></div>'
    shutil.rmtree(hook_recordings.FOLDER / "cuda", ignore_errors=True)
    without = soup(page_with(marker)).select("p")[1]
    assert "on the CPU, none on a GPU." in without.text
    assert str(without.a and without.a["href"]).startswith("../what-changed/#what-was-")
    gpu(lambda _: None)
    (line,) = [it for it in soup(page_with(marker)).select("p") if it.a]
    assert (
        f"on the CPU, torch {NEWEST} on a GPU, too. What other releases do" in line.text
    )


def test_a_link_leads_to_what_a_gpu_gave(gpu: Any) -> None:
    gpu(without_bias)
    page = a_page()
    whole = soup(hook_versions.on_page_content(hook_versions.TABLES, page=page))
    assert page.present_anchor_ids is not None
    rows = whole.select("tr.gpu")
    found = [str(it["id"]) for row in rows for it in row.find_all(id=True)]
    wanted = {f"{case}/{hook}/{NEWEST}/cuda" for case in CASES for hook in HOOKS}
    assert sorted(found) == sorted(wanted)
    assert wanted <= page.present_anchor_ids


def test_a_gpu_without_its_cpu_is_refused(gpu: Any) -> None:
    gpu(without_bias)
    (hook_recordings.FOLDER / f"{NEWEST}.json").unlink()
    with pytest.raises(PluginError, match=f"cuda: torch {re.escape(NEWEST)} has no"):
        hook_versions.on_page_content(hook_versions.TABLES, page=a_page())


def test_what_is_said_to_be_read_was_not_run() -> None:
    first_on_a_gpu = min(map(hook_recordings.release, GPU), default=(1, 11))
    assert first_on_a_gpu >= (1, 11)


# ---- All of them


def test_every_case_has_its_place(whole: BeautifulSoup) -> None:
    folded = [str(it["id"]) for it in whole.select("details.case")]
    assert sorted(folded) == sorted(CASES)
    assert [str(it["value"]) for it in whole.select("option")] == folded
    ids = [str(it["id"]) for it in whole.find_all(id=True)]
    assert len(ids) == len(set(ids))
    anchors = len(CASES) * (1 + len(HOOKS) * len(BUILDS))
    shown = whole.select(".hook-cases tr:not(.gpu) [id], .hook-cases details[id]")
    assert len(shown) == anchors


def test_every_choice_of_a_module_tells_it_from_the_others(
    whole: BeautifulSoup,
) -> None:
    shown = [it.text.partition(": ")[2] for it in whole.select("option")]
    assert "nn.Linear(20, 30) on [4, 20]" in shown
    assert "nn.Linear(20, 30) on [4, 20], requires no grad" in shown
    assert len(set(shown)) == len(shown) == len(CASES)


def test_a_case_without_a_group_is_named(edit: Edit) -> None:
    edit(NEWEST, lambda cases: cases.update({"conv9d": cases["conv3d"]}))
    with pytest.raises(PluginError, match=r"GROUPS and .* conv9d"):
        hook_versions.on_page_content(hook_versions.TABLES, page=a_page())


def test_anchors_can_be_linked_to() -> None:
    page = a_page()
    hook_versions.on_page_content(hook_versions.TABLES, page=page)
    assert page.present_anchor_ids is not None
    assert {"linear-3d", "linear-3d/legacy/1.7.1"} <= page.present_anchor_ids


def test_other_pages_stay_as_they_are() -> None:
    assert hook_versions.on_page_content("<p>x</p>", page=a_page()) == "<p>x</p>"
    assert page_with("") == "<p>a</p><p>b</p>"


def test_the_picker_is_hidden_until_its_module_runs(whole: BeautifulSoup) -> None:
    form = whole.select_one("hook-picker form")
    assert form is not None
    assert form.has_attr("hidden")
    assert [tick.text for tick in form.select(".ticks i")] == list(BUILDS)
    slider = form.select_one("[type=range]")
    assert slider is not None
    assert [slider["max"], slider["value"]] == [str(len(BUILDS) - 1)] * 2
    (chosen,) = form.select("option[selected]")
    assert chosen["value"] == hook_versions.SHOWN_FIRST
