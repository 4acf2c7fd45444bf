"""Put the committed measurements of Jacobians into pages.

A page holds markers, each with one file of benchmarks/results or several:

    <div class="jacobian-machines" data-results="jacobian-cpu jacobian-intel-cpu"></div>
    <div class="jacobian-times" data-results="jacobian-cpu"></div>
    <div class="jacobian-in-short" data-results="jacobian-random-cpu"></div>
    <div class="jacobian-folded" data-results="jacobian-intel-cpu"></div>
"""

from collections.abc import Callable, Iterable
from statistics import median
from typing import Any

from mkdocs.structure.pages import Page

from benchmarks.names import (
    OURS,
    OURS_CHECKED,
    OURS_IN_A_FUNCTION,
    OURS_IN_OTHER_CODE,
    OURS_IN_OTHER_CODE_CHECKED,
    counted_threads,
)
from mkdocs_hooks.benchmark_tables import (
    Rows,
    by_threads,
    filled,
    folded,
    grouped,
    marker,
    mebibytes,
    milliseconds,
    processor,
    table,
    where,
    whole,
)

Ways = dict[str, dict[str, Any]]
"""The rows of a network, by contender."""

FEW = 3
"""The most networks that a sentence names; more are only in a table."""


def on_page_markdown(markdown: str, *, page: Page, **_: object) -> str:
    """Replace the markers of a page."""
    return filled(markdown, page, MADE, "jacobian")


def machines(*several: dict[str, Any]) -> Iterable[str]:
    """Yield a table of how gradlib's calls do, with a column for each machine."""
    nets = [
        [by_net(rows) for _, rows in grouped(results["rows"], "threads")]
        for results in several
    ]
    heads = [f"{processor(it)}, {whole(it['date'][:10])}" for it in several]
    yield table(
        ("gradlib with", *heads),
        [
            (words, *(_of_machine(of_threads, name) for of_threads in nets))
            for name, words in CALLS.items()
        ],
    )


def _of_machine(of_threads: list[dict[str, Ways]], name: str) -> str:
    """Return on how many networks a call is the fastest, and how much others take."""
    first = sum(won(nets, name) for nets in of_threads)
    every = sum(map(len, of_threads))
    ratios = [it for nets in of_threads for it in against(nets, name)]
    shown = (f"{first} of {every}", span(ratios)) if ratios else ()
    return "<br>".join(map(whole, shown))


def times_taken(results: dict[str, Any]) -> Iterable[str]:
    """Yield where the times were measured, and all tables."""
    yield where(results)
    yield from jacobian(results)


def jacobian(results: dict[str, Any]) -> Iterable[str]:
    """Yield a table for each number of threads, and all ways of each network."""
    for number, (threads, rows) in enumerate(by_threads(results["rows"])):
        nets = by_net(rows)
        text = f"{summed_up(nets)}\n\n{compared(results, nets)}"
        if number:
            yield folded(threads, text)
        else:
            yield f"**{threads}:** {text}" if threads else text
    for net, rows in grouped(results["rows"], "net"):
        parts = [
            f"**{threads}**\n\n{all_ways(some)}" if threads else all_ways(some)
            for threads, some in by_threads(rows)
        ]
        yield folded(f"{net}: all ways", "\n\n".join(parts))


def jacobian_in_short(results: dict[str, Any]) -> Iterable[str]:
    """Yield a summary of many networks, and those on which another way is faster."""
    yield where(results)
    parts = grouped(results["rows"], "threads")
    for threads, rows in parts:
        nets = by_net(rows)
        ratios = sorted(against(nets, OURS))
        yield (
            f"**{counted_threads(threads)}:** {summed_up(nets)} The fastest other way "
            f"takes {span(ratios)} times as long, with a median of "
            f"{median(ratios):.2f}."
        )
    lost = by_loss(by_net(parts[0][1]))
    if lost:
        threads = counted_threads(parts[0][0])
        yield (
            f"With {threads}, another way is faster than gradlib, or than gradlib with "
            "its check, on these:"
        )
        yield compared(results, lost)
    yield from in_tables(results)


def jacobian_folded(results: dict[str, Any]) -> Iterable[str]:
    """Yield where the times were measured, and folded tables."""
    yield where(results)
    yield from in_tables(results)


def in_tables(results: dict[str, Any]) -> Iterable[str]:
    """Yield a folded table of all networks for each number of threads."""
    for threads, rows in grouped(results["rows"], "threads"):
        nets = by_net(rows)
        name = f"All {len(nets)}, {counted_threads(threads)}"
        yield folded(name, compared(results, nets))


def by_loss(nets: dict[str, Ways]) -> dict[str, Ways]:
    """Return the networks on which another way is faster, by how much, most first."""
    least = {
        net: min(it for name in CALLS for it in against({net: ways}, name))
        for net, ways in nets.items()
    }
    return {
        net: nets[net] for net in sorted(nets, key=least.__getitem__) if least[net] < 1
    }


def by_net(rows: Rows) -> dict[str, Ways]:
    """Return the rows of each network."""
    return {
        net: {row["contender"]: row for row in ways}
        for net, ways in grouped(rows, "net")
    }


def summed_up(nets: dict[str, Ways]) -> str:
    """Say where gradlib is the fastest, and where not."""
    lost = slower(nets)
    named = [
        f"*{net}* ({row['contender']} takes {times(row)} as long)"
        for net, row in lost.items()
    ]
    which = f", not on {' or '.join(named)}" if 0 < len(lost) <= FEW else ""
    calls = [
        f"{words} on {won(nets, name)}"
        for name, words in SHORT.items()
        if name != OURS and against(nets, name)
    ]
    return (
        f"gradlib is the fastest on {len(nets) - len(lost)} of {len(nets)} "
        f"networks{'; '.join([which, ', '.join(calls)] if calls else [which])}."
    )


def slower(nets: dict[str, Ways]) -> dict[str, dict[str, Any]]:
    """Return the networks on which another way is faster, each with that way."""
    best = {net: best_other(ways) for net, ways in nets.items()}
    return {net: row for net, row in best.items() if to_ours(row) < 1}


CALLS = {
    OURS: "`check=False`",
    OURS_CHECKED: "`check=True`",
    OURS_IN_A_FUNCTION: "`check=False` in a function",
    OURS_IN_OTHER_CODE: "`check=False` in other code",
    OURS_IN_OTHER_CODE_CHECKED: "`check=True` in other code",
}
"""The calls of gradlib, each in the words of a table."""

SHORT = {
    OURS: "unchecked",
    OURS_CHECKED: "checked",
    OURS_IN_A_FUNCTION: "in a function",
    OURS_IN_OTHER_CODE: "in other code",
    OURS_IN_OTHER_CODE_CHECKED: "checked there",
}
"""The same calls in a word or two, for headings and sentences."""


def against(nets: dict[str, Ways], name: str) -> list[float]:
    """Return, for each network, the fastest other way's time over that of a call."""
    return [
        to_ours(best_other(ways)) / to_ours(ways[name])
        for ways in nets.values()
        if "to_gradlib" in ways.get(name, {})
    ]


def won(nets: dict[str, Ways], name: str) -> int:
    """Return on how many networks a call of gradlib is the fastest."""
    return sum(ratio >= 1 for ratio in against(nets, name))


def span(ratios: Iterable[float]) -> str:
    """Return the smallest and the largest of some ratios, in words."""
    least, *_, most = sorted(ratios)
    return f"{least:.2f} to {most:.2f}"


def to_ours(row: dict[str, Any]) -> float:
    """Return a way's time as a multiple of gradlib's without the check."""
    return row["to_gradlib"]["median"]


def others(ways: Ways) -> Rows:
    """Return the rows of the ways that are not gradlib's."""
    return [
        row
        for name, row in ways.items()
        if not name.startswith(OURS) and "ms" in row and not name.endswith("a loss")
    ]


def best_other(ways: Ways) -> dict[str, Any]:
    """Return the row of the fastest way that is not gradlib's."""
    return min(others(ways), key=to_ours)


def compared(results: dict[str, Any], nets: dict[str, Ways]) -> str:
    """Return a table that compares the fastest other way with each call of gradlib."""
    batches = {plan["net"]: plan["batch"] for plan in results["plans"]}
    names = [
        name
        for name in SHORT
        if name != OURS_IN_A_FUNCTION and any(name in ways for ways in nets.values())
    ]
    of_ours = "fastest other way", "gradlib, ms", "batch", "peak, of the result"
    return table(
        ("network", *(SHORT[name] for name in names), *of_ours),
        [in_short(net, batches[net], ways, names) for net, ways in nets.items()],
    )


def in_short(net: str, batch: int, ways: Ways, names: list[str]) -> tuple[str, ...]:
    """Return a row: the fastest other way against each call, and gradlib's time."""
    ours = ways[OURS]
    peak = ours["peak_bytes"]  # None if a call takes long
    return (
        net,
        *(" ".join(map(_held, against({net: ways}, name))) for name in names),
        best_other(ways)["contender"],
        milliseconds(ours["ms"]),
        f"{batch:,}",
        f"{peak / ours['result_bytes']:,.1f}" if peak else "",
    )


def _held(ratio: float) -> str:
    """Return a ratio, in bold if another way is faster."""
    shown = f"{ratio:.2f}"
    return shown if float(shown) >= 1 else f"**{shown}**"


def all_ways(rows: Rows) -> str:
    """Return the table of one network, and why some ways are not in it."""
    found = table(
        ("way", "ms", "of ours", "quartiles of that", "peak, MiB", "error"),
        [
            (
                row["contender"],
                milliseconds(row["ms"]),
                times(row),
                spread(row),
                mebibytes(row["peak_bytes"]) if row["peak_bytes"] else "",
                f"{row['difference']:.0e}",
            )
            for row in rows
            if not row.get("skipped")
        ],
    )
    left_out = [
        f"- {row['contender']}: {row['skipped']}" for row in rows if row.get("skipped")
    ]
    return "\n".join([found, "", *left_out])


def times(row: dict[str, Any]) -> str:
    """Return a ratio to gradlib's time with its unit."""
    return f"{to_ours(row):.2f} times" if "to_gradlib" in row else ""


def spread(row: dict[str, Any]) -> str:
    """Return the quartiles of a ratio."""
    if "to_gradlib" not in row:
        return ""
    ratio = row["to_gradlib"]
    return f"{ratio['lower_quartile']:.2f} to {ratio['upper_quartile']:.2f}"


MADE: dict[str, Callable[..., Iterable[str]]] = {
    "jacobian-machines": machines,
    "jacobian-times": times_taken,
    "jacobian-in-short": jacobian_in_short,
    "jacobian-folded": jacobian_folded,
}
"""What turns the results at a marker into paragraphs."""

MARKER = marker(MADE)
