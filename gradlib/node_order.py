"""Which nodes of autograd's graph were made later than others, by their numbers.

A thread numbers the nodes that it makes. Each counts for itself, so the numbers of two
threads do not compare.
"""

from collections.abc import Collection, Iterable

from torch.autograd.graph import Node

from gradlib.edges import edges_of
from gradlib.private.nodes import AccumulateGrad, sequence_number

FAR = 10_000
"""How many nodes `leads_to_newer` goes through at most."""


def leads_to_later(node: Node) -> bool:
    """Tell whether a node leads to one whose number is not lower."""
    number = sequence_number(node)
    return any(
        sequence_number(it) >= number
        for it, _ in edges_of(node)
        if type(it) is not AccumulateGrad  # it has no such number
    )


def leads_to_newer(
    nodes: Iterable[Node], since: int, known: Collection[Node] = ()
) -> bool:
    """Tell whether nodes that are older by their numbers lead to a newer one.

    A node that really is older never does. One that a pass with ``create_graph=True``
    makes of a GPU's tensors does: a thread of the device counts its number.

    Args:
        nodes: The nodes.
        since: autograd's sequence number when the forward began.
        known: Nodes that are older whatever their numbers: the search stops there.
    """
    seen, stack = {*known}, [*nodes]
    far = len(seen) + FAR
    while stack and len(seen) < far:
        node = stack.pop()
        if node in seen or type(node) is AccumulateGrad:  # it has no such number
            continue
        if sequence_number(node) >= since:
            return True
        seen.add(node)
        stack += [target for target, _ in edges_of(node)]
    return False
