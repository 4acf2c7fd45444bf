"""Imports between the files of the package run one way, as CONTRIBUTING says."""

import ast
import re
from graphlib import TopologicalSorter
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "gradlib"
FILES = {
    path.relative_to(PACKAGE).with_suffix("").as_posix(): path
    for path in PACKAGE.rglob("*.py")
    if path.name != "__init__.py"
}


def rows() -> list[list[str]]:
    """Return the table of CONTRIBUTING: files, each row on those above it."""
    text = (ROOT / "CONTRIBUTING.md").read_text()
    table = text[text.index("| folder | files | what |") :].split("\n\n")[0]
    found: list[list[str]] = []
    for line in table.splitlines()[2:]:
        folder, files = (re.findall(r"`([\w/]+)`", it) for it in line.split("|")[1:3])
        inside = "".join(folder).removeprefix("gradlib/")
        found.append([inside + name for name in files])
    return found


def imported(name: str) -> set[str]:
    """Return the files of the package that a file imports."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(FILES[name].read_text())):
        if isinstance(node, ast.ImportFrom) and node.module:
            package, *inside = node.module.split(".")
            if package == "gradlib":
                paths = ["/".join([*inside, it.name]) for it in node.names]
                found |= {path for path in paths if path in FILES} or {"/".join(inside)}
    return found


def test_every_file_is_listed() -> None:
    listed = [name for row in rows() for name in row]
    assert sorted(listed) == sorted(FILES)


def test_every_import_is_understood() -> None:
    assert {other for name in FILES for other in imported(name)} <= FILES.keys()


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
    TopologicalSorter({name: imported(name) for name in FILES}).prepare()


def test_inits_of_folders_hold_no_code() -> None:
    for path in PACKAGE.rglob("*/__init__.py"):
        assert len(ast.parse(path.read_text()).body) == 1, path
