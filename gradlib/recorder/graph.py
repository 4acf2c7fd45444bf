"""The part of the autograd graph that one module call made."""

from collections.abc import Container
from typing import Any, TypeAlias

from torch import Tensor
from torch.autograd.graph import Node

from gradlib.private import (
    AccumulateGrad,
    CopySlices,
    ToCopy,
    leaf_of,
    sequence_number,
)

Edge: TypeAlias = tuple[Node, int]
"""Where a gradient goes: a node, and which of that node's outputs it belongs to."""

GraphEdge: TypeAlias = tuple[Node, int, Edge, Tensor | None]
"""A node, which of the gradients it computes is meant, where that one flows, and the
leaf it ends in, where it does."""


def leaving_edges(
    roots: list[Node], since: int, ends: Container[object], seen: set[Node]
) -> list[GraphEdge]:
    """Walk the nodes made since a call began, and return the edges that lead out.

    Args:
        roots: Where to begin: the nodes of whatever the call made.
        since: autograd's sequence number when the call began. Older nodes were made
            by others.
        ends: The edges of the call's inputs: these lead out whatever their number is,
            which another thread may have given.
        seen: The nodes walked already; this walk's are added.

    Returns:
        The edges into leaves, older nodes and `ends`. The cast of a leaf counts as the
        leaf: autocast shares it between calls, so it belongs to none of them.
    """
    found: list[GraphEdge] = []
    node: Any
    stack = [root for root in roots if sequence_number(root) >= since]
    while stack:
        node = stack.pop()
        if node in seen:
            continue
        seen.add(node)
        for entry, edge in enumerate(node.next_functions):
            target = edge[0]
            if target is None:
                continue
            kind = target.__class__
            leaf: Tensor | None = None
            if kind is AccumulateGrad:
                leaf = target.variable
            elif kind is ToCopy:
                leaf = _leaf_behind(target)
            if leaf is not None or sequence_number(target) < since or edge in ends:
                found.append((node, entry, edge, leaf))
            else:
                stack.append(target)
    return found


def overwriting(base: Tensor, end: Edge) -> list[Node]:
    """Return the nodes through which views of a tensor were overwritten.

    Args:
        base: The tensor, as it is now.
        end: Where its gradient went when it was not overwritten yet.
    """
    found: list[Node] = []
    seen: set[Node] = set()
    stack = [base.grad_fn]
    while stack:
        node = stack.pop()
        if (
            node is None
            or node in seen
            or sequence_number(node) < sequence_number(end[0])
        ):
            continue
        seen.add(node)
        edges = node.next_functions
        if type(node) is CopySlices and edges[0] == end:
            found.append(node)
        stack += [target for target, _ in edges]
    return found


def _leaf_behind(node: Node) -> Tensor | None:
    """Return the leaf that `node` casts, or ``None``."""
    target = node.next_functions[0][0]
    return None if target is None else leaf_of(target)
