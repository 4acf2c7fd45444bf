"""What takes long to make, and all processes of pytest-xdist share."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from filelock import FileLock


def made_once(
    name: str, make: Callable[[Path], object], factory: pytest.TempPathFactory
) -> Path:
    """Return a file or folder: the first process that asks makes it, the others wait.

    Args:
        name: Its name.
        make: Makes it, at the path that it is given.
        factory: The fixture `tmp_path_factory`.
    """
    folder = factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        folder = folder.parent
    made, unfinished = folder / name, folder / f"unfinished {name}"
    with FileLock(folder / f"{name}.lock"):
        if not made.exists():
            make(unfinished)
            unfinished.rename(made)
    return made
