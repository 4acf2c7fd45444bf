"""The programs of tools/, as modules."""

import importlib
import shutil
import subprocess
import sys
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


def printed_alone(name: str, folder: Path) -> str:
    """Return what a program prints that stands in an empty folder."""
    alone = shutil.copy(TOOLS / f"{name}.py", folder)
    command = [sys.executable, str(alone)]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout
