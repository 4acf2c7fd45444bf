"""The files of results."""

import json
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"


def write(results: dict[str, Any], path: Path) -> None:
    """Write a file that is whole, whenever the machine goes away."""
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_suffix(".unfinished")
    unfinished.write_text(json.dumps(results, indent=1) + "\n")
    unfinished.replace(path)
