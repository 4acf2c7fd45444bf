"""A line on the terminal that says how far long work is."""

import sys
import time
from collections.abc import Iterator, Sequence
from typing import TypeVar

T = TypeVar("T")

PATIENCE = 1.0
"""After how many seconds of work the line appears."""


def progress(items: Sequence[T], what: str) -> Iterator[T]:
    """Go through `items`, and say so on stderr where that is a terminal.

    Args:
        items: What there is to do.
        what: What is done, as ``"verify"``.
    """
    if not sys.stderr.isatty():
        yield from items
        return
    began = time.monotonic()
    line = ""
    try:
        for done, item in enumerate(items):
            if time.monotonic() - began > PATIENCE:
                line = f"{what}: {done} of {len(items)} calls"
                print(f"\r{line}", end="", file=sys.stderr, flush=True)
            yield item
    finally:
        if line:
            print(f"\r{' ' * len(line)}\r", end="", file=sys.stderr, flush=True)
