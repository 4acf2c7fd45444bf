"""Put small tables of the entries of `grad_input` into pages, from the recordings.

A page holds markers:

    <div class="entries" data-cases="linear-2d conv2d"></div>
    <div class="linear-entries" data-from="1.2.0" data-to="1.7.1"></div>
"""

from html import escape
from itertools import groupby
from typing import Any

from mkdocs.structure.pages import Page

from mkdocs_hooks import hook_cases, hook_recordings
from mkdocs_hooks.hook_recordings import Builds, Words
from mkdocs_hooks.markers import replaced

SHORT = {"full": "full hook", "legacy": "old hook"}
DIMENSIONS = 1, 2, 3, 4


def on_page_content(content: str, *, page: Page, **_: object) -> str:
    """Replace the markers of a page."""
    made = {"entries": entries, "linear-entries": linear_entries}
    return replaced(content, page, made, "case or build of docs/data/hooks")


# Some layers, in the newest release


def entries(cases: str) -> str:
    """Return a table of what each entry is, for the full hook and the old one."""
    builds = hook_recordings.every_build()
    newest = builds[list(builds)[-1]]
    longest = {
        hook: max(len(got(newest, case, hook)) for case in cases.split())
        for hook in SHORT
    }
    groups = "".join(
        f'<th scope="colgroup" colspan="{longest[hook]}">{SHORT[hook]}</th>'
        for hook in SHORT
    )
    heads = "".join(
        f'<th scope="col">entry {i}</th>'
        for hook in SHORT
        for i in range(longest[hook])
    )
    rows = "".join(row(builds, newest, case, longest) for case in cases.split())
    return (
        f'<table><thead><tr><td rowspan="2"></td>{groups}</tr><tr>{heads}</tr></thead>'
        f"<tbody>{rows}</tbody></table>"
    )


def row(
    builds: Builds, newest: dict[str, Any], case: str, longest: dict[str, int]
) -> str:
    """Return the row of what the hooks got in one case."""
    module = escape(hook_cases.cases()[case].module)
    named = [
        cell
        for hook in SHORT
        for cell in cells(builds, got(newest, case, hook), case, longest[hook])
    ]
    return f'<tr><th scope="row"><code>{module}</code></th>{"".join(named)}</tr>'


def got(build: dict[str, Any], case: str, hook: str) -> list[dict[str, Any]]:
    """Return the `grad_input` that a hook got in a build."""
    (call,) = build[case][hook]["calls"]
    return call["grad_input"]


def cells(
    builds: Builds, tuple_: list[dict[str, Any]], case: str, longest: int
) -> list[str]:
    """Return a cell for each entry: whose gradient it is, or that there is none."""
    words = Words(builds, case)
    named = [
        "<code>None</code>" if it["shape"] is None else words.label(it["is"][0])
        for it in tuple_
    ]
    return [
        f"<td>{name}</td>" for name in named + ["no entry"] * (longest - len(named))
    ]


# Linear layers, in two releases


def linear_entries(**ends: str) -> str:
    """Return a table of how many entries the old hook got for linear layers."""
    builds = hook_recordings.every_build()
    first, last = (builds[ends[end]] for end in ("from", "to"))

    def lengths(dimensions: int) -> tuple[str, ...]:
        cases = [f"linear-{dimensions}d{end}" for end in ("", "-no-bias")]
        pairs = [
            [len(got(it, case, "legacy")) for it in (first, last)] for case in cases
        ]
        return tuple(" then ".join(map(str, dict.fromkeys(pair))) for pair in pairs)

    alike = groupby(sorted(DIMENSIONS, key=lengths, reverse=True), key=lengths)
    rows = "".join(
        f'<tr><th scope="row">{spoken(list(these))}</th>'
        + "".join(f"<td>{length}</td>" for length in found)
        + "</tr>"
        for found, these in alike
    )
    return (
        '<table><thead><tr><th scope="col">input</th><th scope="col">with a bias</th>'
        f'<th scope="col">without</th></tr></thead><tbody>{rows}</tbody></table>'
    )


def spoken(dimensions: list[int]) -> str:
    """Return "1, 3 or 4 dimensions"."""
    *most, last = map(str, dimensions)
    return f"{', '.join(most)}{' or ' * bool(most)}{last} dimensions"
