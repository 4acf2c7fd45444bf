"""Writes blocks back into the pages and docstrings they were found in."""

import textwrap
from collections.abc import Iterable

from pytest_examples import CodeExample


def write_back(blocks: Iterable[CodeExample]) -> None:
    """Replace each block in its file by its present source.

    Last block first, so that the places of those still to be written stay right.
    """
    for block in sorted(blocks, key=lambda b: b.start_index, reverse=True):
        text = block.path.read_text(encoding="utf-8")
        source = textwrap.indent(block.source, " " * block.indent)
        text = text[: block.start_index] + source + text[block.end_index :]
        block.path.write_text(text, encoding="utf-8", newline="\n")
