"""What recording costs, as plain text."""

from collections.abc import Sequence
from typing import Any

from benchmarks.names import counted_threads

Result = dict[str, Any]


def as_text(results: Result) -> str:
    """Return the results as text."""
    machine = ", ".join(f"{key} {value}" for key, value in results["machine"].items())
    settings = results["settings"]
    parts = [
        f"{results['date']}, torch {results['torch']}, Python {results['python']}",
        machine,
        f"{settings['rounds']} rounds on {settings['device']}; median [quartiles]",
    ]
    for net, threads in dict.fromkeys(
        (r["net"], r["threads"]) for r in results["times"]
    ):
        rows = [
            r for r in results["times"] if (r["net"], r["threads"]) == (net, threads)
        ]
        parts += ["", f"{net}, {counted_threads(threads)}", *_time_table(rows)]
    for net in dict.fromkeys(row["net"] for row in results["memory"]):
        rows = [row for row in results["memory"] if row["net"] == net]
        parts += ["", f"memory: {net}", *_memory_table(rows)]
    return "\n".join([*parts, "", *_skipped(results)]).rstrip()


def _skipped(results: Result) -> list[str]:
    """Return a line for each contender and reason."""
    rows = [*results["times"], *results["memory"]]
    where: dict[tuple[str, str], list[str]] = {}
    for row in rows:
        if row["skipped"]:
            where.setdefault((row["contender"], row["skipped"]), []).append(row["net"])
    everywhere = {row["net"] for row in rows}
    return [
        f"{contender} was skipped"
        + ("" if {*nets} == everywhere else f" on {', '.join(dict.fromkeys(nets))}")
        + f": {reason}"
        for (contender, reason), nets in where.items()
    ]


def _time_table(rows: list[Result]) -> list[str]:
    heads = ("", "whole use, ms", "to none", "to by hand")
    lines = [(*heads, "step alone, ms", "to none", "to by hand")]
    lines += [
        (row["contender"], *_time_cells(row["use"]), *_time_cells(row["step"]))
        for row in rows
        if not row["skipped"]
    ]
    return _aligned(lines)


def _time_cells(compared: Result | None) -> tuple[str, str, str]:
    if compared is None:
        return ("-", "-", "-")
    return (
        "{median:.2f} [{lower_quartile:.2f}, {upper_quartile:.2f}]".format(
            **compared["ms"]
        ),
        f"{compared['to_none']['median']:.2f}",
        "{median:.2f} [{lower_quartile:.2f}, {upper_quartile:.2f}]".format(
            **compared["to_by_hand"]
        ),
    )


def _memory_table(rows: list[Result]) -> list[str]:
    lines = [("", "at the peak, MB", "held after it, MB")]
    lines += [
        (
            row["contender"],
            f"{row['peak_bytes'] / 1e6:.1f}",
            f"{row['held_bytes'] / 1e6:.1f}",
        )
        for row in rows
        if not row["skipped"]
    ]
    return _aligned(lines)


def _aligned(lines: Sequence[tuple[str, ...]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return [
        "  ".join(
            cell.rjust(width) if place else cell.ljust(width)
            for place, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    ]
