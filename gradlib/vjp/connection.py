"""Which tensors the graph behind an output leads to."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge

from gradlib.errors import NotDifferentiableArgumentError
from gradlib.private import AccumulateGrad, leaf_of, no_function_modes

Differentiable: TypeAlias = Tensor | GradientEdge

Place: TypeAlias = tuple[Node, int]
"""Where a gradient comes in: a node, and which of its operation's outputs."""


def place_of(given: Differentiable) -> Place:
    """Return where in the graph the gradient of a tensor comes in.

    Raises:
        NotDifferentiableArgumentError: Autograd records nothing here.
    """
    if isinstance(given, GradientEdge):
        return given.node, given.output_nr
    if given.grad_fn is not None:
        return given.grad_fn, given.output_nr
    return _accumulator(given), given.output_nr


def _accumulator(leaf: Tensor) -> Node:
    """Return the node that adds to the gradient of a leaf."""
    if torch.is_inference_mode_enabled():
        with torch.inference_mode(mode=False):
            return _accumulator(leaf)
    try:
        with no_function_modes():  # a subclass would put a node of its own before it
            return get_gradient_edge(leaf).node
    except AttributeError as error:  # it looks at a view of the leaf
        raise NotDifferentiableArgumentError(
            f"Autograd gives a view of the leaf of shape {list(leaf.shape)} no graph, "
            "though the leaf requires grad: it was made in torch.inference_mode(), or "
            "something that is in force around this call keeps autograd from "
            "recording, such as a mode or transform of torch.func that an earlier "
            "error left behind. Make the leaf outside of it, leave it, or begin anew."
        ) from error
    except (RuntimeError, NotImplementedError):  # sparse and nested ones have no views
        with no_function_modes(), torch.enable_grad():
            copied: Any = leaf.clone().grad_fn
        return copied.next_functions[0][0]


def unconnected(
    outputs: Iterable[Differentiable], inputs: Sequence[Differentiable]
) -> list[int]:
    """Return the positions of the inputs that the graph behind `outputs` lacks.

    This runs before every good call that allows no unused input, so it stops at the
    last input it finds, and compares leaves without making edges of them.
    """
    leaves, places = _wanted(inputs)
    stack: list[Any] = []
    for output in outputs:
        key = _key(output)
        if isinstance(key, int):
            leaves.discard(key)
        else:
            places.discard(key)
            stack.append(key[0])
    seen: set[Node] = set()
    while stack and (leaves or places):
        node = stack.pop()
        if node in seen:
            continue
        seen.add(node)
        for place in node.next_functions:
            target: Any = place[0]
            if target.__class__ is AccumulateGrad:
                leaves.discard(id(target.variable))
            elif target is not None:
                stack.append(target)
                if places:
                    places.discard(place)
    missing = leaves | places
    return [i for i, it in enumerate(inputs) if missing and _key(it) in missing]


@dataclass(frozen=True)
class Graph:
    """Everything behind some outputs: where gradients come in, and the leaves."""

    places: frozenset[Place]
    leaves: tuple[Tensor, ...]


def graph_behind(outputs: Iterable[Differentiable]) -> Graph:
    """Walk the whole graph behind `outputs`."""
    places = list(dict.fromkeys(map(place_of, outputs)))
    seen = set(places)
    for node, _ in places:  # it grows
        for place in _next(node):
            if place not in seen:
                seen.add(place)
                places.append(place)
    leaves = dict.fromkeys(node for node, _ in places)
    found = [leaf for node in leaves if (leaf := leaf_of(node)) is not None]
    return Graph(frozenset(seen), tuple(found))


def source_in(graph: Graph, tensor: Differentiable) -> Place | None:
    """Return what of `graph` the tensor was made from: the nearest place, if any."""
    made = [place_of(tensor)]
    seen = set(made)
    for node, _ in made:  # it grows
        for place in _next(node):
            if place in graph.places:
                return place
            if place not in seen:
                seen.add(place)
                made.append(place)
    return None


def is_at(tensor: Tensor, place: Place) -> bool:
    """Tell whether gradients of `tensor` come in at `place`."""
    leaf = leaf_of(place[0])
    if leaf is not None:
        return tensor is leaf
    return tensor.grad_fn is place[0] and tensor.output_nr == place[1]


def _next(node: Node) -> list[Place]:
    """Return where the gradients go that a node computes."""
    return [(to, nr) for to, nr in node.next_functions if to is not None]


def _wanted(inputs: Iterable[Differentiable]) -> tuple[set[int], set[Place]]:
    keys = [_key(it) for it in inputs]
    leaves = {key for key in keys if isinstance(key, int)}
    return leaves, {key for key in keys if not isinstance(key, int)}


def _key(given: Differentiable) -> int | Place:
    """Return what tells one input from another: of a leaf, its identity."""
    if isinstance(given, GradientEdge):
        leaf = leaf_of(given.node)
        return place_of(given) if leaf is None else id(leaf)
    return id(given) if given.grad_fn is None else place_of(given)
