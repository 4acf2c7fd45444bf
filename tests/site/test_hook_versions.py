"""Hooks by version in a real browser: what it shows is what was recorded."""

import json
import shutil
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from playwright.sync_api import Browser, Page, ViewportSize, expect

from mkdocs_hooks import hook_recordings, hook_versions
from mkdocs_hooks.hook_recordings import HOOKS

from .browsing import (
    PATIENCE,
    SCHEMES,
    STILL,
    TWO_FRAMES,
    Scheme,
    Server,
    listen,
    pale_text,
    wrong_for_some_readers,
)

URL = "versions/hooks-by-version/"
ASSETS = Path(__file__).parents[2] / "docs" / "assets"
BUILDS = hook_recordings.every_build()
VERSIONS = list(BUILDS)
CASES = list(BUILDS[VERSIONS[-1]])
WIDE: ViewportSize = {"width": 1280, "height": 800}
PHONE: ViewportSize = {"width": 390, "height": 800}
# Sets the controls, one after the other, and reads what is shown then.
CHOOSE_AND_READ = """asked => asked.map(([module, hook, at]) => {
  const picker = document.querySelector("hook-picker")
  const { elements } = picker.querySelector("form")
  elements.module.value = module
  elements.hook.value = hook
  elements.torch.value = at
  for (const kind of ["input", "change"])
    elements.torch.dispatchEvent(new Event(kind, { bubbles: true }))
  const all = (selector, within = picker) => [...within.querySelectorAll(selector)]
  const texts = (selector, within) => all(selector, within).map(it => it.textContent)
  return {
    tuples: all(".about + .tuples > div").map(it => [
      texts("h4", it)[0] ?? it.textContent,
      texts("li > code:first-child", it),
      all("li", it).map(item => item.querySelector(".changed") !== null),
    ]),
    said: texts(".about + .tuples + .messages summary"),
    foot: texts(".foot")[0],
    node: texts(".about + .tuples + .messages + .node")[0] ?? null,
    torch: texts("output")[0],
    spoken: elements.torch.getAttribute("aria-valuetext"),
    changes: texts(".ticks .change"),
    hash: window.address ?? location.hash,
  }
})"""

# To write each address into the browser's takes longer than all that is shown.
NOTE_ADDRESSES = """() => {
  history.replaceState = (_state, _title, address) => { window.address = address }
}"""
WRITE_ADDRESSES = "() => { delete history.replaceState; delete window.address }"

LEAVE_OUT_TABLES = """() => {
  window.tables = document.querySelector(".hook-cases")
  window.place = document.createComment("the tables")
  tables.replaceWith(place)
}"""


@pytest.fixture(scope="module")
def opened(browser: Browser, site: Server) -> Iterator[Page]:
    page = browser.new_page(reduced_motion="reduce", viewport=WIDE)
    page.set_default_timeout(PATIENCE)
    heard = listen(page, site)
    page.goto(site.url + URL)
    page.add_style_tag(content=STILL)
    yield page
    assert heard == []
    page.close()


def calls_of(version: str, case: str, hook: str) -> dict[str, Any]:
    return BUILDS[version][case][hook]


def expected_changes(case: str, hook: str) -> list[str]:
    runs = hook_recordings.runs(BUILDS, case, hook)
    return [
        next(iter(run.nodes))
        for before, run in pairwise(runs)
        if not hook_recordings.is_absent(before.got)
    ]


# ---- What it shows


def test_shows_what_was_recorded(opened: Page) -> None:
    asked = [
        (case, hook, VERSIONS.index(version))
        for case in CASES
        for hook in HOOKS
        for run in hook_recordings.runs(BUILDS, case, hook)
        for version in {next(iter(run.nodes)), next(reversed(run.nodes))}
    ]
    opened.evaluate(NOTE_ADDRESSES)
    shown = opened.evaluate(CHOOSE_AND_READ, asked)
    opened.evaluate(WRITE_ADDRESSES)
    for (case, hook, at), now in zip(asked, shown, strict=True):
        version, name = VERSIONS[at], f"{case}/{hook}/{VERSIONS[at]}"
        got = calls_of(version, case, hook)
        assert now["torch"] == version
        assert now["hash"] == f"#{name}"
        assert now["foot"].endswith(f"#{name}")
        node = BUILDS[version][case]["last_node"]["name"]
        assert now["node"] == (f"Last autograd node: {node}" if node else None), name
        assert now["changes"] == expected_changes(case, hook), name
        messages = [*got.get("warnings", []), *filter(None, [got.get("error")])]
        assert now["said"] == [text.split(":")[0] for text in messages], name
        if not got.get("calls"):
            assert len(now["tuples"]) == 1, name
            assert now["tuples"][0][1] == [], name
            continue
        for (field, shapes, _), wanted in zip(
            now["tuples"], ("grad_input", "grad_output"), strict=True
        ):
            assert field == wanted
            assert shapes == [
                json.dumps(entry["shape"]).replace("null", "None")
                for entry in got["calls"][0][wanted] or []
            ], name


def test_marks_what_the_build_before_had_not(opened: Page) -> None:
    at = VERSIONS.index("1.12.1")
    around = range(at - 1, at + 2)
    asked = [("linear-3d", "legacy", i) for i in around]
    before, change, after = opened.evaluate(CHOOSE_AND_READ, asked)
    assert [it["tuples"][0][2] for it in (before, change, after)] == [
        [False, False],
        [True],
        [False],
    ]
    first, second, third, fourth = VERSIONS[at - 2 : at + 2]
    assert f"torch {second}, as in torch {first}." in before["foot"]
    assert f"torch {third}, not as in torch {second}." in change["foot"]
    assert f"torch {fourth}, as in torch {third}." in after["foot"]
    said = f"{third}: 1 entry in grad_input, not as in torch {second}"
    assert change["spoken"] == said
    hashes = [f"#linear-3d/legacy/{it}" for it in (second, third, fourth)]
    assert [it["hash"] for it in (before, change, after)] == hashes


def test_the_first_build_with_a_hook_is_no_change(opened: Page) -> None:
    asked = [("linear-2d", "full", VERSIONS.index(v)) for v in ("1.7.1", "1.8.1")]
    without, first = opened.evaluate(CHOOSE_AND_READ, asked)
    assert without["tuples"][0][0] == "This release has no such hook."
    assert "the first release here with this hook" in first["foot"]
    assert first["changes"] == []


# ---- On a GPU


def test_what_a_gpu_gave_stands_below(
    page: Page, small_site: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    newest = VERSIONS[-1]
    shutil.copytree(hook_recordings.FOLDER, tmp_path / "hooks")
    (tmp_path / "hooks" / "cuda").mkdir(exist_ok=True)
    whole = json.loads((tmp_path / "hooks" / f"{newest}.json").read_text())
    (call,) = whole["cases"]["conv2d"]["legacy"]["calls"]
    call["grad_input"][1:] = [{"shape": [1, 5, 1, 1], "is": ["reshape(bias)"]}]
    whole["cases"]["conv2d"]["last_node"]["name"] = "AddBackward0"
    on_gpu = tmp_path / "hooks" / "cuda" / f"{newest}.json"
    on_gpu.write_text(json.dumps(whole | {"device": "cuda"}))
    monkeypatch.setattr(hook_recordings, "FOLDER", tmp_path / "hooks")
    given: Any = SimpleNamespace(present_anchor_ids=None)
    content = hook_versions.on_page_content(
        hook_versions.PICKER + hook_versions.TABLES, page=given
    )
    shutil.copy(ASSETS / "hook_versions.js", tmp_path)
    script = '<script src="hook_versions.js"></script>'
    (tmp_path / "index.html").write_text(f"<body>{content}{script}", encoding="utf-8")

    page.goto(f"{small_site.url}#conv2d/legacy/{newest}")
    cpu, gpu = page.locator("hook-picker .tuples").all()
    expect(cpu.locator(".count").first).to_have_text("3 entries")
    expect(gpu.locator(".count").first).to_have_text("2 entries were 3")
    expect(gpu.locator("li .changed")).to_have_count(1)
    expect(page.locator("hook-picker .device ~ .node")).to_have_text(
        "Last autograd node: AddBackward0"
    )
    page.evaluate(f"location.hash = '#conv3d/legacy/{newest}/cuda'")
    expect(page.locator("hook-picker select")).to_have_value("conv3d")
    expect(page.locator("hook-picker .tuples").last).to_have_text(
        "The same as on the CPU."
    )
    page.evaluate("location.hash = '#conv3d/legacy/1.7.1'")
    expect(page.locator("hook-picker .tuples")).to_have_count(1)
    expect(page.locator("hook-picker .device + p")).to_have_text(
        "This release was not run on one."
    )


def test_without_a_recording_on_a_gpu_nothing_is_said_of_one(opened: Page) -> None:
    shown = opened.locator("hook-picker .device").count()
    assert bool(shown) == bool(hook_recordings.on_gpu())


# ---- Links


@pytest.mark.parametrize("size", [WIDE, PHONE], ids=["wide", "phone"])
def test_a_link_leads_to_its_build(
    page: Page, site: Server, size: ViewportSize
) -> None:
    page.set_viewport_size(size)
    page.goto(site.url + URL + "#relu-inplace/full/1.8.1")
    expect(page.locator("hook-picker select")).to_be_in_viewport()
    expect(page.locator("hook-picker output")).to_have_text("1.8.1")
    expect(page.locator("hook-picker select")).to_have_value("relu-inplace")
    expect(page.locator("hook-picker .tuples")).to_have_text("Never called.")
    page.evaluate("location.hash = '#linear-3d/legacy/1.7.1'")
    expect(page.locator("hook-picker .foot a")).to_have_text("#linear-3d/legacy/1.7.1")
    page.evaluate("location.hash = '#no-such-case/legacy/1.7.1'")
    expect(page.locator("hook-picker .foot a")).to_have_text("#linear-3d/legacy/1.7.1")


def test_a_link_from_another_page(page: Page, site: Server) -> None:
    page.goto(site.url + "versions/what-changed/")
    link = page.locator("table.lengths a", has_text="mseloss")
    link.click()
    expect(page.locator("hook-picker output")).to_have_text("1.7.1")
    expect(page.locator("hook-picker select")).to_have_value("mseloss")


# ---- Who reads it, and on what


def test_without_javascript(browser: Browser, site: Server) -> None:
    page = browser.new_page(java_script_enabled=False, viewport=WIDE)
    page.goto(site.url + URL + "#linear-3d/legacy/1.12.1")
    expect(page.locator("hook-picker noscript")).to_be_visible()
    expect(page.locator("hook-picker form")).to_be_hidden()
    row = page.locator("tr", has=page.locator("[id='linear-3d/legacy/1.12.1']"))
    expect(row).to_be_in_viewport()
    expect(row).to_contain_text("gradient of the output, reshaped changed")
    other = page.locator("[id=linear-4d]")
    expect(other.locator("table").first).to_be_hidden()
    other.locator("summary").first.click()
    expect(other.locator("table").first).to_be_visible()
    page.close()


def test_with_the_keyboard(page: Page, site: Server) -> None:
    page.goto(site.url + URL)
    page.locator("hook-picker select").focus()
    passed: list[str] = []
    for _ in range(2):
        page.keyboard.press("Tab")
        name, outline = page.evaluate(
            "(e => [e.name, getComputedStyle(e).outlineStyle])(document.activeElement)"
        )
        passed.append(name)
        assert outline == "solid", f"the focus on {name} is not seen"
    assert passed == ["hook", "torch"]
    expect(page.locator("hook-picker output")).to_have_text(VERSIONS[-1])
    page.keyboard.press("ArrowLeft")
    expect(page.locator("hook-picker output")).to_have_text(VERSIONS[-2])
    page.keyboard.press("Home")
    expect(page.locator("hook-picker output")).to_have_text(VERSIONS[0])
    page.keyboard.press("Shift+Tab")
    page.keyboard.press("ArrowDown")
    absent = page.locator("hook-picker .tuples")
    expect(absent).to_have_text("This release has no such hook.")


def test_the_slider_is_named(opened: Page) -> None:
    slider = opened.get_by_role("slider")
    expect(slider).to_have_accessible_name("torch")
    expect(opened.get_by_role("combobox", name="Module")).to_be_visible()
    expect(opened.get_by_role("group", name="Hook")).to_be_visible()


@pytest.mark.parametrize("case", ["lstm", "relu-inplace", "transformerencoderlayer"])
def test_on_a_phone(page: Page, site: Server, case: str) -> None:
    page.set_viewport_size(PHONE)
    page.goto(site.url + f"{URL}#{case}/legacy/{VERSIONS[-1]}")
    page.locator("hook-picker .messages summary").first.click()
    assert page.evaluate("document.documentElement.scrollWidth") == PHONE["width"]
    inside = page.locator("hook-picker").evaluate(
        "e => [...e.querySelectorAll('*')].every(it =>"
        " it.getBoundingClientRect().right <= e.getBoundingClientRect().right)"
    )
    assert inside


@pytest.fixture
def without_tables(opened: Page) -> Iterator[Page]:
    """What is opened without the tables below, of which axe would take in all."""
    yield opened
    opened.evaluate("window.place?.replaceWith(tables)")


def leave_out_tables(page: Page) -> None:
    page.evaluate(LEAVE_OUT_TABLES)


def test_for_some_readers(without_tables: Page) -> None:
    leave_out_tables(without_tables)
    assert wrong_for_some_readers(without_tables, within="hook-picker") == []


@pytest.mark.parametrize("scheme", SCHEMES)
def test_colours(without_tables: Page, scheme: Scheme) -> None:
    opened = without_tables
    asked = [("linear-3d", "legacy", VERSIONS.index("1.12.1"))]
    opened.evaluate(CHOOSE_AND_READ, asked)
    assert opened.locator("hook-picker .changed").count() > 0
    leave_out_tables(opened)
    opened.emulate_media(color_scheme=scheme)
    opened.evaluate(TWO_FRAMES)
    assert pale_text(opened, within="hook-picker") == []
