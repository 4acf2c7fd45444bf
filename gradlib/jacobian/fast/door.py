"""The entry to this folder: finds a shorter way to a Jacobian, or none."""

from typing import Any, cast, overload

from gradlib.jacobian.arguments import Call, is_open
from gradlib.jacobian.fast.chains.find import ChainOfCall, find_chain, find_plain
from gradlib.jacobian.fast.chains.small import SmallNet
from gradlib.jacobian.fast.in_graph import InGraph, find_in_graph
from gradlib.jacobian.fast.replicas import Replicas, find_replicas
from gradlib.jacobian.graph import Graph
from gradlib.jacobian.plan import JacobianPlan


@overload
def find_shorter(asked: Call) -> Replicas | SmallNet | ChainOfCall | None: ...
@overload
def find_shorter(asked: Graph, plan: JacobianPlan) -> InGraph | None: ...
def find_shorter(
    asked: Call | Graph, plan: JacobianPlan | None = None
) -> Replicas | SmallNet | ChainOfCall | InGraph | None:
    """Return a shorter way to a Jacobian, or ``None``.

    Args:
        asked: The call, before the function is run; or the graph of its forward pass.
        plan: With a graph, how the Jacobian would be computed otherwise.
    """
    if plan is None:
        call: Any = asked
        if not is_open(call):
            return None
        return find_plain(call) or find_replicas(call) or find_chain(call)
    return find_in_graph(cast(Graph, asked), plan)
