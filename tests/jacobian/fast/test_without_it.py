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
    assert gradlib.jacobian.faster.find_in_call("a") is None
    assert gradlib.jacobian.faster.find_in_graph("a", "b") is None
"""
ANSWERS = Path("tests", "jacobian")
FILES = ("test_finite.py", "test_drawing.py")
"""It answers most of their tests. All that it answers run without it, by `conftest`."""


def test_every_answer_is_the_same_where_it_is_gone(tmp_path: Path) -> None:
    shutil.copytree(
        ROOT / "gradlib",
        tmp_path / "gradlib",
        ignore=lambda folder, _: ["fast"] if Path(folder) == FAST.parent else [],
    )
    assert not (tmp_path / FAST.relative_to(ROOT)).exists()
    (tmp_path / ANSWERS).mkdir(parents=True)
    (tmp_path / ANSWERS / "test_it_is_gone.py").write_text(IT_IS_GONE)
    answers = [str(ANSWERS / it) for it in FILES]
    shared = ("tests/conftest.py", "tests/made_once.py")
    for name in ("pyproject.toml", *shared, *answers):
        shutil.copy(ROOT / name, tmp_path / name)
    run = ("-m", "pytest", "-q", "-n0", "-x", "-m", "not of_fast", str(ANSWERS))
    env = dict(os.environ)
    if env.pop("GRADLIB_STAND_IN_CUDA", None):  # comes before torch, which is there
        env.pop("GRADLIB_TEST_DEVICE", None)
    done = fresh.run(*run, folder=tmp_path, env=env)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-1000:]


@pytest.mark.parametrize("mode", ["reverse", "forward", "split", "loop"])
def test_it_has_no_say_where_a_mode_is_named(
    mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def look(*_: object) -> None:
        raise AssertionError("it was asked")

    for name in ("chain_of", "plain_net"):
        monkeypatch.setattr(f"gradlib.jacobian.fast.chains.find.{name}", look)
    monkeypatch.setattr("gradlib.jacobian.compute.find_in_graph", look)
    monkeypatch.setattr("gradlib.jacobian.plan_jacobian.find_in_graph", look)
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
