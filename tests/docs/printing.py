"""What a block printed, written under the statement that printed it.

The ``#>`` lines of a page are a transcript: the text the terminal shows, line by line
and in its order, each line below the outermost statement that runs only once. Output of
a loop stands below the loop, output of a function or a hook below its caller's line.

pytest-examples has its own way, which is not used: it puts output below each ``print``,
keeps only the first round of a loop with two prints, formats tensors as Python code,
and overlooks what ``file=``, ``end=`` or the package itself prints.
"""

import ast
import io
import sys
import threading
import tokenize
from pathlib import Path
from typing import NamedTuple

MARK = "#>"


class PrintedLine(NamedTuple):
    """One line of output, and the line of the block that was running."""

    running: int
    text: str


class Transcript(io.TextIOBase):
    """A standard output that remembers which line of the block it comes from."""

    def __init__(self, block: Path) -> None:
        """Listen to the block that runs as the file ``block``."""
        self._file = str(block)
        self._printed: list[PrintedLine] = []
        self._unfinished = ""
        self._running = 0

    def write(self, text: str) -> int:
        """Take text, as every ``print`` hands it over."""
        *lines, self._unfinished = (self._unfinished + text).split("\n")
        if lines or self._unfinished:
            self._running = self._line_running()
        self._printed += [PrintedLine(self._running, line) for line in lines]
        return len(text)

    def printed(self) -> list[PrintedLine]:
        """Every line so far, one without a line break at its end included."""
        if not self._unfinished:
            return self._printed
        return [*self._printed, PrintedLine(self._running, self._unfinished)]

    def _line_running(self) -> int:
        # Of the main thread, whoever prints: autograd may call a hook from its own.
        frame = sys._current_frames().get(threading.main_thread().ident or 0)
        while frame is not None:
            code = frame.f_code
            if code.co_filename == self._file and code.co_name == "<module>":
                return frame.f_lineno
            frame = frame.f_back
        raise RuntimeError("something printed while no block was running")


def with_printed(source: str, printed: list[PrintedLine]) -> str:
    """The block with exactly these lines of output, whatever ``#>`` lines it had."""
    output: dict[int, list[str]] = {}
    body = ast.parse(source).body
    for line in printed:
        last_line, column = _end_of_statement(body, line.running)
        marked = f"{' ' * column}{MARK} {line.text}".rstrip()
        output.setdefault(last_line, []).append(marked)

    marks = _marks(source)
    lines: list[str] = []
    for number, line in enumerate(source.split("\n"), start=1):
        code = line[: marks.get(number)].rstrip() if number in marks else line
        if code or number not in marks:
            lines.append(code)
        lines += output.get(number, [])
    return "\n".join(lines)


def without_printed(source: str) -> str:
    """The block as its author typed it: without any ``#>`` line."""
    return with_printed(source, [])


def _marks(source: str) -> dict[int, int]:
    """The line and column of every ``#>`` comment; in a string it is no comment."""
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    return dict(
        token.start
        for token in tokens
        if token.type == tokenize.COMMENT and token.string.startswith(MARK)
    )


def _end_of_statement(body: list[ast.stmt], line: int) -> tuple[int, int]:
    """The last line, and the indentation, of the statement that runs at ``line``.

    Bodies that run at most once are entered; a loop or a function is one statement.
    """
    statement = next(s for s in body if (s.end_lineno or s.lineno) >= line)
    for inner in _bodies_run_once(statement):
        if inner and inner[0].lineno <= line <= (inner[-1].end_lineno or 0):
            return _end_of_statement(inner, line)
    return statement.end_lineno or statement.lineno, statement.col_offset


def _bodies_run_once(statement: ast.stmt) -> list[list[ast.stmt]]:
    match statement:
        case ast.With():
            return [statement.body]
        case ast.If():
            return [statement.body, statement.orelse]
        case ast.Try():
            handlers = [handler.body for handler in statement.handlers]
            return [statement.body, *handlers, statement.orelse, statement.finalbody]
        case ast.Match():
            return [case.body for case in statement.cases]
        case _:
            return []
