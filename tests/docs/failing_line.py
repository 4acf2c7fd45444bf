"""Names the line of the page on which a block failed.

On Python 3.11 pytest-examples 0.0.18 forges a traceback whose line table pytest
cannot read, and the whole run ends in INTERNALERROR. ``name_failing_line`` stands in
for ``pytest_examples.run_code.create_example_traceback``, which forges it: the real
traceback stays, and notes on the exception say where in the page it was.
"""

import traceback

from pytest_examples import CodeExample

from .snippets import file_name


def name_failing_line(error: Exception, module_path: str, block: CodeExample) -> None:
    """Note every line of the block that the error passed, outermost first."""
    passed = [
        (frame.lineno or 0, frame.line or "")
        for frame in traceback.extract_tb(error.__traceback__)
        if frame.filename == module_path
    ]
    if isinstance(error, SyntaxError) and error.filename == module_path:
        passed.append((error.lineno or 0, (error.text or "").strip()))
    for line, code in passed:
        error.add_note(f"{file_name(block.path)}:{block.start_line + line}: {code}")
