"""How many multiply-adds each way takes: counted, not guessed."""

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
    """One that does not ask which module does it.

    It would set hooks on tensors of modules that a backward of one's own calls, and
    torch allows none of these there.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.mod_tracker = cast(Any, _Nobody())


class _Nobody(nullcontext[None]):
    """Says of all that it is done in no module."""

    parents = ("Global",)


def count(graph: Graph, counts: dict[str, int | str]) -> dict[str, int]:
    """Return the multiply-adds of each way that can be taken.

    One pass is run for each part, and what torch multiplies meanwhile is counted:
    products of matrices, convolutions and attention, as everybody counts them.

    Args:
        graph: What the Jacobian is of.
        counts: How many rows or columns each way asks for.
    """
    roots, points = graph.roots, list(graph.points)
    once = of_pass(roots, points, [torch.ones_like(it) for it in roots])
    found = {
        mode: rows * once
        for mode, rows in counts.items()
        if isinstance(rows, int) and mode != "split"
    }
    is_split = isinstance(counts["split"], int)
    if is_split and (cut := split.find(graph)) is not None:
        h = torch.ones(cut.shape, dtype=cut.dtype, device=cut.device)
        entries = sum(map(graph.columns, range(len(points))))
        product = graph.batch * graph.rows(0) * cut.width * entries
        parts = of_pass(roots, [cut.edge], [torch.ones_like(roots[0])])
        parts += of_pass([cut.edge], points, [h])
        found["split"] = cut.width * parts + product
    return found


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
