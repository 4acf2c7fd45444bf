"""A line on the terminal that shows the progress of long work."""

import sys
import time
from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

T = TypeVar("T")

PATIENCE = 1.0
"""Seconds of work before the line appears."""


def reported(items: Iterable[T], text: Callable[[T], str]) -> Iterator[T]:
    """Yield `items`, with a line for each on stderr if that is a terminal.

    Args:
        items: What there is to do.
        text: Returns the line of an item; called when its turn has come.
    """
    if not sys.stderr.isatty():
        yield from items
        return
    began = time.monotonic()
    shown = 0
    try:
        for item in items:
            line = text(item)
            if time.monotonic() - began > PATIENCE:
                print(f"\r{line:{shown}}", end="", file=sys.stderr, flush=True)
                shown = len(line)
            yield item
    finally:
        if shown:
            print(f"\r{' ' * shown}\r", end="", file=sys.stderr, flush=True)
