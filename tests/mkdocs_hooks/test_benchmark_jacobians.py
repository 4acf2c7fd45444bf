"""What pages say of the Jacobian's times is what was measured."""

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from mkdocs.structure.pages import Page

from mkdocs_hooks import benchmark_figures as figures
from mkdocs_hooks import benchmark_jacobians as jacobians
from mkdocs_hooks import benchmark_recorders as recorders
from mkdocs_hooks import benchmark_tables as tables

ROOT = Path(__file__).parents[2]
PAGE = cast(Page, SimpleNamespace(file=SimpleNamespace(src_uri="how-fast.md")))
NAMES = [path.stem for path in sorted(ROOT.glob("benchmarks/results/jacobian*.json"))]


def results(name: str = "jacobian-cpu") -> dict[str, Any]:
    return tables.load(name, PAGE)


def with_ratios(ratios: dict[str, float]) -> dict[str, Any]:
    """Return the rows of one network by contender, in which others take three."""
    rows = {
        it["contender"]: it
        for it in results()["rows"]
        if "to_gradlib" in it and not it["contender"].startswith("gradlib")
    }
    ours = next(it for it in results()["rows"] if it["contender"] == "gradlib")
    rows |= {name: {**ours, "contender": name} for name in ratios}
    return {
        name: {**row, "to_gradlib": {"median": ratios.get(name, 3.0)}}
        for name, row in rows.items()
    }


def test_there_are_results() -> None:
    assert "jacobian-cpu" in NAMES


@pytest.mark.parametrize("name", NAMES)
def test_every_network_and_way_is_shown(name: str) -> None:
    text = "\n".join(jacobians.jacobian(results(name)))
    for row in results(name)["rows"]:
        assert row["net"] in text
        if not row.get("skipped"):
            assert f"| {row['contender']} |" in text
        else:
            assert f"- {row['contender']}: {row['skipped']}" in text


def test_another_time_is_another_row() -> None:
    found = results()
    before = "\n".join(jacobians.jacobian(found))
    ours = next(row for row in found["rows"] if row["contender"] == "gradlib")
    ours["ms"]["median"] = 98765.0
    assert "98,765" in "\n".join(jacobians.jacobian(found))
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
    rows["gradlib, checked"]["to_gradlib"]["median"] = 4.0
    row = jacobians.in_short(net, 7, rows, ["gradlib", "gradlib, checked"])
    assert row[1:4] == ("2.00", "**0.50**", chosen)
    assert row[5] == "7"


def test_where_ours_is_slower_is_said_first() -> None:
    rows = with_ratios({"gradlib": 1.0, "gradlib, checked": 4.0})
    good = jacobians.summed_up({"one": rows, "two": rows})
    assert good == "gradlib is the fastest on 2 of 2 networks; checked on 0."
    slow = {**rows, "TorchJD": {**rows["TorchJD"], "to_gradlib": {"median": 0.5}}}
    bad = jacobians.summed_up({"one": rows, "two": slow})
    assert "fastest on 1 of 2 networks, not on *two* (TorchJD takes 0.50 times" in bad


def test_each_machine_has_a_column() -> None:
    one, two = results(), results("jacobian-intel-cpu")
    for row in two["rows"]:
        row["to_gradlib"] = {"median": 1.0 if row["contender"] == "gradlib" else 0.25}
        row.setdefault("ms", {"median": 1.0})
    (text,) = jacobians.machines(one, two)
    heads, _, unchecked, *_ = text.splitlines()
    assert f"{two['machine']['cpu']}, {tables.whole(two['date'][:10])} |" in heads
    assert unchecked.startswith(f"| `check=False` | {tables.whole('18 of 18')}<br>")
    last = "<br>".join(map(tables.whole, ("0 of 18", "0.25 to 0.25")))
    assert unchecked.endswith(f"| {last} |")


def test_many_networks_in_short() -> None:
    found = results("jacobian-random-cpu")
    first, *_, last = nets = [plan["net"] for plan in found["plans"]]
    for row in found["rows"]:
        ratio = 1.0 if row["contender"].startswith("gradlib") else 3.0
        if row["contender"] == "replicate":
            ratio = {(last, 1): 0.5, (first, 1): 0.9, (last, 2): 0.6}.get(
                (row["net"], row["threads"]), ratio
            )
        row["to_gradlib"] = {"median": ratio}
        row.setdefault("ms", {"median": 1.0})
    _, one, two, faster, lost, *every = jacobians.jacobian_in_short(found)
    assert one.startswith("**1 thread:**")
    assert two.startswith("**2 threads:**")
    assert "0.50 to 3.00 times as long, with a median of 3.00." in one
    assert f"on {len(nets) - 1} of {len(nets)} networks, not on *{last}*" in two
    assert faster.startswith("With 1 thread, ")
    assert "than gradlib with its check" in faster
    named = [line.split(" | ")[0] for line in lost.splitlines()[2:]]
    assert named == [f"| {tables.named(net)}" for net in (last, first)]
    assert all(f"| {tables.named(net)} |" in it for net in nets for it in every)


def test_every_marker_of_the_pages_is_understood() -> None:
    markers = re.compile(r'<div class="[\w-]+" data-results="[^"]*"></div>')
    found = [
        marker
        for path in ROOT.glob("docs/**/*.md")
        for marker in markers.findall(path.read_text())
    ]
    assert found
    known = jacobians.MARKER, recorders.MARKER, figures.MARKER
    assert all(any(it.fullmatch(marker) for it in known) for marker in found)
