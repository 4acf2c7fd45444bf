"""The edges of autograd's graph: where gradients flow."""

from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any, TypeAlias, cast

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge

from gradlib.errors import NotDifferentiableArgumentError
from gradlib.private.modes import no_function_modes
from gradlib.private.nodes import is_reentrant_checkpoint, leaf_of

Differentiable: TypeAlias = Tensor | GradientEdge
"""What autograd can differentiate, or differentiate with respect to."""

Edge: TypeAlias = tuple[Node, int]
"""Where a gradient arrives: a node, and the number of its operation's output."""


def edge_of(given: Differentiable) -> Edge:
    """Return the edge where the gradient of `given` arrives.

    Raises:
        NotDifferentiableArgumentError: Autograd records nothing here.
    """
    if isinstance(given, GradientEdge):
        return given.node, given.output_nr
    if given.grad_fn is not None:
        return given.grad_fn, given.output_nr
    return _accumulator(given), given.output_nr


def edges_of(node: Node) -> list[Edge]:
    """Return the edges to which a node passes the gradients it computes."""
    edges: tuple[Any, ...] = node.next_functions
    return [it for it in edges if it[0] is not None]


def edges_behind(starts: Iterable[Edge]) -> Iterator[Edge]:
    """Yield `starts` and all edges behind them, each once, the nearest first."""
    seen = dict.fromkeys(starts)
    waiting = deque(seen)
    asked: set[Node] = set()
    while waiting:
        edge = waiting.popleft()
        yield edge
        node = edge[0]
        if node not in asked:
            asked.add(node)
            new = [it for it in dict.fromkeys(edges_of(node)) if it not in seen]
            seen.update(dict.fromkeys(new))
            waiting += new


def nodes_behind(outputs: Iterable[Differentiable]) -> set[Node]:
    """Return the nodes of the whole graph behind `outputs`."""
    return {node for node, _ in edges_behind(map(edge_of, outputs))}


def has_reentrant_checkpoint(outputs: Iterable[Differentiable]) -> bool:
    """Tell whether a checkpoint behind `outputs` hides the edges of what it uses."""
    return any(map(is_reentrant_checkpoint, nodes_behind(outputs)))


def leaves_at(edges: Iterable[Edge]) -> list[Tensor]:
    """Return the leaves that edges lead to, each once."""
    nodes = dict.fromkeys(node for node, _ in edges)
    return [leaf for node in nodes if (leaf := leaf_of(node)) is not None]


def _accumulator(leaf: Tensor) -> Node:
    """Return the node that adds to the ``.grad`` of a leaf.

    A view made under ``no_grad()`` of what requires grad seems to be a leaf too, but
    nothing adds to its ``.grad``: its node leads nowhere, and is a new one each time.
    """
    if torch.is_inference_mode_enabled():
        with torch.inference_mode(mode=False):
            return _accumulator(leaf)
    try:
        with no_function_modes():  # a subclass would put a node of its own before it
            return get_gradient_edge(leaf).node
    except AssertionError:  # of such a view torch finds no node
        with no_function_modes(), torch.enable_grad():
            return cast(Any, leaf.view_as(leaf).grad_fn)
    except AttributeError as error:  # torch asks a view of the leaf for its grad_fn
        raise NotDifferentiableArgumentError(
            f"Autograd gives a view of the leaf of shape {list(leaf.shape)} no graph, "
            "though the leaf requires grad: it was made in torch.inference_mode(), or "
            "something that is in force around this call keeps autograd from "
            "recording, such as a mode or transform of torch.func that an earlier "
            "error left behind. Make the leaf outside of it, leave it, or begin anew."
        ) from error
    except RuntimeError:  # sparse and nested leaves have no views
        with no_function_modes(), torch.enable_grad():
            copied: Any = leaf.clone().grad_fn
        return copied.next_functions[0][0]
