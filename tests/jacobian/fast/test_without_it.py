"""Without the folder that only makes it faster, every answer is the same."""

import os
import shutil
from pathlib import Path

from mkdocs_hooks import fresh

ROOT = Path(__file__).parents[3]
ANSWERS = ("test_jacobian_properties.py", "test_jacobian_failures.py")
IT_IS_GONE = """
import gradlib.jacobian.faster


def test_it_is_gone() -> None:
    assert gradlib.jacobian.faster.find_chain("a") is None
"""


def test_every_answer_is_the_same_without_it(tmp_path: Path) -> None:
    fast = ROOT / "gradlib" / "jacobian" / "fast"
    assert fast.is_dir()
    shutil.copytree(
        ROOT / "gradlib",
        tmp_path / "gradlib",
        ignore=lambda folder, _: ["fast"] if Path(folder) == fast.parent else [],
    )
    assert not (tmp_path / fast.relative_to(ROOT)).exists()
    tests = tmp_path / "tests" / "jacobian"
    tests.mkdir(parents=True)
    (tests / "test_it_is_gone.py").write_text(IT_IS_GONE)
    for name in ANSWERS:
        shutil.copy(ROOT / "tests" / "jacobian" / name, tests)
    for name in ("pyproject.toml", "tests/conftest.py"):
        shutil.copy(ROOT / name, tmp_path / name)
    done = fresh.run(
        "-m", "pytest", "-q", "-n0", "-x", str(tests), folder=tmp_path, env=os.environ
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-1000:]
