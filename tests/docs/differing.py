"""How a block differs from what it should be, in words for a terminal."""

import difflib
import itertools

from pytest_examples import CodeExample

from .snippets import file_name


def difference(before: str, after: str) -> str:
    """The lines that differ, with those around them."""
    lines = difflib.unified_diff(before.splitlines(), after.splitlines(), lineterm="")
    return "\n".join(line for line in lines if line[:3] not in ("---", "+++", "@@ "))


def place_of_change(block: CodeExample, after: str) -> str:
    """Where a block first differs from another text, as ``path:line``."""
    pairs = itertools.zip_longest(block.source.splitlines(), after.splitlines())
    line = next(n for n, (old, new) in enumerate(pairs, start=1) if old != new)
    return f"{file_name(block.path)}:{block.start_line + line}"
