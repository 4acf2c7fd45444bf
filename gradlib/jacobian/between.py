"""The nodes between what was computed and what it was computed from."""

from collections.abc import Sequence, Set
from typing import Any

from torch.autograd.graph import Node

from gradlib.vjp.connection import Place


def between(starts: Sequence[Node], ends: Set[Place]) -> dict[Node, list[Place]]:
    """Return the nodes below some from which an end can be reached.

    Returns:
        Each before those that it leads to, with the places that lead on to an end; and
        the nodes that ends are at.
    """
    found: dict[Node, list[Place]] = {}
    at_ends = {node for node, _ in ends}
    for node, places in reversed(_below(starts).items()):
        led = [place for place in places if place in ends or found.get(place[0])]
        if led or node in at_ends:
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
