"""What comes along with `import gradlib`."""

import subprocess
import sys


def test_matplotlib_is_imported_for_pictures_only() -> None:
    program = "import sys, gradlib; print('matplotlib' in sys.modules)"
    found = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert found.stdout == "False\n"
