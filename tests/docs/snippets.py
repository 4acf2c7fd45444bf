"""Where the Python blocks are that a reader may copy."""

from collections.abc import Iterable
from pathlib import Path

from pytest_examples import CodeExample, find_examples

ROOT = Path(__file__).parents[2]
TORCH = "2.13.0"
"""The release of torch whose outputs the pages show; the Makefile installs it."""


def markdown_files() -> list[Path]:
    """Every page of the site, and what is read on the project's front page."""
    return sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])


def package_files() -> list[Path]:
    """Every module of the package: their docstrings hold blocks too."""
    return sorted(ROOT.glob("gradlib/**/*.py"))


def blocks_in(paths: Iterable[Path]) -> list[CodeExample]:
    """The Python blocks of some files, in the order a reader meets them."""
    return list(find_examples(*paths))


def file_name(path: Path) -> str:
    """A file as people name it: from the repository's root, with slashes."""
    return path.relative_to(ROOT).as_posix()


def block_name(block: CodeExample) -> str:
    """A block as people name it: file, first and last line."""
    return f"{file_name(block.path)}:{block.start_line}-{block.end_line}"
