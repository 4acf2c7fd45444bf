"""Put the committed measurements of recorders into pages.

A page holds markers, each with a file of benchmarks/results, or the first with several:

    <div class="recorder-said" data-results="recorder-cpu"></div>
    <div class="recorder-times" data-results="recorder-cpu"></div>
"""

from collections.abc import Callable, Iterable
from itertools import pairwise
from typing import Any

from mkdocs.structure.pages import Page

from benchmarks.names import NONE, OURS, OURS_STATISTICS, counted_threads
from mkdocs_hooks.benchmark_tables import (
    Rows,
    device,
    filled,
    folded,
    grouped,
    marker,
    mebibytes,
    milliseconds,
    table,
    where,
)


def on_page_markdown(markdown: str, *, page: Page, **_: object) -> str:
    """Replace the markers of a page."""
    return filled(markdown, page, MADE, "recorder")


def said(results: dict[str, Any], *others: dict[str, Any]) -> Iterable[str]:
    """Yield how much longer a recorded step takes than one without hooks."""
    if others:
        heads = "machine", "`gradlib.record`", "with `reduce=gradlib.tensor_stats`"
        yield table(heads, [(device(it), *_spans(it)) for it in (results, *others)])
        return
    kind = "a GPU" if "gpu" in results["machine"] else "a CPU"
    plain, with_statistics = _spans(results)
    yield (
        f"On {kind} ({device(results)}), a step under `gradlib.record` takes "
        f"{plain} times as long as one without hooks, and {with_statistics} times with "
        "`reduce=gradlib.tensor_stats`."
    )


def _spans(results: dict[str, Any]) -> tuple[str, str]:
    """Return the spans of a recording and of one of statistics."""
    return _span(results, OURS), _span(results, OURS_STATISTICS)


def _span(results: dict[str, Any], name: str) -> str:
    """Return the least and the most a contender takes, as multiples of no hooks."""
    rows = [row for row in results["times"] if row["use"]]
    found = [_of_none(row["use"]) for row in rows if row["contender"] == name]
    return f"{min(found, key=float)} to {max(found, key=float)}"


def times(results: dict[str, Any]) -> Iterable[str]:
    """Yield where the times were measured, and the tables."""
    yield where(results)
    yield from recorder(results)


def recorder(results: dict[str, Any]) -> Iterable[str]:
    """Yield a table of all recorders and networks, then the details, folded."""
    threads, first = grouped(results["times"], "threads")[0]
    yield (
        f"A whole use with {counted_threads(threads)}, as a multiple of the same step "
        "without hooks:"
    )
    yield in_short(first)
    yield folded("What each one records", listed(results["contenders"]))
    for net, rows in grouped(results["times"], "net"):
        parts = [
            f"**{counted_threads(threads)}**\n\n{in_full(some)}"
            for threads, some in grouped(rows, "threads")
        ]
        name = f"{net[:1].upper()}{net[1:]}"
        yield folded(f"{name}: milliseconds, and steps alone", "\n\n".join(parts))


def in_short(rows: Rows) -> str:
    """Return a table with a row for each recorder and a column for each network."""
    nets = [net for net, _ in grouped(rows, "net")]
    lines = [
        (name, *map(_short, of_name)) for name, of_name in grouped(rows, "contender")
    ]
    return table(("recorder", *nets), lines)


def _short(row: dict[str, Any]) -> str:
    """Return how long a use takes: in milliseconds for the use without hooks."""
    if not row["use"]:
        return ""
    if row["contender"] == NONE:
        return f"{milliseconds(row['use']['ms'])} ms"
    return _of_none(row["use"])


def in_full(rows: Rows) -> str:
    """Return the table of one network."""
    of = "of no hooks", "of tensor hooks"
    heads = "recorder", "whole use, ms", *of, "step alone, ms", *of
    shown = [row for row in rows if not row["skipped"]]
    return table(
        heads,
        [
            (row["contender"], *_cells(row["use"]), *_cells(row["step"]))
            for row in shown
        ],
    )


def _cells(taken: dict[str, Any] | None) -> tuple[str, str, str]:
    """Return three cells, empty for a recorder without a step apart from its use."""
    if taken is None:
        return "", "", ""
    by_hand = f"{taken['to_by_hand']['median']:.2f}"
    return milliseconds(taken["ms"]), _of_none(taken), by_hand


def _of_none(taken: dict[str, Any]) -> str:
    return f"{taken['to_none']['median']:.2f}"


def memory(rows: Rows) -> str:
    """Return a table of the memory each recorder takes, and a note on odd numbers."""
    lines = [
        (row["net"], row["contender"], " ".join(row["skipped"].split()), "")
        if row["skipped"]
        else (row["net"], row["contender"], *of_memory(row))
        for row in rows
    ]
    shown = table(("network", "recorded by", "peak, MiB", "held, MiB"), lines)
    return "\n\n".join([shown, *map(_freed, _negative(rows))])


def of_memory(row: dict[str, Any]) -> tuple[str, str]:
    """Return the cells of a row's memory."""
    return mebibytes(row["peak_bytes"]), mebibytes(row["held_bytes"])


def _negative(rows: Rows) -> Rows:
    """Return the rows with negative held memory, each with the contender before it."""
    return [
        {**row, "before": before["contender"]}
        for before, row in pairwise(rows)
        if not row["skipped"] and row["held_bytes"] < 0
    ]


def _freed(row: dict[str, Any]) -> str:
    """Explain a negative number."""
    return (
        f"Less than nothing is held by {row['contender']} on {row['net']}: meanwhile "
        f"memory was freed that {row['before']} had left behind, so both hold more "
        "than is shown."
    )


def listed(contenders: Rows) -> str:
    """Return what each contender records, as a list."""
    named = {
        " ".join(filter(None, (it["contender"], it["version"]))): it["records"]
        for it in contenders
    }
    return "\n".join(f"- {name}: {records}" for name, records in named.items())


MADE: dict[str, Callable[..., Iterable[str]]] = {
    "recorder-said": said,
    "recorder-times": times,
}
"""What turns the results at a marker into paragraphs."""

MARKER = marker(MADE)
