"""What the nodes of a graph can do."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import Node

from gradlib.jacobian.graph import Graph
from gradlib.private import forms_at
from gradlib.vjp.connection import place_of


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
    for node in in_order(starts_of(graph)):
        name = node.name()
        convolution = convolution or "Convolution" in name
        if isinstance(node, BackwardCFunction):
            python = name
    return Nodes(convolution, python)


def narrowest_dtype(graph: Graph) -> torch.dtype:
    """Return the narrowest floating dtype that gradients have on their way."""
    found = {it.dtype for it in (*graph.roots, *graph.points)}
    for node in in_order(starts_of(graph)):
        found |= {form.dtype for form in forms_at(node) or ()}
    return min((it for it in found if it.is_floating_point), key=lambda it: it.itemsize)


def starts_of(graph: Graph) -> list[Node]:
    """Return the nodes that made the outputs."""
    return [place_of(root)[0] for root in graph.roots]


def on_the_way(starts: Sequence[Node], ends: set[Node]) -> set[Node]:
    """Return the nodes below some from which an end can be reached."""
    on_way = set(ends)
    for node in reversed(in_order(starts)):
        if any(before in on_way for before, _ in node.next_functions):
            on_way.add(node)
    return on_way


def in_order(starts: Sequence[Node], among: set[Node] | None = None) -> list[Node]:
    """Return the nodes below some, each before those that it leads to.

    Args:
        starts: Where to begin.
        among: The only ones to look at; ``None`` for all.
    """
    done: list[Node] = []
    seen: set[Node] = set()
    stack = [(start, False) for start in starts]
    while stack:
        node, left = stack.pop()
        if left:
            done.append(node)
        elif node not in seen:
            seen.add(node)
            stack.append((node, True))
            stack += [
                (before, False)
                for before, _ in node.next_functions
                if before is not None
                and before not in seen
                and (among is None or before in among)
            ]
    return done[::-1]
