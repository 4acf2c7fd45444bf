"""Sentences and tables about measured benchmarks, as the site shows them."""

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from mkdocs.exceptions import PluginError
from mkdocs.structure.pages import Page

from benchmarks.files import RESULTS
from benchmarks.names import counted_threads

Rows = list[dict[str, Any]]

TEXTS = (
    "network",
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
    "machine",
)
"""The columns of tables that hold text; the others hold numbers."""

WIDTHS = re.compile(r"\d+(x\d+)?(-\d+(x\d+)?)+")
"""The widths of a network's layers, in its name."""


def load(name: str, page: Page) -> dict[str, Any]:
    """Return a file of results.

    The random networks' names end in the batch, for which tables have a column: theirs
    are left without. Their numbers still tell them apart.
    """
    path = RESULTS / f"{name}.json"
    if not path.exists():
        raise PluginError(f"{page.file.src_uri}: there is no {name}.json of results")
    results = json.loads(path.read_text(encoding="utf-8"))
    plans = results.get("plans", [])
    ends = {plan["net"]: f", {plan['batch']}" for plan in plans}
    for row in [*results.get("rows", []), *plans]:
        row["net"] = row["net"].removesuffix(ends.get(row["net"], ""))
    return results


def marker(made: Iterable[str]) -> re.Pattern[str]:
    """Return the pattern of markers with one of the given classes and its files."""
    return re.compile(
        rf'<div class="({"|".join(made)})" data-results="([\w -]+)"></div>'
    )


def filled(
    markdown: str,
    page: Page,
    made: Mapping[str, Callable[..., Iterable[str]]],
    benchmark: str,
) -> str:
    """Replace the markers of a page.

    Args:
        markdown: Its text.
        page: The page.
        made: By the class of a marker, the function from results to paragraphs.
        benchmark: The part that is used of files with results of several benchmarks.
    """

    def paragraphs(found: re.Match[str]) -> str:
        several = [load(name, page) for name in found[2].split()]
        return "\n\n".join(made[found[1]](*(it.get(benchmark, it) for it in several)))

    return marker(made).sub(paragraphs, markdown)


def where(results: dict[str, Any]) -> str:
    """Say when, on what machine and with what software results were measured."""
    load_average = results["machine"]["load_average"]
    return (
        f"Measured on {results['date'][:10]}: {device(results)}, "
        f"torch {results['torch']}, Python {results['python']}, "
        f"{results['settings']['rounds']} rounds; the machine's load was "
        f"{load_average:.1f} when it began."
    )


def device(results: dict[str, Any]) -> str:
    """Return the processor that results were measured on, and a CPU's cores."""
    cores = results["machine"]["cores"]
    return processor(results) + f", {cores} cores" * ("gpu" not in results["machine"])


def processor(results: dict[str, Any]) -> str:
    """Return the name of the GPU or CPU that results were measured on."""
    return results["machine"].get("gpu") or results["machine"]["cpu"]


def grouped(rows: Rows, key: str) -> list[tuple[Any, Rows]]:
    """Return rows grouped by their value under a key, in order."""
    return [
        (value, [row for row in rows if row[key] == value])
        for value in dict.fromkeys(row[key] for row in rows)
    ]


def by_threads(rows: Rows) -> Iterator[tuple[str, Rows]]:
    """Yield the rows of each number of threads, with that in words if not the only."""
    parts = grouped(rows, "threads")
    for threads, some in parts:
        yield counted_threads(threads) if len(parts) > 1 else "", some


def milliseconds(found: dict[str, Any]) -> str:
    """Return a median as a table shows it."""
    return number(found["median"])


def mebibytes(count: int) -> str:
    """Return a number of bytes in MiB."""
    return number(count / 2**20)


def number(value: float) -> str:
    """Return a number with three digits, or with all digits before the point."""
    return f"{value:#.3g}".rstrip(".") if value < 999.5 else f"{value:,.0f}"


def table(heads: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    """Return a Markdown table, with a dash in each empty cell."""
    sides = tuple("---" if head in TEXTS else "---:" for head in heads)
    dash = "\N{EN DASH}"
    shown = [(named(first), *(it or dash for it in rest)) for first, *rest in rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in [heads, sides, *shown])


def named(name: str) -> str:
    """Return the name of a network, with its widths kept on one line."""
    return WIDTHS.sub(lambda widths: whole(widths[0]), name)


def whole(text: str) -> str:
    """Return text that stays on one line."""
    return f'<span class="whole">{text}</span>'


def folded(title: str, text: str) -> str:
    """Return text that is shown when its title is clicked."""
    inside = "\n".join(f"    {line}" for line in text.splitlines())
    return f'??? note "{title}"\n\n{inside}'
