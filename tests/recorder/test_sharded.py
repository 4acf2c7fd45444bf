"""Models that are sharded over two processes, each with data of its own."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

PROGRAM = Path(__file__).with_name("sharded.py")
ROOT = Path(__file__).parents[2]
ON_A_CPU = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
"""Else torch would take a GPU, which the two cannot share."""


@pytest.mark.cpu
@pytest.mark.skipif(not hasattr(os, "fork"), reason="one process forks the other")
@pytest.mark.skipif(
    not (torch.distributed.is_available() and torch.distributed.is_gloo_available()),
    reason="this torch has no gloo, by which two processes without a GPU talk",
)
def test_models_in_two_processes(tmp_path: Path) -> None:
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-W", "ignore", str(PROGRAM), str(tmp_path / "store")],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": path, **ON_A_CPU},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stdout
