"""Without the folder that only makes it faster, every answer is the same."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[3]
ANSWERS = ("test_jacobian_properties.py", "test_jacobian_failures.py")


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
    for name in ANSWERS:
        shutil.copy(ROOT / "tests" / "jacobian" / name, tests)
    for name in ("pyproject.toml", "tests/conftest.py"):
        shutil.copy(ROOT / name, tmp_path / name)
    look = "import gradlib.jacobian.faster as it; assert it.find_chain('a') is None"
    environment = os.environ | {"PYTHONPATH": str(tmp_path)}
    for command in (["-c", look], ["-m", "pytest", "-q", "-n0", "-x", str(tests)]):
        done = subprocess.run(
            [sys.executable, *command],
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            encoding="utf-8",
        )
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-1000:]
