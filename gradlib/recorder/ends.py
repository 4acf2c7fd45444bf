"""Where gradients go: the edges of the graph, and the leaves."""

from typing import TypeAlias

from torch import Tensor
from torch.autograd.graph import Node

from gradlib.edges import Edge
from gradlib.private.nodes import leaf_of

End: TypeAlias = Edge | int
"""Where a gradient goes: an edge of the graph, or the id of a leaf."""

NumberedEnd: TypeAlias = tuple[int, int] | int
"""An `End` that holds no node, but the node's sequence number."""


def end_of(tensor: Tensor) -> End:
    """Return where the gradient of `tensor` goes."""
    node = tensor.grad_fn
    return id(tensor) if node is None else (node, tensor.output_nr)


def leaf_behind(node: Node) -> Tensor | None:
    """Return the leaf that `node` casts, or ``None``."""
    target = node.next_functions[0][0]
    return None if target is None else leaf_of(target)
