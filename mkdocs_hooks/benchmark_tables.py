"""Put the committed results of benchmarks into pages.

A page holds markers, each with a file of benchmarks/results:

    <div class="jacobian-times" data-results="jacobian-cpu"></div>
    <div class="jacobian-in-short" data-results="jacobian-random-cpu"></div>
    <div class="recorder-times" data-results="recorder-cpu"></div>
"""

import json
import re
from collections.abc import Callable, Iterable, Iterator
from statistics import median
from typing import Any

from mkdocs.exceptions import PluginError
from mkdocs.structure.pages import Page

from benchmarks.names import (
    OURS,
    OURS_CHECKED,
    OURS_IN_A_FUNCTION,
    OURS_IN_OTHER_CODE,
    OURS_IN_OTHER_CODE_CHECKED,
    OURS_OUT,
)
from mkdocs_hooks import cache

MARKER = re.compile(
    r'<div class="(jacobian-times|jacobian-in-short|recorder-times)"'
    r' data-results="([\w-]+)"></div>'
)
Rows = list[dict[str, Any]]
Ways = dict[str, dict[str, Any]]
"""The rows of a network, by contender."""

TEXTS = (
    "network",
    "network, and how many samples",
    "way",
    "fastest other way",
    "recorder",
    "recorded by",
    "kept",
    "numbers",
    "fewest of another way",
    "most",
    "part",
    "why",
    "gradlib with",
)
"""Which columns of tables hold texts; the others hold numbers."""

WIDTHS = re.compile(r"\d+(x\d+)?(-\d+(x\d+)?)+")
"""The widths of a network's layers, in its name."""

FEW = 3
"""How many networks a sentence names; more stand in a table."""


def on_page_markdown(markdown: str, *, page: Page, **_: object) -> str:
    """Replace the markers of a page."""

    def made(marker: re.Match[str]) -> str:
        results = load(marker[2], page)
        return "\n\n".join([where(results), *MADE[marker[1]](results)])

    return MARKER.sub(made, markdown)


def load(name: str, page: Page) -> dict[str, Any]:
    """Return a file of results."""
    path = cache.ROOT / "benchmarks" / "results" / f"{name}.json"
    if not path.exists():
        raise PluginError(f"{page.file.src_uri}: there is no {name}.json of results")
    return json.loads(path.read_text(encoding="utf-8"))


def where(results: dict[str, Any]) -> str:
    """Say on what machine, when and with what it was measured."""
    machine = results["machine"]
    device = machine.get("gpu") or f"{machine['cpu']}, {machine['cores']} cores"
    return (
        f"Measured on {results['date'][:10]}: {device}, torch {results['torch']}, "
        f"Python {results['python']}, {results['settings']['rounds']} rounds; the "
        f"machine's load was {machine['load_average']:.1f} when it began. Ratios are "
        "medians of the ratios of turns in the same round."
    )


def jacobian(results: dict[str, Any]) -> Iterable[str]:
    """Yield a table for each number of threads, and all ways of each network."""
    batches = {plan["net"]: plan["batch"] for plan in results["plans"]}
    for threads, rows in by_threads(results["rows"]):
        nets = by_net(rows)
        yield f"**{threads}:** {summed_up(nets)}" if threads else summed_up(nets)
        yield from calls(nets)
        yield table(
            (
                "network",
                "samples",
                "ms",
                "checked",
                "fastest other way",
                "its time",
                "in other code",
                "`out=`",
                "peak",
            ),
            [in_short(net, batches[net], ways) for net, ways in nets.items()],
        )
        for net, ways in grouped(rows, "net"):
            yield folded(f"{net}: all ways", all_ways(ways))


def jacobian_in_short(results: dict[str, Any]) -> Iterable[str]:
    """Yield what may be said of many networks, for each number of threads.

    Where ours is slower on more than a few these have a table; all have a folded one.
    """
    for threads, rows in grouped(results["rows"], "threads"):
        nets = by_net(rows)
        best = {net: best_other(ways) for net, ways in nets.items()}
        ratios = sorted(row["to_gradlib"]["median"] for row in best.values())
        yield (
            f"**{counted_threads(threads)}:** {summed_up(nets)} The fastest other way "
            f"takes {ratios[0]:.2f} to {ratios[-1]:.2f} times as long, "
            f"{median(ratios):.2f} times in the middle."
        )
        yield from calls(nets)
        rows_of = {
            net: (
                net,
                milliseconds(nets[net][OURS]["ms"]),
                row["contender"],
                ratio(row),
            )
            for net, row in best.items()
        }
        heads = "network, and how many samples", "ms", "fastest other way", "its time"
        lost = slower(nets)
        if len(lost) > FEW:
            yield "On these another way is faster:"
            yield table(heads, [rows_of[net] for net in lost])
        name = f"All {len(nets)}, {counted_threads(threads)}"
        yield folded(name, table(heads, [*rows_of.values()]))


def by_net(rows: Rows) -> dict[str, Ways]:
    """Return the rows of each network."""
    return {
        net: {row["contender"]: row for row in ways}
        for net, ways in grouped(rows, "net")
    }


def summed_up(nets: dict[str, Ways]) -> str:
    """Say where ours is the fastest, and where not."""
    lost = slower(nets)
    named = [
        f"{net} ({row['contender']} takes {times(row)} as long)"
        for net, row in lost.items()
    ]
    which = f", not on {' or '.join(named)}" if 0 < len(lost) <= FEW else ""
    return (
        f"gradlib is the fastest on {len(nets) - len(lost)} of {len(nets)} "
        f"networks{which}."
    )


def slower(nets: dict[str, Ways]) -> dict[str, dict[str, Any]]:
    """Return the networks on which another way is faster, each with that way."""
    best = {net: best_other(ways) for net, ways in nets.items()}
    return {net: row for net, row in best.items() if row["to_gradlib"]["median"] < 1}


CALLS = {
    OURS: "`check=False`",
    OURS_CHECKED: "`check=True`, the default",
    OURS_IN_A_FUNCTION: "`check=False`, in a function",
    OURS_IN_OTHER_CODE: "`check=False`, in other code",
    OURS_IN_OTHER_CODE_CHECKED: "`check=True`, in other code",
}
"""Calls of ours, each in the words of a table."""


def calls(nets: dict[str, Ways]) -> Iterator[str]:
    """Yield a table of what calls of ours take, where several were measured."""
    heads = "gradlib with", "times as long as the first", "the fastest on"
    rows = [_compared(nets, name, words) for name, words in CALLS.items()]
    if len(found := [*filter(None, rows)]) > 1:
        yield table(heads, found)


def _compared(
    nets: dict[str, Ways], name: str, words: str
) -> tuple[str, str, str] | None:
    """Return what a call takes, and on how many networks it is the fastest.

    Args:
        nets: The rows of each network.
        name: Under which name that call was measured, if it was.
        words: What it is called.
    """
    found = {net: ways[name] for net, ways in nets.items() if name in ways}
    ratios = {net: row["to_gradlib"]["median"] for net, row in found.items()}
    if not ratios:
        return None
    first = [
        net
        for net, ratio in ratios.items()
        if ratio < best_other(nets[net])["to_gradlib"]["median"]
    ]
    least, most = min(ratios.values()), max(ratios.values())
    times_taken = "1" if name == OURS else f"{least:.2f} to {most:.2f}"
    return words, times_taken, f"{len(first)} of {len(ratios)}"


def others(ways: Ways) -> Rows:
    """Return the rows of the ways that are not ours."""
    return [
        row
        for name, row in ways.items()
        if not name.startswith(OURS) and "ms" in row and not name.endswith("a loss")
    ]


def best_other(ways: Ways) -> dict[str, Any]:
    """Return the row of the fastest of them."""
    return min(others(ways), key=lambda row: row["to_gradlib"]["median"])


def in_short(net: str, batch: int, ways: Ways) -> tuple[str, ...]:
    """Return a network's row: our time, and those of others as multiples of it."""
    ours, best = ways[OURS], best_other(ways)
    peak = ours["peak_bytes"]  # None where a call takes long
    return (
        net,
        f"{batch:,}",
        milliseconds(ours["ms"]),
        ratio(ways.get(OURS_CHECKED, {})),
        best["contender"],
        ratio(best),
        ratio(ways.get(OURS_IN_OTHER_CODE, {})),
        ratio(ways.get(OURS_OUT, {})),
        f"{peak / ours['result_bytes']:.1f}" if peak else "",
    )


def all_ways(rows: Rows) -> str:
    """Return the table of one network, and why others are not in it."""
    found = table(
        ("way", "ms", "of ours", "quartiles", "peak MiB", "error"),
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


def recorder(results: dict[str, Any]) -> Iterable[str]:
    """Yield what each contender records, and a table for each network."""
    yield folded("What each one records", listed(results["contenders"]))
    for net, rows in grouped(results["times"], "net"):
        for threads, of_threads in by_threads(rows):
            yield f"**{net[:1].upper()}{net[1:]}{f', {threads}' * bool(threads)}**"
            yield table(
                ("recorder", "whole use, ms", "whole use", "step alone"),
                [_recorded(row) for row in of_threads if not row["skipped"]],
            )


def _recorded(row: dict[str, Any]) -> tuple[str, ...]:
    """Return the row of a recorder; some have no step apart from their whole use."""
    return (
        row["contender"],
        milliseconds(row["use"]["ms"]),
        f"{row['use']['to_by_hand']['median']:.2f}",
        f"{row['step']['to_by_hand']['median']:.2f}" if row["step"] else "",
    )


def listed(contenders: Rows) -> str:
    """Return what each contender records, as a list."""
    named = {
        " ".join(filter(None, (it["contender"], it["version"]))): it["records"]
        for it in contenders
    }
    return "\n".join(f"- {name}: {records}" for name, records in named.items())


MADE: dict[str, Callable[[dict[str, Any]], Iterable[str]]] = {
    "jacobian-times": jacobian,
    "jacobian-in-short": jacobian_in_short,
    "recorder-times": recorder,
}
"""What is made of the results at a marker."""


# Words and tables


def grouped(rows: Rows, key: str) -> list[tuple[Any, Rows]]:
    """Return rows by what they have under a key, in their order."""
    return [
        (value, [row for row in rows if row[key] == value])
        for value in dict.fromkeys(row[key] for row in rows)
    ]


def by_threads(rows: Rows) -> Iterator[tuple[str, Rows]]:
    """Yield the rows of each number of threads, with its words if there are several."""
    parts = grouped(rows, "threads")
    for threads, some in parts:
        yield counted_threads(threads) if len(parts) > 1 else "", some


def counted_threads(number: int) -> str:
    """Return a number of threads in words."""
    return "1 thread" if number == 1 else f"{number} threads"


def milliseconds(found: dict[str, Any]) -> str:
    """Return a median as a table shows it."""
    return number(found["median"])


def mebibytes(count: int) -> str:
    """Return a number of bytes in MiB."""
    return number(count / 2**20)


def number(value: float) -> str:
    """Return a number with three digits, or all those before the point."""
    return f"{value:#.3g}".rstrip(".") if value < 999.5 else f"{value:,.0f}"


def ratio(row: dict[str, Any]) -> str:
    """Return a ratio to our time."""
    return f"{row['to_gradlib']['median']:.2f}" if "to_gradlib" in row else ""


def times(row: dict[str, Any]) -> str:
    """Return a ratio to our time, for a place that does not say what it is."""
    return f"{found} times" if (found := ratio(row)) else ""


def spread(row: dict[str, Any]) -> str:
    """Return the quartiles of a ratio."""
    if "to_gradlib" not in row:
        return ""
    ratio = row["to_gradlib"]
    return f"{ratio['lower_quartile']:.2f} to {ratio['upper_quartile']:.2f}"


def table(heads: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    """Return a Markdown table; a dash stands where there is nothing to say."""
    sides = tuple("---" if head in TEXTS else "---:" for head in heads)
    dash = "\N{EN DASH}"
    shown = [(whole(first), *(it or dash for it in rest)) for first, *rest in rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in [heads, sides, *shown])


def whole(name: str) -> str:
    """Return the name of a network, whose widths stay in one line."""
    return WIDTHS.sub(r'<span class="whole">\g<0></span>', name)


def folded(title: str, text: str) -> str:
    """Return text that is shown when its title is clicked."""
    inside = "\n".join(f"    {line}" for line in text.splitlines())
    return f'??? note "{title}"\n\n{inside}'
