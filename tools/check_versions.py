"""Record again in the builds of torch that docs/data holds, and compare.

``python tools/check_versions.py [VERSION ...]`` checks the given versions. If none is
given, it checks all of them, or with ``CI=true`` those of EVERY_TIME and the installed
one. It fails if a version that is given, or chosen by ``CI=true``, cannot be checked.

The installed torch is run as it is. Any other is installed into a throw-away
environment of the version of Python it was recorded with, if that is found here.
Wheels are kept in .cache/wheels, so that the next time nothing is downloaded.

A recording on a GPU is compared if that torch finds a GPU. If it does not, the output
says so, and it is no failure.
"""

import argparse
import difflib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from importlib.metadata import version
from pathlib import Path

ROOT = Path(__file__).parents[1]
DATA = ROOT / "docs" / "data"
WHEELS = ROOT / ".cache" / "wheels"
EVERY_TIME = ["1.2.0", "1.7.1"]
RECORDED = ["errors", "hooks", "hooks/cuda", "programs"]  # in docs/data
NEEDS_NUMPY = ["1.0.1", "1.4.0"]  # these do not ask pip for it

Environment = dict[str, str] | None  # the variables of a process; None: this one's
NO_PYTHONPATH = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}


class NotCheckedError(Exception):
    """A build is not available here; the message says why."""


# ---- What is to be checked.


def recordings(build: str) -> list[Path]:
    """Return the recordings of a build."""
    paths = [DATA / name / f"{build}.json" for name in RECORDED]
    return [path for path in paths if path.exists()]


def builds() -> list[str]:
    """Return the builds with a recording, the oldest first."""
    found = {path.stem for name in RECORDED for path in (DATA / name).glob("*.json")}
    return sorted(found, key=lambda build: [int(part) for part in build.split(".")])


def installed() -> str:
    """Return the version of the torch that is installed for this interpreter."""
    return version("torch").split("+")[0]


# ---- Interpreters.


def interpreter(python: str) -> Path:
    """Return an interpreter of a version, such as ``"3.7"``, that runs."""
    for path in candidates(python):
        if runs(path, python):
            return path
    raise NotCheckedError(f"no Python {python} that runs: pyenv, uv and PATH have none")


def candidates(python: str) -> Iterator[Path]:
    """Yield paths where an interpreter of a version may be."""
    pyenv = Path(os.environ.get("PYENV_ROOT") or Path.home() / ".pyenv")
    yield from sorted(pyenv.glob(f"versions/{python}.*/bin/python"))
    if uv := shutil.which("uv"):
        yield Path(output(uv, "python", "find", "--no-python-downloads", python) or "-")
    yield Path(shutil.which(f"python{python}") or "-")


def runs(path: Path, python: str) -> bool:
    """Tell whether an interpreter runs, is of a version, and can make environments."""
    asked = "import sys, ensurepip, venv; print('%d.%d' % sys.version_info[:2])"
    return output(str(path), "-c", asked) == python


def output(*command: str, env: Environment = NO_PYTHONPATH) -> str | None:
    """Return what a command prints, or ``None`` if it does not run, or fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, env=env)
    except OSError:
        return None
    return done.stdout.strip() if done.returncode == 0 else None


# ---- Environments.


def install(build: str, python: Path, folder: Path) -> Path:
    """Make an environment with a build of torch, and return its interpreter."""
    if output(str(python), "-m", "venv", str(folder)) is None:
        raise NotCheckedError(f"{python} makes no environment")
    inside = folder / "bin" / "python"
    from_wheels = ["--no-compile", "--no-index", "--find-links", str(WHEELS)]
    wanted = [*["numpy"] * (build in NEEDS_NUMPY), f"torch=={build}"]
    if not pip(inside, "install", *from_wheels, *wanted):
        download(build, inside)
        if not pip(inside, "install", *from_wheels, *wanted):
            raise NotCheckedError(f"pip could not install torch {build}")
    return inside


def download(build: str, python: Path) -> None:
    """Download the wheels of a build: the CPU's if pip offers it, else CUDA's.

    The build for CUDA runs on the CPU too. From torch 1.13 on it brings gigabytes of
    libraries along.
    """
    WHEELS.mkdir(parents=True, exist_ok=True)
    numpy = ["numpy"] * (build in NEEDS_NUMPY)
    into = ["--no-cache-dir", "--dest", str(WHEELS)]
    for name in (f"torch=={build}+cpu", f"torch=={build}"):
        if pip(python, "download", *into, *numpy, name):
            return
    raise NotCheckedError(f"pip downloads no torch {build} for this Python")


def pip(python: Path, *arguments: str) -> bool:
    """Run pip, and tell whether it succeeded."""
    command = [str(python), "-m", "pip", "--disable-pip-version-check", *arguments]
    return output(*command) is not None


# ---- Recording again.


def differences(build: str, python: Path, env: Environment = None) -> list[str]:
    """Record again, and return the lines that differ from the committed recordings."""
    found: list[str] = []
    for path in recordings(build):
        name = path.relative_to(DATA).as_posix()
        program, *arguments = recorder(path)
        if arguments and not finds_gpu(python, env):
            print(f"torch {build}: {name} not compared: it finds no GPU", flush=True)
            continue
        command = [python, program, *arguments]
        done = subprocess.run(command, capture_output=True, text=True, env=env)
        if done.returncode != 0:
            found += [f"{program.name} failed:", *done.stderr.splitlines()]
        else:
            found += compared(path, done.stdout)
    return found


def recorder(path: Path) -> tuple[Path, *tuple[str, ...]]:
    """Return the program that made a recording, and its arguments."""
    kind, *device, _ = path.relative_to(DATA).parts
    program = ROOT / "tools" / f"record_{kind}.py"
    return program, *(["--device", *device] if device else [])


def finds_gpu(python: Path, env: Environment) -> bool:
    """Tell whether the torch of an interpreter finds a GPU."""
    asked = "import torch; print(torch.cuda.is_available())"
    return output(str(python), "-c", asked, env=env) == "True"


def compared(path: Path, again: str) -> list[str]:
    """Return the difference between a recording and a new one, line by line."""
    old = without_python(path.read_text(encoding="utf-8")).splitlines(keepends=True)
    new = without_python(again).splitlines(keepends=True)
    name = path.relative_to(DATA).as_posix()
    lines = difflib.unified_diff(old, new, name, "recorded again")
    return [line.rstrip("\n") for line in lines]


def without_python(text: str) -> str:
    """Return a recording without the version of the interpreter."""
    return re.sub(r'^ "python": .*\n', "", text, flags=re.MULTILINE)


def checked(build: str) -> list[str]:
    """Return the lines in which a build differs from its recordings.

    Raises:
        NotCheckedError: The build is not available here.
    """
    paths = recordings(build)
    if not paths:
        raise NotCheckedError("no recording of it is committed")
    if build == installed():
        return differences(build, Path(sys.executable))
    python = interpreter(json.loads(paths[0].read_text(encoding="utf-8"))["python"])
    with tempfile.TemporaryDirectory() as folder:
        inside = install(build, python, Path(folder))
        return differences(build, inside, NO_PYTHONPATH)


def main(arguments: Sequence[str] | None = None) -> int:
    """Check the versions of the command line, and return the exit status."""
    parser = argparse.ArgumentParser(description="Record again, and compare.")
    parser.add_argument("versions", nargs="*", metavar="VERSION")
    required = parser.parse_args(arguments).versions
    if not required and os.environ.get("CI") == "true":
        required = [*EVERY_TIME, installed()]
    failed = False
    for build in required or builds():
        try:
            found = checked(build)
        except NotCheckedError as reason:
            print(f"torch {build}: not checked: {reason}", flush=True)
            failed |= bool(required)
        else:
            said = "differs:" if found else "checked, the same"
            print(f"torch {build}: {said}", *found, sep="\n", flush=True)
            failed |= bool(found)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
