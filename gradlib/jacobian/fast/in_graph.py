"""What the graph of a forward pass offers: a chain, structure, known operations."""

from contextlib import suppress
from typing import TypeAlias

import torch

from gradlib.jacobian.fast.chains.straight import Straight, find_straight
from gradlib.jacobian.fast.parameters.by_sample import BySample, find_by_sample
from gradlib.jacobian.fast.pushed.pushed import Pushed, find_pushed
from gradlib.jacobian.fast.stacked.stacked import Stacked, find_stacked
from gradlib.jacobian.fast.structure.structured import Structured, find_structured
from gradlib.jacobian.graph import Graph
from gradlib.jacobian.plan import Plan

InGraph: TypeAlias = Straight | Structured | Pushed | Stacked | BySample


def find_in_graph(graph: Graph, plan: Plan) -> InGraph | None:
    """Return a shorter way to a Jacobian, or ``None``.

    Args:
        graph: What it is of.
        plan: How it would be computed otherwise.
    """
    of_inputs = find_straight, find_structured, find_pushed, find_stacked
    for find in (find_by_sample,) if all(graph.shared) else of_inputs:
        # What a node has saved may be overwritten, or gone.
        with suppress(RuntimeError), torch.no_grad():
            found = find(graph, plan)
            if found is not None:
                return found
    return None
