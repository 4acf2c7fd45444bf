"""Without the folder that only makes it faster, every answer is the same."""

import os
import shutil
from pathlib import Path

import pytest
import torch
from torch import nn

import gradlib
from mkdocs_hooks import fresh

ROOT = Path(__file__).parents[3]
FAST = ROOT / "gradlib" / "jacobian" / "fast"
IT_IS_GONE = """
import gradlib.jacobian.faster


def test_it_is_gone() -> None:
    assert gradlib.jacobian.faster.find_shorter("a") is None
"""
# With the folder, too, it has no say where a mode is named: see the test below. And
# what is different with it alone has a test that says so.
WHERE_IT_HAD_A_SAY = """
def pytest_collection_modifyitems(items):
    named = {"reverse", "forward", "split", "loop"}
    items[:] = [
        it
        for it in items
        if not hasattr(it, "callspec") or it.callspec.params.get("mode") not in named
        if not it.name.startswith("test_they_would_differ")
    ]
"""
ANSWERS = ROOT / "tests" / "jacobian"
# Of plans and memory, and of the folder's own parts.
NO_ANSWERS = {"test_jacobian_memory.py", "test_jacobian_on_devices.py"}
# Together they take as long as all others.
LARGEST = {"test_coupled_samples.py", "test_good_calls.py"}
OTHERS = {it.name for it in ANSWERS.glob("test_*.py")} - NO_ANSWERS - LARGEST
HELPERS = {it.name for it in ANSWERS.glob("*.py")} - OTHERS - NO_ANSWERS - LARGEST


@pytest.fixture(scope="module")
def without_it(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the project in which the folder is not."""
    project = tmp_path_factory.mktemp("without")
    shutil.copytree(
        ROOT / "gradlib",
        project / "gradlib",
        ignore=lambda folder, _: ["fast"] if Path(folder) == FAST.parent else [],
    )
    assert not (project / FAST.relative_to(ROOT)).exists()
    tests = project / "tests" / "jacobian"
    tests.mkdir(parents=True)
    (tests / "test_it_is_gone.py").write_text(IT_IS_GONE)
    (tests / "conftest.py").write_text(WHERE_IT_HAD_A_SAY)
    for name in ("pyproject.toml", "tests/conftest.py", "tests/one_way.py"):
        shutil.copy(ROOT / name, project / name)
    for name in OTHERS | LARGEST | HELPERS:
        shutil.copy(ANSWERS / name, tests / name)
    return project


@pytest.mark.parametrize("files", [LARGEST, OTHERS], ids=["largest", "others"])
def test_every_answer_is_the_same_without_it(without_it: Path, files: set[str]) -> None:
    paths = [f"tests/jacobian/{it}" for it in ("test_it_is_gone.py", *sorted(files))]
    run = ("-m", "pytest", "-q", "-n0", "-x", *paths)
    done = fresh.run(*run, folder=without_it, env=os.environ)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-1000:]


@pytest.mark.parametrize("mode", ["reverse", "forward", "split", "loop"])
def test_it_has_no_say_where_a_mode_is_named(
    mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def look(*_: object) -> None:
        raise AssertionError("it was asked")

    for name in ("chain_of", "plain_net"):
        monkeypatch.setattr(f"gradlib.jacobian.fast.chains.find.{name}", look)
    monkeypatch.setattr("gradlib.jacobian.fast.door.find_in_graph", look)
    model, x = (
        nn.Sequential(nn.Linear(4, 2), nn.Tanh(), nn.Linear(2, 4)),
        torch.ones(3, 4),
    )
    gradlib.per_sample_jacobian(model, x, mode=mode)
    gradlib.plan_jacobian(model, x, mode=mode)
    for ask in (gradlib.per_sample_jacobian, gradlib.plan_jacobian):
        for fn in (model, model.forward):
            with pytest.raises(AssertionError, match="it was asked"):
                ask(fn, x)
