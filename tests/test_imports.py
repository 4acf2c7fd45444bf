"""What comes along with `import gradlib`."""

import re
import subprocess
import sys

import gradlib


def test_matplotlib_is_imported_for_pictures_only() -> None:
    program = "import sys, gradlib; print('matplotlib' in sys.modules)"
    found = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert found.stdout == "False\n"


def test_the_version_is_there_to_print() -> None:
    assert re.fullmatch(r"\d+\.\d+\.\d+", gradlib.__version__)
