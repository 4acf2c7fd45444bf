"""What the page of timings shows is what was measured: other figures, another page."""

import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from mkdocs.exceptions import PluginError
from mkdocs.structure.pages import Page

from mkdocs_hooks import benchmark_figures as figures
from mkdocs_hooks import benchmark_tables as tables

ROOT = Path(__file__).parents[2]
PAGE = cast(Page, SimpleNamespace(file=SimpleNamespace(src_uri="how-fast.md")))
NAMES = [path.stem for path in sorted(ROOT.glob("benchmarks/results/*-cpu.json"))]


def results(name: str = "jacobian-cpu") -> dict[str, Any]:
    return tables.load(name, PAGE)


def test_there_are_results() -> None:
    assert {"jacobian-cpu", "recorder-cpu"} <= {*NAMES}


@pytest.mark.parametrize("name", NAMES)
def test_every_network_and_way_is_shown(name: str) -> None:
    found = results(name)
    make = tables.recorder if name.startswith("recorder") else tables.jacobian
    text = "\n".join(make(found))
    rows = found.get("rows") or found["times"]
    for row in rows:
        assert row["net"].lower() in text.lower()
        if not row.get("skipped"):
            assert f"| {row['contender']} |" in text
        elif make is tables.jacobian:
            assert f"- {row['contender']}: {row['skipped']}" in text


def test_another_time_is_another_row() -> None:
    found = results()
    before = "\n".join(tables.jacobian(found))
    ours = next(row for row in found["rows"] if row["contender"] == "gradlib")
    ours["ms"]["median"] = 98765.0
    assert "98,765" in "\n".join(tables.jacobian(found))
    assert "98,765" not in before


def test_the_best_other_way_is_the_one_that_takes_least() -> None:
    found = results()
    net = found["rows"][0]["net"]
    rows = {
        row["contender"]: row
        for row in found["rows"]
        if row["net"] == net and row["threads"] == 1
    }
    others = [it for it in rows if not it.startswith("gradlib") and "ms" in rows[it]]
    for name in others:
        rows[name]["to_gradlib"]["median"] = 3.0
    chosen = next(it for it in others if not it.endswith("a loss"))
    rows[chosen]["to_gradlib"]["median"] = 2.0
    rows["loop over outputs, in a loss"]["to_gradlib"]["median"] = 0.1
    row = tables.in_short(net, 7, rows)
    assert (row[1], row[4], row[5]) == ("7", chosen, "2.00")


def test_where_ours_is_slower_is_said_first() -> None:
    rows = {it["contender"]: it for it in results()["rows"] if "to_gradlib" in it}
    for row in rows.values():
        row["to_gradlib"]["median"] = 3.0
    rows["gradlib, checked"]["to_gradlib"]["median"] = 1.25
    good = tables.summed_up({"one": rows, "two": rows})
    assert good.endswith("fastest on 2 of 2 networks.")
    slow = {name: {**row} for name, row in rows.items()}
    slow["TorchJD"]["to_gradlib"] = {"median": 0.5}
    bad = tables.summed_up({"one": rows, "two": slow})
    assert "fastest on 1 of 2 networks, not on two (TorchJD takes 0.50 times" in bad


@pytest.mark.parametrize(
    ("name", "where"),
    [
        ("checked", "`check=True`, the default"),
        ("in a function", "`check=False`, in a function"),
        ("in other code", "`check=False`, in other code"),
        ("in other code, checked", "`check=True`, in other code"),
    ],
)
def test_how_other_calls_of_ours_do_is_said(name: str, where: str) -> None:
    rows = {
        it["contender"]: it
        for it in results()["rows"]
        if "to_gradlib" in it and not it["contender"].startswith("gradlib, ")
    }
    for row in rows.values():
        row["to_gradlib"]["median"] = 3.0
    rows["gradlib"] |= {"to_gradlib": {"median": 1.0}}
    assert not [*tables.calls({"one": rows})]
    slow = {name: {**row} for name, row in rows.items()}
    slow[f"gradlib, {name}"] = {**rows["gradlib"], "to_gradlib": {"median": 4.0}}
    rows[f"gradlib, {name}"] = {**rows["gradlib"], "to_gradlib": {"median": 1.5}}
    (text,) = tables.calls({"one": rows, "two": slow})
    assert text.splitlines()[2:] == [
        "| `check=False` | 1 | 2 of 2 |",
        f"| {where} | 1.50 to 4.00 | 1 of 2 |",
    ]


def test_many_networks_in_short() -> None:
    found = results("jacobian-random-cpu")
    nets = [plan["net"] for plan in found["plans"]]
    *rest, last = nets

    def shown(low: list[str]) -> list[str]:
        for row in found["rows"]:
            is_low = row["threads"] == 2 and row["net"] in low
            is_low = is_low and row["contender"] == "replicate"
            row["to_gradlib"] = {"median": 0.5 if is_low else 3.0}
            row.setdefault("ms", {"median": 1.0})
        return [*tables.jacobian_in_short(found)]

    one, calls, all_one, two, _, all_two = shown([last])
    assert calls.startswith("| gradlib with |")
    assert one.startswith("**1 thread:**")
    assert two.startswith("**2 threads:**")
    assert all(
        f"| {tables.whole(net)} |" in it for net in nets for it in (all_one, all_two)
    )
    assert "3.00 to 3.00 times as long, 3.00 times in the middle" in one
    assert f"fastest on {len(nets)} of {len(nets)} networks." in one
    assert "0.50 to 3.00 times as long, 3.00 times in the middle" in two
    assert f"fastest on {len(rest)} of {len(nets)} networks, not on {last}" in two
    *_, two, _, _, of_those, _ = shown(nets[:5])
    assert f"fastest on {len(nets) - 5} of {len(nets)} networks. " in two
    listed = [net for net in nets if f"| {tables.whole(net)} |" in of_those]
    assert listed == nets[:5]


@pytest.mark.parametrize(
    ("value", "shown"),
    [(0.02944, "0.0294"), (9, "9.00"), (281.4, "281"), (1249.0, "1,249")],
)
def test_numbers_are_written_in_one_way(value: float, shown: str) -> None:
    assert tables.number(value) == shown
    assert tables.milliseconds({"median": value}) == shown
    assert tables.mebibytes(round(value * 2**20)) == shown


def test_texts_and_numbers_of_a_table() -> None:
    shown = tables.table(("network", "way", "ms"), [("MLP 3-20-2", "a-b", "")])
    assert shown.splitlines() == [
        "| network | way | ms |",
        "| --- | --- | ---: |",
        '| MLP <span class="whole">3-20-2</span> | a-b | \N{EN DASH} |',
    ]


def test_threads_are_named_where_there_are_several() -> None:
    found = results("recorder-cpu")
    shown = [*tables.recorder(found)]
    assert sum(", 1 thread**" in it for it in shown) == len(shown) // 4
    found["times"] = [row for row in found["times"] if row["threads"] == 1]
    assert not any("thread" in it for it in [*tables.recorder(found)][1:])


def test_where_and_when_is_said() -> None:
    found = results()
    text = tables.where(found)
    assert found["date"][:10] in text
    assert found["machine"]["cpu"] in text
    assert found["torch"] in text


def test_a_file_that_is_not_there_is_named() -> None:
    with pytest.raises(PluginError, match=r"how-fast.md.*no-such.json"):
        tables.load("no-such", PAGE)


def test_every_marker_of_the_pages_is_understood() -> None:
    markers = re.compile(r'<div class="[\w-]+" data-results="[^"]*"></div>')
    found = [
        marker
        for path in ROOT.glob("docs/**/*.md")
        for marker in markers.findall(path.read_text())
    ]
    assert found
    known = tables.MARKER, figures.MARKER
    assert all(any(it.fullmatch(marker) for it in known) for marker in found)


def test_results_are_good_json() -> None:
    for path in ROOT.glob("benchmarks/results/*.json"):
        assert json.loads(path.read_text())["date"]
