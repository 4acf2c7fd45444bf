"""Backward passes in a thread of their own, as those of a GPU's tensors run."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from gradlib.private import backward_pass_id, next_sequence_number


@contextmanager
def passes_elsewhere(behind: int = 0, ahead: int = 0) -> Iterator[None]:
    """Have backward passes run in another thread, which counts nodes for itself.

    Args:
        behind: By how many nodes at least it is behind this one.
        ahead: By how many it is ahead.
    """
    real: Any = torch.autograd.graph._engine_run_backward

    def run(*args: Any, **how: Any) -> Any:
        if backward_pass_id() != -1:  # it is there already
            return real(*args, **how)
        return pool.submit(real, *args, **how).result()

    make_nodes(behind)
    with ThreadPoolExecutor(1) as pool, pytest.MonkeyPatch.context() as patch:
        pool.submit(make_nodes, next_sequence_number() + ahead if ahead else 0).result()
        patch.setattr(torch.autograd.graph, "_engine_run_backward", run)
        patch.setattr(torch.autograd, "_engine_run_backward", run)
        patch.setattr("gradlib.private._BEGINS_PASSES", run.__code__)
        patch.setattr("gradlib.recorder.graph.is_passed_elsewhere", lambda _: True)
        yield


def make_nodes(count: int) -> None:
    """Have this thread make so many nodes."""
    x = torch.ones((), requires_grad=True, device="cpu")
    for _ in range(count):
        x.view_as(x)
