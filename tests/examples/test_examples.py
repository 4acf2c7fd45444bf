"""Runs every example as a reader would: as a program, from a folder of their own."""

import os
from pathlib import Path
from subprocess import CompletedProcess

import pytest

from mkdocs_hooks import fresh

from .example_guards import misfits

ROOT = Path(__file__).parents[2]
EXAMPLES = sorted(ROOT.glob("examples/*.py"))
each_example = pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.name)


def run_program(program: Path, folder: Path) -> CompletedProcess[str]:
    """Run a program in a folder, without a screen; a warning is an error."""
    strictly = str(Path(__file__).with_name("strictly.py"))
    return fresh.run(strictly, str(program), folder=folder, env=os.environ)


def test_there_are_examples_to_run():
    assert EXAMPLES, "examples/ holds no program"


@each_example
def test_runs_as_a_program(example: Path, tmp_path: Path):
    finished = run_program(example, tmp_path)
    assert finished.returncode == 0, finished.stderr
    assert finished.stderr == ""


@each_example
def test_makes_a_good_page(example: Path):
    name = example.relative_to(ROOT).as_posix()
    findings = misfits(name, example.read_text(encoding="utf-8"))
    assert not findings, "\n".join(findings)


@pytest.mark.parametrize(
    "program",
    [
        "raise ValueError",
        "import warnings\nwarnings.warn('careful')",
        "import sys\nprint('careful', file=sys.stderr)",
        "from examples import neighbour",
    ],
)
def test_a_program_that_fails_or_complains_is_found(program: str, tmp_path: Path):
    (tmp_path / "bad.py").write_text(program)
    finished = run_program(tmp_path / "bad.py", tmp_path)
    assert finished.returncode or finished.stderr


@pytest.mark.parametrize(
    ("line", "text"),
    [
        (1, '"""A docstring."""\nx = 1\n'),
        (2, "# %%\n%matplotlib inline\n"),
        (2, "# %%\n# %timeit f()\n"),
        (2, "# %%\n!pip install x\n"),
        (2, "# %%\n%%time\nx = 1\n"),
    ],
)
def test_what_misfits_is_found(line: int, text: str):
    assert misfits("a.py", text)[0].startswith(f"a.py:{line}: ")


@pytest.mark.parametrize("last", ["ax.plot([1])", "plt.legend()", "axes[0].hist(x)"])
def test_a_cell_that_shows_an_object_is_found(last: str):
    text = f"# %%\nx = 1\n{last}\n\n# %% [markdown]\n# Text\n"
    assert misfits("a.py", text)[0].endswith(last)


def test_a_good_example_passes():
    text = "# %% [markdown]\n# # Title\n\n# %%\nax.plot([1])\nplt.show()\n"
    assert not misfits("a.py", text + '\n# %% alt="A line"\nrecording.plot()\n')
