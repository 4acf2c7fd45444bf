"""Put the committed results of GPUs into the page that holds the marker.

``make bench DEVICE=cuda`` writes them, a file for each GPU. For what it could not
measure, the page gives the error.
"""

import json
from collections.abc import Iterator
from itertools import groupby
from operator import itemgetter
from typing import Any

from benchmarks.files import RESULTS
from mkdocs_hooks.benchmark_jacobians import jacobian, times
from mkdocs_hooks.benchmark_recorders import memory, of_memory, recorder
from mkdocs_hooks.benchmark_tables import (
    Rows,
    folded,
    grouped,
    milliseconds,
    table,
    where,
)

MARKER = '<div class="gpu-figures"></div>'
NONE = "No GPU results are committed yet: nothing on this site was measured on a GPU."
PARTS = {
    "jacobian": "Jacobians",
    "recorder": "recording",
    "launches": "kernel launches",
    "kept": "where what is recorded is kept",
    "numbers": "other dtypes and TF32",
    "replayed": "CUDA graphs",
    "compiled": "`torch.compile`",
}
"""The parts of the benchmark, in words."""


def on_page_markdown(markdown: str, **_: object) -> str:
    """Replace the marker."""
    if MARKER not in markdown:
        return markdown
    sections = [shown(results) for results in every_result()]
    return markdown.replace(MARKER, "\n\n".join(sections) or NONE)


def every_result() -> list[dict[str, Any]]:
    """Return what was measured on GPUs."""
    found = [json.loads(path.read_text()) for path in sorted(RESULTS.glob("*.json"))]
    return [results for results in found if results["benchmark"] == "gpu"]


def shown(results: dict[str, Any]) -> str:
    """Return the section of one GPU."""
    return "\n\n".join(_parts(results))


def _parts(results: dict[str, Any]) -> Iterator[str]:
    measured = [results[it] for it in ("recorder", "jacobian") if it in results]
    for first in measured[:1]:
        yield f"### {first['machine'].get('gpu', 'No GPU')}"
        yield f"CUDA {results['cuda']}, TF32 off where a table says nothing else."
    if "recorder" in results:
        yield from _recording(results["recorder"])
    if "kept" in results:
        yield "Where what is recorded is kept:"
        yield table(
            ("network", "kept", "ms", "peak, MiB", "held, MiB", "kernel launches"),
            [_kept(row) for row in results["kept"]],
        )
    if "jacobian" in results:
        yield "#### The Jacobian of every sample"
        yield where(results["jacobian"])
        yield from jacobian(results["jacobian"])
    if "numbers" in results:
        yield (
            "In other numbers, with the error against float64 as a part of the largest "
            "entry. With bfloat16 the weights and the batch are rounded too:"
        )
        yield _numbers(results["numbers"])
    if "launches" in results:
        yield "How often a call launches kernels, one or a CUDA graph of them:"
        yield _launches(results["launches"])
    if "replayed" in results:
        yield results["answer"]
        yield _against_ours(results["replayed"])
    if "compiled" in results:
        yield "Under `torch.compile`, without the time that compiling takes:"
        yield _against_ours(results["compiled"])
    if left := _left(results):
        yield f"Not measured yet: {left}."
    if failed := results["failed"]:
        yield "Not measured:"
        rows = [(it["part"], it["net"], _in_a_cell(it["error"])) for it in failed]
        yield table(("part", "network", "why"), rows)


def _recording(results: dict[str, Any]) -> Iterator[str]:
    yield "#### Recording"
    yield where(results)
    yield from recorder(results)
    yield folded("What each takes of memory", memory(results["memory"]))


def _left(results: dict[str, Any]) -> str:
    """Return in words what an interrupted run did not get to measure."""
    left = [it for it in results.get("planned", []) if it not in results["done"]]
    parts = {part: len(list(nets)) for part, nets in groupby(left, itemgetter(0))}
    return ", ".join(
        f"{PARTS[part]} on {count} network{'s' * (count > 1)}"
        for part, count in parts.items()
    )


def _kept(row: dict[str, Any]) -> tuple[str, ...]:
    return (
        row["net"],
        f"`{row['kept']}`" if "=" in row["kept"] else row["kept"],
        milliseconds(row["ms"]),
        *of_memory(row),
        _count(row),
    )


def _numbers(rows: Rows) -> str:
    return table(
        ("network", "numbers", "way", "ms", "error"),
        [
            (
                row["net"],
                row["numbers"],
                row["contender"],
                _cell(row),
                f"{row['difference']:.0e}" if "difference" in row else "",
            )
            for row in rows
        ],
    )


def _launches(rows: Rows) -> str:
    """Return gradlib's launches beside the fewest and most of other ways, named."""
    lines: list[tuple[str, ...]] = []
    for net, of_net in grouped(rows, "net"):
        ours, *others = of_net
        counted = sorted(filter(_count, others), key=itemgetter("launches"))
        ends = [counted[0], counted[-1]] if counted else []
        named = [f"{_count(it)}, {it['contender']}" for it in ends] or ["", ""]
        lines.append((net, _count(ours), *named))
    return table(("network", "gradlib", "fewest of another way", "most"), lines)


def _against_ours(rows: Rows) -> str:
    return table(
        ("network", "way", "ms", "of ours"),
        [(row["net"], row["contender"], _cell(row), times(row)) for row in rows],
    )


def _cell(row: dict[str, Any]) -> str:
    """Return the time that a way takes, or why it was left out."""
    if row.get("skipped"):
        return _in_a_cell(row["skipped"])
    return milliseconds(row["ms"])


def _count(row: dict[str, Any]) -> str:
    return "" if row["launches"] is None else f"{row['launches']:,}"


def _in_a_cell(text: str) -> str:
    """Return an error's text in a form that fits into a table's cell."""
    return " ".join(text.split()).replace("|", "\\|")
