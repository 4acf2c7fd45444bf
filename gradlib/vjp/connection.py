"""Which tensors the graph behind an output leads to."""

from collections.abc import Iterable, Sequence
from typing import Any

from torch import Tensor
from torch.autograd.graph import GradientEdge, Node

from gradlib.edges import Differentiable, Edge, edge_of
from gradlib.private.nodes import AccumulateGrad, leaf_of

LEAF = "{} is a leaf: nothing leads from it to another tensor."
LEADS_NOWHERE = (
    "torch.tensor(...) makes a leaf of numbers, whatever these were computed from. "
    "torch.stack(losses) keeps their graph, and so do sums and means of tensors."
)


def is_made_anew(output: object, inputs: Sequence[object]) -> bool:
    """Tell whether an output is a leaf that requires grad, and is no input itself."""
    is_leaf = isinstance(output, Tensor) and output.is_leaf and output.requires_grad
    edges = (leaf_of(it.node) for it in inputs if isinstance(it, GradientEdge))
    return is_leaf and not any(it is output for it in (*inputs, *edges))


def unconnected(
    outputs: Iterable[Differentiable], inputs: Sequence[Differentiable]
) -> list[int]:
    """Return the positions of the inputs that the graph behind `outputs` lacks.

    This runs before every good call that allows no unused input, so it stops once
    every input is found, and compares leaves without making edges of them.
    """
    keys = [_key(it) for it in inputs]
    leaves = {key for key in keys if isinstance(key, int)}
    edges = {key for key in keys if not isinstance(key, int)}
    stack: list[Any] = []
    for output in outputs:
        key = _key(output)
        if isinstance(key, int):
            leaves.discard(key)
        else:
            edges.discard(key)
            stack.append(key[0])
    seen: set[Node] = set()
    while stack and (leaves or edges):
        node = stack.pop()
        if node in seen:
            continue
        seen.add(node)
        for edge in node.next_functions:
            target: Any = edge[0]
            if target.__class__ is AccumulateGrad:
                leaves.discard(id(target.variable))
            elif target is not None:
                stack.append(target)
                if edges:
                    edges.discard(edge)
    missing = leaves | edges
    return [i for i, key in enumerate(keys) if key in missing]


def is_at(tensor: Tensor, edge: Edge) -> bool:
    """Tell whether the gradient of `tensor` flows through `edge`."""
    leaf = leaf_of(edge[0])
    if leaf is not None:
        return tensor is leaf
    return tensor.grad_fn is edge[0] and tensor.output_nr == edge[1]


def _key(given: Differentiable) -> int | Edge:
    """Return what identifies an input: its edge, or for a leaf the id of the tensor."""
    if isinstance(given, GradientEdge):
        leaf = leaf_of(given.node)
        return edge_of(given) if leaf is None else id(leaf)
    return id(given) if given.grad_fn is None else edge_of(given)
