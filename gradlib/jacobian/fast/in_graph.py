"""What the graph of a forward pass offers: a chain, structure, known operations."""

from typing import TypeAlias

from gradlib.jacobian.fast.chains.straight import Straight, find_straight
from gradlib.jacobian.fast.parameters.by_sample import BySample
from gradlib.jacobian.fast.parameters.by_sample import find as find_by_sample
from gradlib.jacobian.fast.pushed.pushed import Pushed
from gradlib.jacobian.fast.pushed.pushed import find as find_pushed
from gradlib.jacobian.fast.stacked.stacked import Stacked
from gradlib.jacobian.fast.stacked.stacked import find as find_stacked
from gradlib.jacobian.fast.structure.structured import Structured
from gradlib.jacobian.fast.structure.structured import find as find_structure
from gradlib.jacobian.graph import Graph
from gradlib.jacobian.plan import Plan

InGraph: TypeAlias = Straight | Structured | Pushed | Stacked | BySample


def find_in_graph(graph: Graph, plan: Plan) -> InGraph | None:
    """Return a shorter way to a Jacobian, or ``None``.

    Args:
        graph: What it is of.
        plan: How it would be computed otherwise.
    """
    if all(graph.shared):
        return find_by_sample(graph, plan)
    return (
        find_straight(graph, plan)
        or find_structure(graph, plan)
        or find_pushed(graph, plan)
        or find_stacked(graph, plan)
    )
