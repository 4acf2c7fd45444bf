"""Backward passes in a thread of their own, as those of a GPU's tensors run."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from gradlib.private.nodes import next_sequence_number
from gradlib.private.passes import backward_pass_id

POOL = ThreadPoolExecutor(1)
"""One thread for all, as a device has: what it counts it would have to count again."""


@contextmanager
def passes_elsewhere(behind: int = 0, ahead: int = 0) -> Iterator[None]:
    """Have backward passes run in another thread, which counts nodes for itself.

    Args:
        behind: By how many nodes at least it is behind this one.
        ahead: By how many it is ahead.
    """
    real: Any = torch.autograd.graph._engine_run_backward

    def run(t_outputs: Any, *args: Any, **how: Any) -> Any:  # named as torch names it
        if backward_pass_id() != -1:  # it is there already
            return real(t_outputs, *args, **how)
        return POOL.submit(real, t_outputs, *args, **how).result()

    there = POOL.submit(next_sequence_number).result()
    make_nodes(there + behind - next_sequence_number())
    if ahead:
        POOL.submit(make_nodes, next_sequence_number() + ahead - there).result()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.autograd.graph, "_engine_run_backward", run)
        patch.setattr(torch.autograd, "_engine_run_backward", run)
        patch.setattr("gradlib.private.passes._BEGINS_PASSES", run.__code__)
        patch.setattr(
            "gradlib.recorder.forward_graph.is_passed_elsewhere", lambda _: True
        )
        patch.setattr("gradlib.recorder.forward_graph.has_accelerator", lambda: True)
        yield


def make_nodes(count: int) -> None:
    """Have this thread make so many nodes."""
    x = torch.ones((), requires_grad=True, device="cpu")
    for _ in range(count):
        x.view_as(x)
