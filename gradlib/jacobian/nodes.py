"""What the nodes of a graph can do."""

from collections.abc import Iterator
from dataclasses import dataclass

from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import Node

from gradlib.jacobian.graph import Graph


@dataclass(frozen=True)
class Nodes:
    """What is in a graph.

    Attributes:
        convolution: Whether there is one: those are slower with batched values.
        python: The name of a node whose backward pass is somebody's Python, if there
            is one: nobody knows whether that has a graph.
    """

    convolution: bool
    python: str | None


def look(graph: Graph) -> Nodes:
    """Go through a graph once."""
    convolution, python = False, None
    for node in _all(graph):
        name = node.name()
        convolution = convolution or "Convolution" in name
        if isinstance(node, BackwardCFunction):
            python = name
    return Nodes(convolution, python)


def _all(graph: Graph) -> Iterator[Node]:
    stack = [root.grad_fn for root in graph.roots]
    seen = set(stack)
    while stack:
        node = stack.pop()
        if node is None:
            continue
        yield node
        new = {before for before, _ in node.next_functions} - seen
        seen |= new
        stack += new
