"""Imports between the files of the package run one way, as CONTRIBUTING says."""

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
FILES = {path.stem: path for path in (ROOT / "gradlib").glob("*.py")}


def rows() -> list[list[str]]:
    """Return the table of CONTRIBUTING: files, each row on those above it."""
    text = (ROOT / "CONTRIBUTING.md").read_text()
    table = text[text.index("| files | what |") :].split("\n\n")[0]
    lines = table.splitlines()[2:]
    return [re.findall(r"`(\w+)`", line.split("|")[1]) for line in lines]


def imported(name: str) -> set[str]:
    """Return the files of the package that a file imports."""
    tree = ast.parse(FILES[name].read_text())
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module == "gradlib":
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            package, _, file = node.module.partition(".")
            found |= {file} if package == "gradlib" else set()
    return found


def test_every_file_is_listed() -> None:
    listed = [name for row in rows() for name in row]
    assert sorted(listed) == sorted(FILES.keys() - {"__init__"})


def test_no_file_imports_one_of_a_later_row() -> None:
    rank = {name: i for i, row in enumerate(rows()) for name in row}
    upwards = {
        (name, other)
        for name in rank
        for other in imported(name)
        if rank[other] > rank[name]
    }
    assert not upwards


def test_no_circles() -> None:
    def walk(name: str, path: tuple[str, ...]) -> None:
        assert name not in path, (*path, name)
        for other in imported(name):
            walk(other, (*path, name))

    for name in FILES.keys() - {"__init__"}:
        walk(name, ())
