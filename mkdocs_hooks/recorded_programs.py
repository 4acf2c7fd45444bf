"""Put programs of tools/programs into pages, with what they print in builds of torch.

A page holds markers:

    <div class="program" data-name="linear_old_hook"></div>
    <div class="ran" data-name="linear_old_hook" data-torch="1.7.1"></div>
    <div class="ran" data-name="linear_old_hook"></div>
    <div class="sides" data-before="one" data-torch="1.7.1" data-after="other"></div>

The first becomes the program; the second what it prints, warns of and raises in that
build (``newest`` is the newest recorded one); the third the same for all builds. The
last becomes two programs side by side: one as it ran in that build, the other as it ran
in the newest.
"""

from collections.abc import Sequence
from functools import cache as once
from html import escape
from itertools import groupby
from typing import Any

from mkdocs.structure.pages import Page
from pygments import highlight
from pygments.formatters import HtmlFormatter
from pygments.lexers import PythonLexer

from mkdocs_hooks import cache, folded_code
from mkdocs_hooks.hook_recordings import Builds, recorded_in, span
from mkdocs_hooks.long_words import breakable
from mkdocs_hooks.markers import replaced

FOLDER = cache.ROOT / "docs" / "data" / "programs"


def on_page_content(content: str, *, page: Page, **_: object) -> str:
    """Replace the markers of a page."""
    recorded = once(builds)  # reading them takes long, and most pages need none
    made = {
        "program": lambda **given: program(recorded(), **given),
        "ran": lambda **given: ran(recorded(), **given),
        "sides": lambda **given: sides(recorded(), **given),
    }
    return replaced(content, page, made, "program or build of docs/data/programs")


def builds() -> Builds:
    """Return the programs' recordings by build, the oldest first."""
    return {build: it["programs"] for build, it in recorded_in(FOLDER).items()}


def program(recorded: Builds, name: str) -> str:
    """Return the source of a program."""
    return highlighted(source(recorded, name))


def source(recorded: Builds, name: str) -> str:
    """Return the source of a program as the newest build ran it."""
    return recorded[list(recorded)[-1]][name]["source"]


def highlighted(source: str, marked: Sequence[int] = ()) -> str:
    """Return Python highlighted, not as a block, which the tests would run."""
    formatter = HtmlFormatter(wrapcode=True, hl_lines=marked)
    return highlight(source, PythonLexer(), formatter)


def sides(recorded: Builds, before: str, torch: str, after: str) -> str:
    """Return two programs, with what they give; lines that only one has are marked."""
    columns = [("Before", before, after, torch), ("After", after, before, "newest")]
    shown = "".join(
        f"<div><p><strong>{title}</strong></p>"
        f"{beside(source(recorded, name), source(recorded, other))}"
        f"{ran(recorded, name, build)}</div>"
        for title, name, other, build in columns
    )
    return f'<div class="sides">{shown}</div>'


def beside(source: str, other: str) -> str:
    """Return a program with the lines marked that `other` does not have."""
    lines = enumerate(source.splitlines(), start=1)
    has = {"", *other.splitlines()}
    return highlighted(source, [number for number, line in lines if line not in has])


def ran(recorded: Builds, name: str, torch: str | None = None) -> str:
    """Return what a program gives in one build, or in all: once if successive agree."""
    if torch is not None:
        chosen = list(recorded)[-1] if torch == "newest" else torch
        recorded = {chosen: recorded[chosen]}
    successive = groupby(recorded, key=lambda build: outcome(recorded[build][name]))
    return "".join(
        f"<p>torch {span(list(agreeing))}:</p>{given}" for given, agreeing in successive
    )


def outcome(recording: dict[str, Any]) -> str:
    """Return what a program printed, then what it warned of and raised."""
    lines = map(folded_code.marked, escape(recording["stdout"]).split("\n"))
    printed = '<span class="printed">' + "\n".join(lines) + "</span>"
    shown = f'<div class="highlight no-copy"><pre><code>{printed}</code></pre></div>'
    messages = [*recording["warnings"], *filter(None, [recording["error"]])]
    parts = [shown] * bool(recording["stdout"]) + [said(it) for it in messages]
    return "".join(parts) or "<p>It prints nothing.</p>"


def said(message: str) -> str:
    """Return a warning or an error as a block of code that may wrap."""
    return f'<div class="said"><code>{breakable(escape(message))}</code></div>'
