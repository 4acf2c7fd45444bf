"""Counts the multiply-adds that each mode takes."""

from contextlib import nullcontext
from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge
from torch.utils.flop_counter import FlopCounterMode

from gradlib.jacobian import split
from gradlib.jacobian.graph import Graph
from gradlib.jacobian.zeros import ZerosWrittenOut


class _Counter(FlopCounterMode):
    """Counts without tracking modules.

    Tracking sets hooks on the tensors of modules, also of those that a custom backward
    calls, where torch allows none.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.mod_tracker = cast(Any, _NoModule())


class _NoModule(nullcontext[None]):
    """Stands for the module tracker, and names no module."""

    parents = ("Global",)


def count(graph: Graph, counts: dict[str, int | str]) -> dict[str, int]:
    """Return the multiply-adds of each mode that can be taken.

    One backward pass is run for each part, in which torch's flop counter counts matrix
    products, convolutions and attention.

    Args:
        graph: The graph of the forward pass.
        counts: Each mode's rows or columns, or why it is out.
    """
    roots, points = graph.roots, list(graph.points)
    once = of_pass(roots, points, [torch.ones_like(it) for it in roots])
    totals = {
        mode: rows * once
        for mode, rows in counts.items()
        if isinstance(rows, int) and mode != "split"
    }
    if isinstance(counts["split"], int):
        cut = split.require(graph)
        h = torch.ones(cut.shape, dtype=cut.dtype, device=cut.device)
        entries = sum(map(graph.columns, range(len(points))))
        product = graph.batch * graph.rows(0) * cut.width * entries
        parts = of_pass(roots, [cut.edge], [torch.ones_like(roots[0])])
        parts += of_pass([cut.edge], points, [h])
        totals["split"] = cut.width * parts + product
    return totals


def of_pass(
    outputs: list[Tensor] | list[GradientEdge],
    inputs: list[Tensor] | list[GradientEdge],
    vectors: list[Tensor],
) -> int:
    """Return the multiply-adds of a backward pass."""
    with _Counter(display=False) as counter, ZerosWrittenOut():
        torch.autograd.grad(
            outputs, inputs, vectors, retain_graph=True, allow_unused=True
        )
    return counter.get_total_flops() // 2
