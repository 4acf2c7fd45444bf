"""What is shown below each cell of an example, and that each run begins anew."""

import os
import random
import sys
from pathlib import Path

import numpy
import pytest
import torch

from mkdocs_hooks import fresh
from mkdocs_hooks.run_code import outputs_of

WARNS = """import sys
import warnings

import torch

print("printed")
print("complains", file=sys.stderr)
warnings.warn("careful")
"""
DRAWS = """import matplotlib.pyplot as plt

print("before")
plt.plot([0, 1])
plt.show()
print("after")
plt.plot([1, 0])
x
"""
DEFINES = """import os
import pickle
from dataclasses import dataclass

@dataclass
class Point:
    place: int

os.write(1, b"past Python")
x = pickle.loads(pickle.dumps(Point(3)))
None
"""
TABLE = """class Table:
    def _repr_html_(self):
        return "<table></table>"

Table()
"""
FIGURE = """from matplotlib.figure import Figure

figure = Figure()
figure
"""


def test_what_cells_print_show_and_return(tmp_path: Path) -> None:
    codes = (WARNS, DEFINES, DRAWS, TABLE, FIGURE, "")
    cells = [(code, 100 * line) for line, code in enumerate(codes, 1)]
    warns, defines, draws, table, figure, empty = fresh.call(
        outputs_of, cells, "some.py", folder=tmp_path
    )
    assert warns[0] == ("stdout", "printed\n")
    kind, text = warns[1]
    assert kind == "stderr"
    assert text.startswith("complains\nsome.py:107: UserWarning: careful")
    assert defines == [("stdout", "past Python")]
    kinds = [kind for kind, _ in draws]
    assert kinds == ["stdout", "svg", "stdout", "text", "svg"]
    assert [draws[i][1] for i in (0, 2, 3)] == ["before\n", "after\n", "Point(place=3)"]
    assert table == [("html", "<table></table>")]
    assert [kind for kind, _ in figure] == ["svg"]
    assert empty == []


def end() -> None:
    os._exit(3)


def leave_something() -> tuple[str | None, bool, int, float, float]:
    left, imported = os.environ.get("LEFT"), "gradlib" in sys.modules
    os.environ["LEFT"] = "behind"
    seed, number = torch.initial_seed(), float(numpy.random.rand())
    return left, imported, seed, number, random.random()


def test_each_call_begins_anew(tmp_path: Path) -> None:
    one, other = (fresh.call(leave_something, folder=tmp_path) for _ in range(2))
    assert one[:2] == other[:2] == (None, False)  # mkdocs serve sees gradlib's edits
    assert all(a != b for a, b in zip(one[2:], other[2:], strict=True))


def test_what_fails_says_how(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match=r"in <module>\n.*SystemExit: oh"):
        fresh.call(outputs_of, [("raise SystemExit('oh')", 1)], "x", folder=tmp_path)
    with pytest.raises(RuntimeError, match="terminated abruptly"):
        fresh.call(end, folder=tmp_path)


@pytest.mark.parametrize(
    ("code", "status", "err"),
    [
        ("print(__name__, sys.argv[1])", 0, ""),
        ("sys.exit()", 0, ""),
        ("sys.exit(3)", 3, ""),
        ("sys.exit('oh')", 1, "oh\n"),
    ],
)
def test_a_program_ends_as_python_ends_it(
    tmp_path: Path, code: str, status: int, err: str
) -> None:
    (tmp_path / "program.py").write_text(f"import sys\n{code}\n")
    done = fresh.run("program.py", "given", folder=tmp_path, env={})
    assert (done.returncode, done.stderr) == (status, err)
    assert done.stdout == ("__main__ given\n" if "print" in code else "")
