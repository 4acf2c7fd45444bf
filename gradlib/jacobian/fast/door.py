"""The entry to this folder: finds a shorter way to a Jacobian, or none."""

from typing import TypeAlias

from gradlib.jacobian.call import Call, is_open
from gradlib.jacobian.fast.chains.find import ChainOfCall, find_chain, find_plain
from gradlib.jacobian.fast.chains.plain import PlainNet
from gradlib.jacobian.fast.chains.straight import Straight, find_straight
from gradlib.jacobian.fast.diagonal import Diagonal, find_diagonal
from gradlib.jacobian.fast.parameters.by_sample import BySample, find_by_sample
from gradlib.jacobian.fast.pushed.pushed import Pushed, find_pushed
from gradlib.jacobian.fast.replicas import Replicas, find_replicas
from gradlib.jacobian.fast.stacked.stacked import Stacked, find_stacked
from gradlib.jacobian.fast.structure.structured import Structured, find_structured
from gradlib.jacobian.graph import Graph
from gradlib.jacobian.plan import JacobianPlan
from gradlib.private.modes import enable_grad, grad_is_enabled

InCall: TypeAlias = PlainNet | ChainOfCall | Replicas
InGraph: TypeAlias = Diagonal | Straight | Structured | Pushed | Stacked | BySample


def find_in_call(call: Call) -> InCall | None:
    """Return a shorter way, from the function as it is, before it is run; or ``None``.

    Args:
        call: The call of ``per_sample_jacobian``.
    """
    if not is_open(call):
        return None
    return find_plain(call) or find_replicas(call) or find_chain(call)


def find_in_graph(graph: Graph, plan: JacobianPlan) -> InGraph | None:
    """Return a shorter way, from the graph of the forward pass; or ``None``.

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
