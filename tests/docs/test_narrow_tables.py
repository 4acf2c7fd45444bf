"""Tables of benchmarks have a form for a phone."""

import json

from mkdocs_hooks import benchmark_recorders, wide_tables

from .snippets import ROOT

NUMBER = '<th style="text-align: right;">n</th>'


def shown(texts: int, numbers: int) -> str:
    heads = "<th>t</th>" * texts + NUMBER * numbers
    table = f"<table><thead><tr>{heads}</tr></thead></table>"
    return wide_tables.on_page_content(table)


def test_many_numbers_get_a_line_of_their_own() -> None:
    for texts in 1, 2:
        assert 'aria-label="Table" style="--numbers: 4"' in shown(texts, 4)


def test_few_numbers_and_many_texts_stay_beside_each_other() -> None:
    for texts, numbers in (1, 3), (2, 3), (5, 0), (3, 4):
        assert "--numbers" not in shown(texts, numbers)


def test_what_recording_takes_on_several_machines_is_a_table() -> None:
    path = ROOT / "benchmarks/results/recorder-cpu.json"
    results = json.loads(path.read_text(encoding="utf-8"))
    (text,) = benchmark_recorders.said(results, results)
    heads, _, first, second = text.splitlines()
    assert heads.startswith("| machine | `gradlib.record` |")
    assert first == second
    assert first.startswith(f"| {results['machine']['cpu']}")
