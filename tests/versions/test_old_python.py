"""What runs where old releases of torch do: Python 3.6, and nothing but torch."""

import ast
import sys
from pathlib import Path

import pytest

from .tools import TOOLS

FILES = [*TOOLS.glob("record_*.py"), *TOOLS.glob("programs/*.py")]
NAMES = {path.stem for path in FILES}


@pytest.mark.parametrize("path", sorted(FILES), ids=lambda path: path.stem)
def test_python_3_6_can_read_it(path: Path) -> None:
    source = path.read_text(encoding="utf-8")
    tree = ast.parse(source, feature_version=(3, 6))
    imports = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    plain = [node for node in ast.walk(tree) if isinstance(node, ast.Import)]
    names = {alias.name.split(".")[0] for node in plain for alias in node.names}
    names |= {str(node.module).split(".")[0] for node in imports}
    assert names - {"torch"} - NAMES <= sys.stdlib_module_names
    assert not names & {"__future__", "dataclasses"}  # of Python 3.7
    assert source.isascii()  # read in whatever the encoding is there
