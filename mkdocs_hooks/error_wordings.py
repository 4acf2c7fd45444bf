"""Put torch's message for a mistake, release by release, into the page of its code.

A page holds a marker:

    <div class="wordings" data-code="GL103"></div>

The messages are added to the page's tags, by which `searched_messages.py` finds it.
"""

from itertools import groupby

from mkdocs.structure.pages import Page

from mkdocs_hooks import cache
from mkdocs_hooks.hook_recordings import recorded_in, span
from mkdocs_hooks.markers import replaced
from mkdocs_hooks.recorded_programs import highlighted, said

FOLDER = cache.ROOT / "docs" / "data" / "errors"


def on_page_content(content: str, *, page: Page, **_: object) -> str:
    """Replace the marker of a page, and add the messages to the page's tags."""
    tags: list[str] = []

    def made(code: str) -> str:
        tags.extend(messages(code))
        return wordings(code)

    content = replaced(content, page, {"wordings": made}, "code of docs/data/errors")
    if tags:
        page.meta["tags"] = [*page.meta.get("tags", []), *tags]
    return content


def messages(code: str) -> list[str]:
    """Return the newest release's messages for the mistakes of a code."""
    *_, newest = recorded_in(FOLDER).values()
    mistakes = newest["mistakes"][code]
    texts = [it["error"].partition(": ")[2] for it in mistakes if it["error"]]
    return list(dict.fromkeys(texts))


def wordings(code: str) -> str:
    """Return each mistake of a code, with each release's message."""
    recorded = recorded_in(FOLDER)
    *_, newest = recorded.values()
    errors = {build: recorded[build]["mistakes"][code] for build in recorded}
    mistakes = [
        highlighted(mistake["program"])
        + listed({build: errors[build][i]["error"] for build in errors})
        for i, mistake in enumerate(newest["mistakes"][code])
    ]
    begin = f"<p>Run in torch {', '.join(recorded)}. Each program begins with</p>"
    start = highlighted(newest["start"])
    return f"{begin}{start}<p>and goes on with</p>{''.join(mistakes)}"


def listed(errors: dict[str, str | None]) -> str:
    """Return the errors by build, each once for successive builds that agree."""
    entries = "".join(
        f"<dt>torch {span(list(builds))}</dt>{shown(error)}"
        for error, builds in groupby(errors, key=lambda build: errors[build])
    )
    return f"<dl>{entries}</dl>"


def shown(error: str | None) -> str:
    """Return an error as a block of code, or the words that there is none."""
    if error is None:
        return '<dd class="unsaid">no error</dd>'
    return f"<dd>{said(error)}</dd>"
