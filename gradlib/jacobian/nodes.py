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
        wrong_without_graph: Whether torch goes wrong for a node where the pass itself
            has no graph.
        wrong_at_once: The name of a node that torch goes wrong for where several
            vectors go back at once, if there is one.
        wrong_at_once_twice: The same where they have a graph, to go back through.
        wrong_twice: The name of a node that torch differentiates wrongly a second time,
            if there is one.
        wrong_thrice: The same for a third time.
    """

    convolution: bool
    python: str | None = None
    wrong_without_graph: bool = False
    wrong_at_once: str | None = None
    wrong_at_once_twice: str | None = None
    wrong_twice: str | None = None
    wrong_thrice: str | None = None


# All of these were found by comparison, with single vectors and finite differences, and
# tests/jacobian/test_jacobian_where_torch_is_wrong.py holds them against these.

# Of a singular matrix the gradient is not zero; where it is to be gone back through it
# is computed in another way.
_WRONG_WITHOUT_GRAPH = "LinalgDet"
# vmap of its backward pass, alone too.
_WRONG_AT_ONCE = "Cdist"
# The first is fused: the formula that has a graph of its own is another. The second
# takes the logarithm of gradients, which may be zero.
_WRONG_TWICE = ("WeightNormInterface", "Logcumsumexp")
# The backward pass of their backward pass takes what they have saved for constants, as
# the mean and the deviation of the input. tests/jacobian/test_jacobian_in_a_loss.py
# shows which other norms are right. Under vmap already that of the gradient of their
# weights does.
_NORMS = (
    *("NativeLayerNorm", "NativeBatchNorm", "CudnnBatchNorm", "MiopenBatchNorm"),
    "BatchNormWithUpdate",
)
_WRONG_THRICE = _NORMS


def look(graph: Graph) -> Nodes:
    """Go through a graph once."""
    convolution = wrong_without_graph = False
    found: dict[str, str] = {}
    for node, led in graph.way.items():
        name = node.name()
        convolution = convolution or "Convolution" in name
        if isinstance(node, BackwardCFunction):
            found["python"] = name
        if name.startswith(_WRONG_WITHOUT_GRAPH):
            wrong_without_graph = True
        if name.startswith(_WRONG_AT_ONCE):
            found["wrong_at_once"] = name
        if name.startswith(_WRONG_TWICE):
            found["wrong_twice"] = name
        # In evaluation the statistics of batch norm are constants.
        if name.startswith(_WRONG_THRICE) and getattr(node, "_saved_training", True):
            found["wrong_thrice"] = name
            # The first is its input; are its weights asked for?
            if not set(led).isdisjoint(node.next_functions[1:]):
                found["wrong_at_once_twice"] = name
    return Nodes(convolution, wrong_without_graph=wrong_without_graph, **found)


def narrowest_dtype(graph: Graph) -> torch.dtype:
    """Return the narrowest floating dtype that gradients have on their way."""
    found = {it.dtype for it in (*graph.points, *graph.forms.values())}
    return min((it for it in found if it.is_floating_point), key=lambda it: it.itemsize)
