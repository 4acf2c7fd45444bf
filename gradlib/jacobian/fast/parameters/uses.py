"""Finds the use of each parameter, and the layouts that samples may have there."""

import math

from torch.autograd.graph import Node

from gradlib.jacobian.fast.parameters.rules import KNOWN, TOKENWISE, TURNED
from gradlib.jacobian.fast.parameters.use import Samples, Use, shape_of
from gradlib.jacobian.graph import Graph

VIEWS = ("ViewBackward0", "UnsafeViewBackward0")
"""Operations that may give a product's output another shape."""


def find_uses(graph: Graph) -> list[Use] | None:
    """Return the use of each parameter that is used.

    Returns:
        ``None`` where one is used twice, or by an operation that is not known.
    """
    ends = {end: number for number, end in enumerate(graph.ends)}
    if len(ends) < len(graph.points):
        return None
    going: dict[Node, list[tuple[Node, int]]] = {}
    for node in graph.way:
        for index, (after, _) in enumerate(node.next_functions):
            if after is not None:
                going.setdefault(after, []).append((node, index))
    uses: list[Use] = []
    for (end, _), point in ends.items():
        into, turned = going.get(end, []), False
        if len(into) == 1 and into[0][0].name() == "TBackward0":
            end, turned = into[0][0], True
            into = going.get(end, [])
        if len(into) > 1 or end in graph.starts:
            return None
        for node, index in into:
            name = node.name()
            known = (name, index) in TURNED if turned else index in KNOWN.get(name, {})
            if not known:
                return None
            views = [it for it, _ in going.get(node, []) if it.name() in VIEWS]
            seen_as = shape_of(views[0]) if views else ()
            uses.append(Use(point, node, index, turned, seen_as))
    return uses


def places_of_samples(use: Use, batch: int) -> list[Samples]:
    """Return the layouts that the samples may have, by the shapes."""
    shape, rows = use.shape, use.of_rows
    if rows and shape[0] > batch and shape[0] % batch == 0:
        seen = use.seen_as[:2]
        known = len(use.seen_as) > 2 and math.prod(seen) == shape[0]
        axes = [axis for axis in (0, 1) if not known or seen[axis] == batch]
    else:
        tokens = len(shape) > 2 and use.node.name() in TOKENWISE
        several = range(1 + tokens)
        axes = [axis for axis in several if shape[axis : axis + 1] == (batch,)]
    return [Samples(batch, axis, rows) for axis in axes]
