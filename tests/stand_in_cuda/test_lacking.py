"""What is skipped with the stand-in for CUDA is there."""

import re
from pathlib import Path

import gradlib

from .lacking import LACKING, lack_in


def test_what_is_skipped_exists() -> None:
    files = (Path(__file__).parents[1] / "gpu").glob("test_*.py")
    text = "".join(it.read_text() for it in files)
    assert LACKING.keys() <= {*re.findall(r"^def (test_\w+)", text, re.MULTILINE)}


def test_only_torchs_own_error_tells_of_a_lack() -> None:
    said = "Backend doesn't support synchronizing streams."
    assert lack_in(RuntimeError(said)) == "communication between processes"
    assert not lack_in(RuntimeError(f"{said} So it is not recorded."))
    assert not lack_in(RuntimeError(f"It failed: {said}"))
    assert not lack_in(gradlib.GradlibError(said))
