"""Finds the use of each parameter, and the layouts that samples may have there."""

import math

from gradlib.jacobian.drawing import Drawing, kept_for_each
from gradlib.jacobian.fast.parameters.rules import KNOWN, TOKENWISE, TURNED
from gradlib.jacobian.fast.parameters.use import Samples, Use
from gradlib.jacobian.graph import Graph

VIEWS = ("ViewBackward0", "UnsafeViewBackward0")
"""Operations that may give a product's output another shape."""


def find_uses(graph: Graph) -> list[Use] | None:
    """Return the use of each parameter that is used.

    Returns:
        ``None`` where one is used twice, or by an operation that is not known.
    """
    drawing, names = graph.drawing, graph.drawing.names
    if len({*graph.ends}) < len(graph.points):
        return None
    coming, starts = _coming(drawing), {node for node, _ in drawing.roots}
    uses: list[Use] = []
    for point, spot in enumerate(drawing.ends):
        if spot is None:
            continue
        end, turned = spot[0], False
        if len(coming[end]) == 1 and names[coming[end][0][0]] == "TBackward0":
            ((end, _),), turned = coming[end], True
        if len(coming[end]) > 1 or end in starts:
            return None
        for node, index in coming[end]:
            name = names[node]
            known = (name, index) in TURNED if turned else index in KNOWN.get(name, {})
            if not known:
                return None
            views = [it for it, _ in coming[node] if names[it] in VIEWS]
            seen_as = drawing.forms[views[0], 0].shape if views else ()
            uses.append(Use(point, graph.nodes[node], index, turned, seen_as))
    return uses


@kept_for_each
def _coming(drawing: Drawing) -> list[list[tuple[int, int]]]:
    """Return for each node those that lead to it, and as which of their inputs."""
    coming: list[list[tuple[int, int]]] = [[] for _ in drawing.names]
    for node, led in enumerate(drawing.led):
        for index, (after, _) in zip(drawing.positions[node], led, strict=True):
            coming[after].append((node, index))
    return coming


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
