"""Whether a backward of somebody's leaves the graph that a loss needs."""

from functools import partial

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction

from gradlib.errors import NoSuchWayError
from gradlib.jacobian.chance import Chance
from gradlib.jacobian.compute import explained
from gradlib.jacobian.graph import Graph
from gradlib.jacobian.memory import is_out_of_memory


def require_graphs(graph: Graph) -> None:
    """Go back once, by vectors that require grad, and look at each such node.

    What a backward gives is linear in what it gets: without a graph it is zero, or
    autograd takes it for a constant.

    Raises:
        NoSuchWayError: It takes one for a constant, or cannot go back.
    """
    cut: list[str] = []
    handles = [
        node.register_hook(partial(_look, cut, node.name()))
        for node in graph.nodes
        if isinstance(node, BackwardCFunction)
    ]
    if not handles:
        return
    chance = Chance()
    vectors = [chance.vector(root).requires_grad_() for root in graph.roots]
    try:
        torch.autograd.grad(
            graph.roots, graph.points, vectors, create_graph=True, allow_unused=True
        )
    except RuntimeError as error:
        if is_out_of_memory(error):
            raise
        raise NoSuchWayError(explained(error)) from error
    finally:
        for handle in handles:
            handle.remove()
    if cut:
        raise NoSuchWayError(
            f"create_graph=True goes back through the backward of {cut[0]}, which "
            "leaves no graph: it computes outside of autograd, as with NumPy or "
            ".detach(), and a loss of the Jacobian would take what it gives for a "
            "constant. Let it compute with torch's operations or, if that is a "
            "constant, pass check=False."
        )


def _look(
    cut: list[str],
    name: str,
    given: tuple[Tensor | None, ...],
    got: tuple[Tensor | None, ...],
) -> None:
    """Write down the name of a backward that has given what has no graph.

    Args:
        cut: Where to.
        name: Of its node.
        given: What it gives to its inputs.
        got: What it gets of its outputs.
    """
    if any(it is not None and it.requires_grad for it in got) and any(
        it is not None and not it.requires_grad and bool(it.any()) for it in given
    ):
        cut.append(name)
