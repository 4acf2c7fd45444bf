"""What releases of torch say of the mistakes that have a code, as docs/data/errors."""

import json
from pathlib import Path
from typing import Any, NamedTuple

OLDEST = (2, 8)  # as pyproject.toml has it

FOLDER = Path(__file__).parents[2] / "docs" / "data" / "errors"


class Said(NamedTuple):
    """What a release says of a mistake."""

    code: str
    kind: str
    message: str


def said_by(release: str) -> list[Said]:
    """Return all that a release says, in the order of the codes."""
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
    """Return every error of autograd that releases gradlib runs on raise, each once."""
    known = [it for it in releases() if tuple(map(int, it.split("."))) >= OLDEST]
    every = [it for release in known for it in said_by(release)]
    return [it for it in dict.fromkeys(every) if it.kind == "RuntimeError"]
