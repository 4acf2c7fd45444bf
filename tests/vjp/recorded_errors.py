"""The recorded messages of releases of torch for mistakes that have a code."""

import json
from pathlib import Path
from typing import Any, NamedTuple

OLDEST = (2, 8)  # as pyproject.toml has it

FOLDER = Path(__file__).parents[2] / "docs" / "data" / "errors"


class Said(NamedTuple):
    """The error that a release raises for a mistake."""

    code: str
    kind: str
    message: str


def said_by(release: str) -> list[Said]:
    """Return all errors of a release, in the order of the codes."""
    whole: dict[str, Any] = json.loads((FOLDER / f"{release}.json").read_text())
    return [
        Said(code, *mistake["error"].split(": ", 1))
        for code, mistakes in sorted(whole["mistakes"].items())
        for mistake in mistakes
        if mistake["error"] is not None
    ]


def releases() -> list[str]:
    """Return the releases that were recorded, the oldest first."""
    found = [path.stem for path in FOLDER.glob("*.json")]
    return sorted(found, key=lambda it: [int(part) for part in it.split(".")])


def messages() -> list[Said]:
    """Return each error of autograd that supported releases raise, once."""
    known = [it for it in releases() if tuple(map(int, it.split("."))) >= OLDEST]
    every = [it for release in known for it in said_by(release)]
    return [it for it in dict.fromkeys(every) if it.kind == "RuntimeError"]
