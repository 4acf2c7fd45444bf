"""Finds a shorter way to a Jacobian in the graph of a forward pass."""

from typing import TypeAlias

from gradlib.jacobian.fast.chains.straight import Straight, find_straight
from gradlib.jacobian.fast.diagonal import Diagonal, find_diagonal
from gradlib.jacobian.fast.parameters.by_sample import BySample, find_by_sample
from gradlib.jacobian.fast.pushed.pushed import Pushed, find_pushed
from gradlib.jacobian.fast.stacked.stacked import Stacked, find_stacked
from gradlib.jacobian.fast.structure.structured import Structured, find_structured
from gradlib.jacobian.graph import Graph
from gradlib.jacobian.plan import JacobianPlan
from gradlib.private.modes import enable_grad, grad_is_enabled

InGraph: TypeAlias = Diagonal | Straight | Structured | Pushed | Stacked | BySample


def find_in_graph(graph: Graph, plan: JacobianPlan) -> InGraph | None:
    """Return a shorter way to a Jacobian, or ``None``.

    Args:
        graph: The graph of the forward pass.
        plan: How the Jacobian would be computed otherwise.
    """
    if any(graph.shared):
        every = (find_by_sample,) if all(graph.shared) else ()
    else:
        every = (find_pushed, find_stacked)
        if len(graph.roots) == len(graph.points) == 1:
            every = (find_diagonal, find_straight, find_structured, *every)
    before = grad_is_enabled()
    enable_grad(False)
    try:
        for find in every:
            try:
                shorter = find(graph, plan)
            except RuntimeError:  # reading saved tensors that are overwritten or freed
                continue
            if shorter is not None:
                return shorter
    finally:
        enable_grad(before)
    return None
