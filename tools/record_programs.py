"""Record what the programs in tools/programs print in the torch that runs this file.

``python tools/record_programs.py [OUT.json]`` prints without OUT.

It runs wherever ``record_hooks.py`` does, but is not one file: it needs ``programs/``
beside it, and ``record_hooks.py``, whose words for warnings and errors it uses.
``docs/data/programs/README.md`` says what the recordings hold.
"""

import argparse
import contextlib
import io
import warnings
from pathlib import Path

import torch
from record_hooks import build, said, write

FOLDER = Path(__file__).parent / "programs"


def recorded(source):
    """Run a program, and return the recording of it."""
    error = None
    printed = io.StringIO()
    torch.manual_seed(0)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with contextlib.redirect_stdout(printed):
            try:
                exec(compile(source, "program", "exec"), {"__name__": "__main__"})
            except Exception as raised:
                error = said(type(raised), raised)
    texts = [said(warning.category, warning.message) for warning in caught]
    # A warning about CUDA is about the machine.
    texts = [text for text in texts if "CUDA initialization" not in text]
    return {
        "source": source,
        "stdout": printed.getvalue(),
        "warnings": sorted(set(texts), key=texts.index),
        "error": error,
    }


def main():
    """Read the command line, and record."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", nargs="?", metavar="OUT.json", type=Path)
    out = parser.parse_args().out
    if hasattr(torch, "set_warn_always"):
        torch.set_warn_always(True)
    paths = sorted(FOLDER.glob("*.py"))
    programs = {path.stem: recorded(path.read_text()) for path in paths}
    write(dict(build(), programs=programs), out)


if __name__ == "__main__":
    main()
