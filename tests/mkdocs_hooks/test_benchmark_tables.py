"""Words and tables of what benchmarks have measured."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
from mkdocs.exceptions import PluginError
from mkdocs.structure.pages import Page

from mkdocs_hooks import benchmark_tables as tables

ROOT = Path(__file__).parents[2]
PAGE = cast(Page, SimpleNamespace(file=SimpleNamespace(src_uri="how-fast.md")))


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


def test_where_and_when_is_said() -> None:
    found = tables.load("jacobian-cpu", PAGE)
    text = tables.where(found)
    assert found["date"][:10] in text
    assert found["machine"]["cpu"] in text
    assert found["torch"] in text


def test_the_batch_is_not_said_twice() -> None:
    name = "jacobian-random-cpu"
    path = ROOT / f"benchmarks/results/{name}.json"
    measured, found = json.loads(path.read_text()), tables.load(name, PAGE)
    names = {plan["net"] for plan in found["plans"]}
    assert len(names) == len(measured["plans"])
    for before, plan in zip(measured["plans"], found["plans"], strict=True):
        assert before["net"] == f"{plan['net']}, {plan['batch']}"
    assert {row["net"] for row in found["rows"]} == names


def test_a_file_that_is_not_there_is_named() -> None:
    with pytest.raises(PluginError, match=r"how-fast.md.*no-such.json"):
        tables.load("no-such", PAGE)


def test_results_are_good_json() -> None:
    for path in ROOT.glob("benchmarks/results/*.json"):
        assert json.loads(path.read_text())["date"]
