"""A folder for what is computed at build, new whenever its result could change."""

import hashlib
import platform
import shutil
from importlib.metadata import version
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGES = (
    "torch",
    "numpy",
    "matplotlib",
    "jupytext",
    "mkdocs-jupyter",
)


def digest(folder: str) -> str:
    """Name the state of all files in a folder."""
    state = hashlib.sha256()
    for path in sorted((ROOT / folder).rglob("*")):
        hidden = "__pycache__" in path.parts or path.name.startswith(".")
        if path.is_file() and not hidden:
            state.update(f"{path.relative_to(ROOT)}\n".encode())
            state.update(path.read_bytes())
    return state.hexdigest()


# mkdocs serve goes on with the hooks it began with, whatever is edited meanwhile.
HOOKS_IN_USE = digest("mkdocs_hooks")


def fingerprint() -> str:
    """Name everything an output depends on, apart from the block that prints it."""
    versions = [f"{package} {version(package)}" for package in PACKAGES]
    parts = [platform.python_version(), *versions, HOOKS_IN_USE]
    parts += [digest("mkdocs_hooks"), digest("gradlib")]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]


def folder(name: str) -> Path:
    """Return the folder for `name` in .cache, and remove the ones it replaces."""
    current = ROOT / ".cache" / name / fingerprint()
    current.mkdir(parents=True, exist_ok=True)
    for other in current.parent.iterdir():
        if other != current:
            shutil.rmtree(other, ignore_errors=True)
    return current
