"""Call a function, or run a program, in a process of its own that has torch already.

Each starts from nothing, as a reader's copy does, except for the imports, which take
longer than most of what runs here: where possible, the process is forked from one that
has only imported. gradlib is not imported there, as it may be edited meanwhile.
"""

import multiprocessing
import os
import runpy
import sys
import tempfile
import traceback
from collections.abc import Callable, Mapping
from concurrent.futures import ProcessPoolExecutor
from io import TextIOWrapper
from pathlib import Path
from subprocess import CompletedProcess
from typing import TextIO, TypeVar, TypeVarTuple, cast

Given = TypeVarTuple("Given")
Result = TypeVar("Result")

if sys.platform == "linux":
    PROCESSES = multiprocessing.get_context("forkserver")
    # torch would import the last one later: for any optimizer, and most of it for vmap.
    PROCESSES.set_forkserver_preload(
        ["matplotlib.pyplot", "matplotlib.backends.backend_svg", "torch._dynamo"]
    )
else:  # Windows cannot fork, and libraries of macOS do not survive it
    PROCESSES = multiprocessing.get_context("spawn")


def call(function: Callable[[*Given], Result], *args: *Given, folder: Path) -> Result:
    """Return what a function returns in a process of its own, which runs in `folder`.

    Raises:
        RuntimeError: The function raised, and this is its traceback, or the process
            ended before it returned.
    """
    with ProcessPoolExecutor(1, mp_context=PROCESSES) as pool:
        return pool.submit(_call, function, args, folder).result()


def _call(
    function: Callable[[*Given], Result], args: tuple[*Given], folder: Path
) -> Result:
    import numpy
    import torch

    torch.seed()  # else each fork would draw the same random numbers
    numpy.random.seed()
    os.chdir(folder)
    try:
        return function(*args)
    except BaseException:  # another process may not be able to unpickle it
        raise RuntimeError(traceback.format_exc()) from None


class Written:
    """What is written to a stream, by Python or directly by C++."""

    def __init__(self, stream: TextIO) -> None:
        """Redirect the stream to a file for the rest of the process."""
        self._stream = cast(TextIOWrapper, stream)
        self._stream.reconfigure(encoding="utf-8")
        self._file = tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace")  # noqa: SIM115 (it stays open)
        os.dup2(self._file.fileno(), stream.fileno())

    def take(self) -> str:
        """Return what was written since the last call."""
        self._stream.flush()
        self._file.seek(0)
        text = self._file.read()
        self._file.seek(0)
        self._file.truncate()
        return text


def run(*argv: str, folder: Path, env: Mapping[str, str]) -> CompletedProcess[str]:
    """Do what `python *argv` does with the path of a program, or `-m` and a module."""
    status, out, err = call(_run, argv, dict(env), folder=folder)
    return CompletedProcess(argv, status, out, err)


def _run(argv: tuple[str, ...], env: dict[str, str]) -> tuple[int, str, str]:
    os.environ.clear()
    os.environ.update(env)
    out, err = Written(sys.stdout), Written(sys.stderr)
    status = 0
    try:
        if argv[0] == "-m":
            sys.argv = list(argv[1:])
            sys.path.insert(0, str(Path.cwd()))
            runpy.run_module(argv[1], run_name="__main__", alter_sys=True)
        else:
            sys.argv = list(argv)
            sys.path.insert(0, str(Path(argv[0]).parent))
            runpy.run_path(argv[0], run_name="__main__")
    except SystemExit as asked:
        if isinstance(asked.code, str):
            print(asked.code, file=sys.stderr)
        status = asked.code if isinstance(asked.code, int) else int(bool(asked.code))
    except BaseException:
        traceback.print_exc()
        status = 1
    return status, out.take(), err.take()
