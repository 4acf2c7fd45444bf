"""The part of the autograd graph that one module call made."""

from collections.abc import Iterable, Iterator, Mapping
from typing import TypeAlias, TypeVar

from torch import Tensor
from torch.autograd.graph import Node

from gradlib.private import sequence_number

Edge: TypeAlias = tuple[Node, int]
"""Where a gradient goes: a node, and which of that node's outputs it belongs to."""

CAST = "ToCopyBackward0"  # the node of Tensor.to() and of autocast's casts

Label = TypeVar("Label")


def edges_into(
    roots: Iterable[Node],
    *,
    parameters: Mapping[Tensor, Label],
    edges: Mapping[Edge, Label],
    since: int,
) -> Iterator[tuple[Node, int, Label]]:
    """Find where a call's graph hands gradients to what the call was given.

    Args:
        roots: The ``grad_fn`` of each output of the call.
        parameters: The leaf tensors looked for, each with a label.
        edges: The other edges looked for, each with a label.
        since: autograd's sequence number when the call began, to tell its own nodes
            from older ones. Of those only casts count, as autocast reuses the cast that
            an earlier call made of a weight.

    Yields:
        ``(node, i, label)``: entry `i` of the gradients `node` computes flows into what
        `label` stands for.
    """
    seen: set[Node] = set()
    stack = list(roots)
    while stack:
        node = stack.pop()
        if node in seen:
            continue
        seen.add(node)
        if sequence_number(node) < since and node.name() != CAST:
            continue
        for i, (target, number) in enumerate(node.next_functions):
            if target is None:
                continue
            leaf: Tensor | None = getattr(target, "variable", None)
            if leaf is not None and leaf in parameters:
                yield node, i, parameters[leaf]
            elif (target, number) in edges:
                yield node, i, edges[target, number]
            else:
                stack.append(target)
