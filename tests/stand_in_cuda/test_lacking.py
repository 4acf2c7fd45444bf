"""What is skipped with the stand-in for CUDA is there."""

import re
from pathlib import Path

from .lacking import LACKING


def test_what_is_skipped_exists() -> None:
    files = (Path(__file__).parents[1] / "gpu").glob("test_*.py")
    text = "".join(it.read_text() for it in files)
    assert LACKING.keys() <= {*re.findall(r"^def (test_\w+)", text, re.MULTILINE)}
