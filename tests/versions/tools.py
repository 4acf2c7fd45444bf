"""The programs of tools/, as modules."""

import importlib
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
TOOLS = ROOT / "tools"
DATA = ROOT / "docs" / "data"


def load(name: str) -> Any:
    """Import a program, which finds those beside it, as when it is run."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(TOOLS)
        return importlib.import_module(name)
