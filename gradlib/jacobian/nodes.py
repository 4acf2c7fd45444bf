"""What the nodes of a graph can do."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import Node

from gradlib.jacobian.graph import Graph
from gradlib.private import forms_at
from gradlib.vjp.connection import Place, place_of


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
        found |= {form.dtype for form in forms_at(node)}
    return min((it for it in found if it.is_floating_point), key=lambda it: it.itemsize)


def starts_of(graph: Graph) -> list[Node]:
    """Return the nodes that made the outputs."""
    return [place_of(root)[0] for root in graph.roots]


def between(starts: Sequence[Node], ends: set[Node]) -> dict[Node, list[Place]]:
    """Return the nodes below some from which an end can be reached.

    Returns:
        Each before those that it leads to, and the places among them that it leads to.
    """
    found: dict[Node, list[Place]] = {}
    for node, places in reversed(_below(starts).items()):
        led = [place for place in places if place[0] in found]
        if led or node in ends:
            found[node] = led
    return dict(reversed(found.items()))


def in_order(starts: Sequence[Node]) -> list[Node]:
    """Return the nodes below some, each before those that it leads to."""
    return list(_below(starts))


def _below(starts: Sequence[Node]) -> dict[Node, list[Place]]:
    """Return the nodes below some in order, and the places that each leads to.

    What a node leads to is made anew whenever it is asked, so it is asked once.
    """
    done: list[Node] = []
    seen: dict[Node, list[Place]] = {}
    stack = [(start, False) for start in starts]
    while stack:
        node, left = stack.pop()
        if left:
            done.append(node)
        elif node not in seen:
            places: Any = [it for it in node.next_functions if it[0] is not None]
            seen[node] = places
            stack.append((node, True))
            stack += [(before, False) for before, _ in places if before not in seen]
    return {node: seen[node] for node in reversed(done)}
