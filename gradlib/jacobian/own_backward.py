"""Whether a custom backward leaves the graph that a loss of the Jacobian needs."""

from collections.abc import Mapping, Sequence
from functools import partial

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import Node

from gradlib.errors import NoSuchWayError
from gradlib.jacobian.again import Called
from gradlib.jacobian.cannot_go_back import refuse
from gradlib.jacobian.chance import Chance
from gradlib.jacobian.differences import Caller, tensors_of
from gradlib.jacobian.directions import Moves
from gradlib.jacobian.graph import Graph
from gradlib.private.passes import grad_in_modes
from gradlib.wording import listed


def require_graphs(graph: Graph) -> None:
    """Raise where a custom backward leaves no graph, by one VJP that has a graph.

    A backward is linear in the gradients it gets: if its result has no graph, it is
    zero, or autograd takes it for a constant.

    Raises:
        NoSuchWayError: A result is taken for a constant, or torch cannot go back.
    """
    cut: list[str] = []
    handles = [
        node.register_hook(partial(_look, cut, node.name())) for node in _custom(graph)
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
        refuse(error)
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
"""How far a difference goes, and how far beside the point it is taken: longer steps
meet kinks, and the point itself may lie on one."""

SETTLED = 0.2
"""How far two differences may be apart, as a part of the error that they show."""

DRAWS = 2
"""How many directions are tried: along a single one a wrong graph may hardly show."""


def require_derivatives(caller: Caller, graph: Graph) -> None:
    """Raise where the graph of a custom backward gives wrong derivatives.

    It does where the backward multiplies by a value that was computed without a graph:
    its result has a graph then, through the incoming gradient only. The second
    derivative of a random sum of the outputs, along a random direction, is compared
    with finite differences of its gradient in float64. Where these do not settle, or
    cannot be computed, they say nothing.

    Raises:
        NoSuchWayError: The graph of a custom backward is wrong.
    """
    names = [node.name() for node in _custom(graph)]
    if not names:
        return
    try:
        is_apart = any(_is_apart(caller) for _ in range(DRAWS))
    except Exception:  # no second derivative, as the loss will say, or no float64
        return
    if is_apart:
        raise NoSuchWayError(
            f"create_graph=True goes back through the backward of {listed(names)}, and "
            "what it returns does not change as its graph says. So gradients of a loss "
            "of the Jacobian would be wrong. It multiplies by what has no graph, as a "
            "slope that is computed in forward, under torch.no_grad() or with "
            ".detach(). Save inputs and outputs, and compute from them in backward. If "
            "that is meant as a constant, pass check=False."
        )


def _custom(graph: Graph) -> list[Node]:
    return [node for node in graph.nodes if isinstance(node, BackwardCFunction)]


def _is_apart(caller: Caller) -> bool:
    """Tell whether the gradient's slope by autograd is not that by differences."""
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
        called = caller.at(beside, (length, along), graph=True)
        made = [it for it in tensors_of(called) if it.requires_grad]
        return sum(_products(_gradients(called, made, vectors), others))

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
    """Return the gradients of a call's outputs with respect to its leaves, by key."""
    leaves = {name: it for name, it in called.leaves.items() if it.requires_grad}
    if not (outputs and leaves):
        return {}
    ends = [*leaves.values()]
    with called.again():
        grads = grad_in_modes(outputs, ends, vectors, create_graph=create_graph)
    every = zip(leaves, grads, strict=True)
    return {name: it for name, it in every if it is not None}


def _look(
    cut: list[str],
    name: str,
    given: tuple[Tensor | None, ...],
    got: tuple[Tensor | None, ...],
) -> None:
    """Add the name of a node to `cut` where its backward returned a constant.

    Args:
        cut: The names found so far.
        name: The name of the node.
        given: The gradients that its backward returned.
        got: The gradients that its backward got.
    """
    if any(it is not None and it.requires_grad for it in got) and any(
        it is not None and not it.requires_grad and bool(it.any()) for it in given
    ):
        cut.append(name)
