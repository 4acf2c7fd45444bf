"""Runs programs from text, whose source can be read as that of a file."""

import linecache
from itertools import count
from typing import Any

_numbers = count()


def run(program: str, names: dict[str, Any] | None = None) -> dict[str, Any]:
    """Run a program.

    Args:
        program: Its source.
        names: The variables it finds, and adds to; none by default.

    Returns:
        The variables.
    """
    # In a list: gradlib would find names of tensors in a dict.
    scope = [{} if names is None else names]
    file = f"<program {next(_numbers)}>"
    lines = program.splitlines(keepends=True)
    linecache.cache[file] = (len(program), None, lines, file)
    exec(compile(program, file, "exec"), scope[0])
    return scope[0]
