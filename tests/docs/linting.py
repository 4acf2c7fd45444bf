"""The style of a block: what ruff finds, and how ruff would format it."""

import subprocess

from pytest_examples import CodeExample
from pytest_examples.config import ExamplesConfig
from pytest_examples.lint import FormatError, ruff_check
from ruff import find_ruff_bin

from .differing import difference
from .printing import without_printed

# 80 columns fit a page without a scroll bar; the `#>` lines are the terminal's own.
LINE_LENGTH = 80

# Few rules, as every block is a small program of its own that imports and prints.
RULES = {
    "F": "a name that is undefined, an import that is not used",
    "E4": "imports at the top, where a reader looks for them",
    "E7": "bare except, lambdas with a name, comparison to None",
    "B018": "a bare expression shows nothing when run as a program: print it",
    "I": "imports in one order everywhere",
    "UP": "nothing that today's Python writes more simply",
}


def lint(block: CodeExample) -> str:
    """What is to be mended in a block, or an empty text."""
    return _check(block) or _format(block)


def _check(block: CodeExample) -> str:
    options = (
        "--isolated",  # neither the project's rules nor the user's
        "--output-format=concise",  # the one pytest-examples finds line numbers in
        f"--select={','.join(RULES)}",
    )
    config = ExamplesConfig(target_version="py311")
    try:
        ruff_check(block, config, extra_ruff_args=options)
    except FormatError as error:
        return str(error)
    return ""


def _format(block: CodeExample) -> str:
    source = without_printed(block.source)
    # Not as a module of Python, which would take longer to start than to format.
    command = [find_ruff_bin(), "format", "--isolated", "-"]
    options = [f"--line-length={LINE_LENGTH}", "--target-version=py311"]
    ruff = subprocess.run(
        [*command, *options], input=source, capture_output=True, encoding="utf-8"
    )
    if ruff.returncode:
        return ruff.stderr
    if ruff.stdout == source:
        return ""
    return f"ruff would format it so:\n{difference(source, ruff.stdout)}"
