"""Finds a shorter way to a Jacobian in the graph of a forward pass."""

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
        graph: The graph of the forward pass.
        plan: How the Jacobian would be computed otherwise.
    """
    of_inputs = find_straight, find_structured, find_pushed, find_stacked
    with torch.no_grad():
        for find in (find_by_sample,) if all(graph.shared) else of_inputs:
            # A node's saved tensors may be overwritten or freed: reading them raises.
            with suppress(RuntimeError):
                shorter = find(graph, plan)
                if shorter is not None:
                    return shorter
    return None
