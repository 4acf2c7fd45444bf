"""The style of blocks: what ruff finds, and how ruff would format them."""

import json
import subprocess
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from pytest_examples import CodeExample
from ruff import find_ruff_bin

from .differing import difference
from .printing import without_printed

# 80 columns fit a page without a scroll bar; the `#>` lines are the terminal's own.
LINE_LENGTH = 80

# Few rules, as every block is a small program of its own that imports and prints.
RULES = {
    "F": "a name that is undefined, an import that is not used",
    "E4": "imports at the top, where a reader looks for them",
    "E7": "bare except, lambdas with a name, comparison to None",
    "B018": "a bare expression shows nothing when run as a program: print it",
    "I": "imports in one order everywhere",
    "UP": "nothing that today's Python writes more simply",
}


def lint(blocks: Sequence[CodeExample]) -> list[str]:
    """What is to be mended in each block, or an empty text.

    ruff is started once to check all blocks, and once to format those without findings.
    """
    found = _check([block.source for block in blocks])
    sources = [
        "" if findings else without_printed(block.source)
        for block, findings in zip(blocks, found, strict=True)
    ]
    differences = map(_difference, sources, _formatted(sources))
    return [
        it or other
        for it, other in zip(map(_findings, blocks, found), differences, strict=True)
    ]


def _check(sources: Sequence[str]) -> list[list[dict[str, Any]]]:
    """Return what ruff finds in each text."""
    found: list[list[dict[str, Any]]] = [[] for _ in sources]
    with TemporaryDirectory() as folder:
        _write(sources, folder)
        select = f"--select={','.join(RULES)}"
        listed = _ruff("check", "--output-format=json", "--no-cache", select, folder)
    for finding in json.loads(listed):
        found[int(Path(finding["filename"]).stem)].append(finding)
    return found


def _formatted(sources: Sequence[str]) -> list[str]:
    """Return each text as ruff formats it."""
    with TemporaryDirectory() as folder:
        files = _write(sources, folder)
        _ruff("format", f"--line-length={LINE_LENGTH}", folder)
        return [file.read_text(encoding="utf-8") for file in files]


def _write(sources: Sequence[str], folder: str) -> list[Path]:
    files = [Path(folder, f"{number}.py") for number in range(len(sources))]
    for file, source in zip(files, sources, strict=True):
        file.write_text(source, encoding="utf-8")
    return files


def _ruff(command: str, *arguments: str) -> str:
    """Run ruff by neither the project's rules nor the user's."""
    # Not as a module of Python, which would take longer to start than to format.
    ruff = [find_ruff_bin(), command, "--isolated", "--target-version=py311"]
    done = subprocess.run([*ruff, *arguments], capture_output=True, encoding="utf-8")
    assert done.returncode in (0, 1), done.stderr  # 1: it has findings
    return done.stdout


def _findings(block: CodeExample, findings: list[dict[str, Any]]) -> str:
    lines: list[str] = []
    for finding in findings:
        row, column = finding["location"]["row"], finding["location"]["column"]
        place = f"{block.path}:{block.start_line + row}:{column}"
        lines.append(f"{place}: {finding['code']} {finding['message']}")
    return "\n".join(lines)


def _difference(source: str, mended: str) -> str:
    if mended == source:
        return ""
    return f"ruff would format it so:\n{difference(source, mended)}"
