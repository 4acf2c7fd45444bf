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
    """

    convolution: bool
    python: str | None


def look(graph: Graph) -> Nodes:
    """Go through a graph once."""
    convolution, python = False, None
    for node in graph.way:
        name = node.name()
        convolution = convolution or "Convolution" in name
        if isinstance(node, BackwardCFunction):
            python = name
    return Nodes(convolution, python)


def narrowest_dtype(graph: Graph) -> torch.dtype:
    """Return the narrowest floating dtype that gradients have on their way."""
    found = {it.dtype for it in (*graph.points, *graph.forms.values())}
    return min((it for it in found if it.is_floating_point), key=lambda it: it.itemsize)
