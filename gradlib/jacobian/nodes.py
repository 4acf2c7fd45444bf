"""What the nodes of a graph can do."""

from dataclasses import dataclass

import torch
from torch.autograd.function import BackwardCFunction

from gradlib.jacobian.graph import Graph


@dataclass(frozen=True)
class Nodes:
    """What is in a graph.

    Attributes:
        convolution: Whether there is one: on a CPU batched values slow those down.
        python: The name of a node whose backward pass is somebody's Python, if there
            is one: nobody knows whether that has a graph.
        wrong_thrice: The name of a node that torch differentiates wrongly a third time,
            if there is one.
    """

    convolution: bool
    python: str | None
    wrong_thrice: str | None


# The backward pass of their backward pass takes what they have saved for constants, as
# the mean and the deviation of the input. Found by comparison with finite differences;
# tests/jacobian/test_jacobian_in_a_loss.py shows which other norms are right.
_WRONG_THRICE = (
    *("NativeLayerNorm", "NativeBatchNorm", "CudnnBatchNorm", "MiopenBatchNorm"),
    "Logcumsumexp",
)


def look(graph: Graph) -> Nodes:
    """Go through a graph once."""
    convolution, python, wrong_thrice = False, None, None
    for node in graph.way:
        name = node.name()
        convolution = convolution or "Convolution" in name
        if isinstance(node, BackwardCFunction):
            python = name
        # In evaluation the statistics of batch norm are constants.
        if name.startswith(_WRONG_THRICE) and getattr(node, "_saved_training", True):
            wrong_thrice = name
    return Nodes(convolution, python, wrong_thrice)


def narrowest_dtype(graph: Graph) -> torch.dtype:
    """Return the narrowest floating dtype that gradients have on their way."""
    found = {it.dtype for it in (*graph.points, *graph.forms.values())}
    return min((it for it in found if it.is_floating_point), key=lambda it: it.itemsize)
