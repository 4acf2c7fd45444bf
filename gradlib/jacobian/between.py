"""The nodes between what was computed and what it was computed from."""

from collections.abc import Iterator, Sequence, Set
from typing import Any

from torch.autograd.graph import Node

from gradlib.private import AccumulateGrad
from gradlib.vjp.connection import Place


def between(starts: Sequence[Node], ends: Set[Place]) -> dict[Node, list[Place]]:
    """Return the nodes below some from which an end can be reached.

    Returns:
        Each before those that it leads to, with the places that lead on to an end; and
        the nodes that ends are at.
    """
    found: dict[Node, list[Place]] = {}
    at_ends = {node for node, _ in ends}
    for node, places in _from_below(starts):
        led = places and [it for it in places if it in ends or found.get(it[0])]
        if led or node in at_ends:
            found[node] = led
    return dict(reversed(found.items()))


def in_order(starts: Sequence[Node]) -> list[Node]:
    """Return the nodes below some, each before those that it leads to."""
    return [node for node, _ in _from_below(starts)][::-1]


def _from_below(starts: Sequence[Node]) -> Iterator[tuple[Node, list[Place]]]:
    """Go through the nodes below some, each after those that it leads to.

    What a node leads to is made anew whenever it is asked, so it is asked once.
    """
    seen: set[Node] = set()
    stack: list[tuple[Node, list[Place] | None]] = [(start, None) for start in starts]
    while stack:
        node, places = stack.pop()
        if places is not None:
            yield node, places  # all below it is done
        elif node not in seen:
            seen.add(node)
            led: Any = [it for it in node.next_functions if it[0] is not None]
            stack.append((node, led))
            for below, _ in led:
                if below in seen:
                    continue
                if below.__class__ is AccumulateGrad:  # of a leaf: it leads nowhere
                    seen.add(below)
                    yield below, []
                else:
                    stack.append((below, None))
