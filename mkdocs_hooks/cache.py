"""A folder for what a build computes, a new one whenever the result could change."""

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
    """Return a digest of all files in a folder."""
    state = hashlib.sha256()
    for path in sorted((ROOT / folder).rglob("*")):
        hidden = "__pycache__" in path.parts or path.name.startswith(".")
        if path.is_file() and not hidden:
            state.update(f"{path.relative_to(ROOT)}\n".encode())
            state.update(path.read_bytes())
    return state.hexdigest()


# mkdocs serve keeps the hooks it started with, even if they are edited.
HOOKS_IN_USE = digest("mkdocs_hooks")


def fingerprint() -> str:
    """Return a digest of all an output depends on except the block that prints it."""
    versions = [f"{package} {version(package)}" for package in PACKAGES]
    parts = [platform.python_version(), *versions, HOOKS_IN_USE]
    parts += [digest("mkdocs_hooks"), digest("gradlib")]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]


def folder(name: str) -> Path:
    """Return the folder for `name` in .cache, and remove older ones."""
    current = ROOT / ".cache" / name / fingerprint()
    current.mkdir(parents=True, exist_ok=True)
    for other in current.parent.iterdir():
        if other != current:
            shutil.rmtree(other, ignore_errors=True)
    return current
