"""Whether a backward of somebody's leaves the graph that a loss needs."""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import Node

from gradlib.errors import NoSuchWayError, listed
from gradlib.jacobian.again import Called
from gradlib.jacobian.chance import Chance
from gradlib.jacobian.compute import explained
from gradlib.jacobian.differences import Caller, tensors_of
from gradlib.jacobian.directions import Moves
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
        for node in _of_somebody(graph)
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


STEP, ASIDE = 1e-7, 1e-3
"""How far differences go, and how far beside the point: longer steps meet kinks, of
which a point itself may lie on one."""

SETTLED = 0.2
"""How far two differences may be apart, as a part of what a cut path would explain."""

DRAWS = 2
"""How many directions are tried: along one a cut path may show little by chance."""


def require_derivatives(caller: Caller, graph: Graph) -> None:
    """Raise where what such a backward gives changes otherwise than its graph says.

    As where it multiplies by what was computed without a graph: then there is a graph,
    by what it gets. The gradient of a random sum of the outputs is held against its own
    differences in float64, along a random direction of what is asked for. Where these
    do not settle, or cannot be computed, they say nothing.

    Args:
        caller: Calls the function again.
        graph: What its call left.

    Raises:
        NoSuchWayError: It has.
    """
    names = [node.name() for node in _of_somebody(graph)]
    if not names:
        return
    try:
        is_apart = any(_is_apart(caller) for _ in range(DRAWS))
    except Exception:  # no such derivative, as the loss will say, or no float64
        return
    if is_apart:
        raise NoSuchWayError(
            f"create_graph=True goes back through the backward of {listed(names)}, and "
            "what comes of it changes otherwise than its graph says. So gradients of a "
            "loss of the Jacobian would be wrong. It multiplies by what has no graph, "
            "as a slope that is computed in forward, under torch.no_grad() or with "
            ".detach(). Save inputs and outputs, and compute from them in backward. If "
            "that is meant as a constant, pass check=False."
        )


def _of_somebody(graph: Graph) -> list[Node]:
    return [node for node in graph.nodes if isinstance(node, BackwardCFunction)]


def _is_apart(caller: Caller) -> bool:
    """Tell whether the gradient has another slope by autograd than by differences."""
    beside, along = (ASIDE, caller.direction()), caller.direction()
    base = caller.at(beside, graph=True)
    outputs = [it for it in tensors_of(base) if it.requires_grad]
    vectors = [caller.chance.vector(it) for it in outputs]
    first = _gradients(base, outputs, vectors, create_graph=True)
    others = {name: caller.chance.vector(it) for name, it in first.items()}
    second = _gradients(
        base,
        [it for it in first.values() if it.requires_grad],
        [others[name] for name, it in first.items() if it.requires_grad],
    )
    terms = _products(second, along)

    def at(length: float) -> float:
        there = caller.at(beside, (length, along), graph=True)
        made = [it for it in tensors_of(there) if it.requires_grad]
        return sum(_products(_gradients(there, made, vectors), others))

    near, far = ((at(it) - at(-it)) / (2 * it) for it in (STEP, 2 * STEP))
    apart, size = abs(near - sum(terms)), max(map(abs, (near, *terms)))
    return apart > caller.how.surer * size and abs(near - far) < SETTLED * apart


def _products(grads: Mapping[int | str, Tensor], along: Moves) -> list[float]:
    return [
        (it.conj() * along[name].to(it)).sum().real.item()
        for name, it in grads.items()
        if name in along
    ]


def _gradients(
    called: Called,
    outputs: Sequence[Tensor],
    vectors: Sequence[Tensor],
    *,
    create_graph: bool = False,
) -> Mapping[int | str, Tensor]:
    """Return the gradients of a call's outputs by what it was called with."""
    leaves = {name: it for name, it in called.leaves.items() if it.requires_grad}
    if not (outputs and leaves):
        return {}
    grads = torch.autograd.grad(
        outputs,
        [*leaves.values()],
        vectors,
        create_graph=create_graph,
        allow_unused=True,
    )
    every = zip(leaves, cast(Sequence[Any], grads), strict=True)
    return {name: it for name, it in every if it is not None}


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
