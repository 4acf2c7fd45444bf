"""How far rounding may move the gradients that a Jacobian is compared with."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias, cast

import torch
from torch import Tensor

from gradlib.jacobian.chance import Chance
from gradlib.jacobian.forward import BY_COLUMNS, Linearized
from gradlib.jacobian.graph import Graph
from gradlib.jacobian.look import Look, first_coupled
from gradlib.jacobian.memory import is_out_of_memory
from gradlib.jacobian.passes import vjp
from gradlib.jacobian.pieces import Block

ROUNDING = 10
"""By how many times the rounding that was seen a gradient may be off."""

MANY = 100
"""Rounding is taken to move a gradient by at most this many eps of the largest gradient
on the way; in narrow dtypes by the root of eps, where that is less."""

TIMES = (1.37, 2.23, 3.71)
"""Factors of a vector, or a step, that make its results be rounded differently.
Multiples by whole numbers would be rounded alike."""

DRAWS = 3
"""How many random sums of columns are computed, to see their rounding."""

MORE = 20
"""How many sums, of rows too, are computed before a Jacobian is refused. Where a sum
has one large term and tiny ones, as after a softmax, few sums show the rounding."""

Again: TypeAlias = Iterable[tuple[list[Tensor | None], Tensor]]
"""A VJP computed again in other ways: for each way its gradients, and the square of the
largest gradient on its way."""


def roundings(
    graph: Graph, blocks: Mapping[Block, Tensor], look: Look, mode: str
) -> Iterator[Mapping[int, Tensor]]:
    """Yield the square of how far rounding may move each point's gradient.

    First that is nothing, which takes no passes; then an estimate, and a better one.
    Where derivatives cancel, rounding is all that is left. VJPs and JVPs are linear, so
    those of multiples and sums differ from multiples and sums of them by rounding only.

    Args:
        graph: The graph of the forward pass.
        blocks: The Jacobian.
        look: The VJP that it is compared with.
        mode: How the Jacobian was computed.
    """
    yield {}
    for again, draws in ((_multiples, DRAWS), (_sums, MORE)):
        squares, most = _rounding_of_rows(graph, look, again(graph, look))
        if mode in BY_COLUMNS and not _samples_mix(graph):  # mixing is no rounding
            for point, off in squares.items():
                in_columns = _rounding_of_columns(graph, blocks, point, draws).to(off)
                if mode == "split":  # its tensor's first axis may not be the samples
                    in_columns = torch.minimum(in_columns, most.to(off))
                squares[point] = torch.maximum(off, in_columns)
        yield {point: ROUNDING**2 * off for point, off in squares.items()}


def _samples_mix(graph: Graph) -> bool:
    """Tell whether samples influence each other, through inputs with a batch axis."""
    places = zip(graph.points, graph.shared, strict=True)
    own = [point for point, shared in places if not shared]
    return first_coupled(Chance(), graph.roots, own) is not None


def _rounding_of_rows(
    graph: Graph, look: Look, again: Again
) -> tuple[dict[int, Tensor], Tensor]:
    """Return the square of how far rounding moved a VJP, by point.

    A hook that is not linear moves it further, so the result is bounded.

    Args:
        graph: The graph of the forward pass.
        look: The VJP.
        again: The same VJP computed in other ways.

    Returns:
        The squares by point, and the square of the most that rounding can do.
    """
    eps = torch.finfo(graph.drawing.narrowest_dtype).eps
    squares: dict[int, Tensor] = {}
    limits: list[Tensor] = []
    for others, largest in again:
        limits.append(min(eps, (MANY * eps) ** 2) * largest)
        for point, (grad, it) in enumerate(zip(look.grads, others, strict=True)):
            if grad is not None and it is not None:
                off = square(it - grad)
                off = torch.minimum(off, limits[-1].to(off))
                squares[point] = torch.maximum(squares.get(point, off), off)
    return squares, torch.stack(limits).max()


def _multiples(graph: Graph, look: Look) -> Again:
    """Compute a VJP again from multiples of its vectors."""
    for times in TIMES:
        grads, largest = _seen(graph, [times * it for it in look.vectors])
        yield [it if it is None else it.double() / times for it in grads], largest


def _sums(graph: Graph, look: Look) -> Again:
    """Compute a VJP again as the sum of two, each from a part of its vectors."""
    chance = Chance()
    for _ in range(MORE):
        parts = [it * (chance.vector(it) > 0) for it in look.vectors]
        grads, largest = _seen(graph, parts)
        pairs = zip(look.vectors, parts, strict=True)
        others, other = _seen(graph, [it - part for it, part in pairs])
        yield (
            [
                one if one is None or it is None else one.double() + it
                for one, it in zip(grads, others, strict=True)
            ],
            torch.maximum(largest, other),
        )


def _rounding_of_columns(
    graph: Graph, blocks: Mapping[Block, Tensor], point: int, draws: int
) -> Tensor:
    """Return the square of how far rounding moved the columns of a point.

    JVPs along random directions are compared with sums of the columns. It is 0 where
    JVPs cannot be computed.
    """
    chance = Chance()
    tensor = graph.points[point]
    largest = torch.zeros((), dtype=torch.float64, device=tensor.device)
    try:
        columns = Linearized(graph.roots, tensor)
        for _ in range(draws):
            u = chance.vector(tensor)
            offs = [
                square(_along(graph, blocks[root, point], point, u) - asked.double())
                for root, asked in enumerate(columns.push(u[None]))
                if asked is not None
            ]
            largest = torch.maximum(largest, torch.stack(offs).sum())
    except RuntimeError as error:  # as through a custom backward without a graph
        if is_out_of_memory(error):
            raise
    return largest


def _along(graph: Graph, block: Tensor, point: int, u: Tensor) -> Tensor:
    """Return the product of a block and a direction in float64, ``(1, *output.shape)``.

    It goes sample by sample: for a whole copy in float64 there may be no room.
    """
    shared = graph.shared[point]
    rows = block.detach().reshape(graph.batch, -1, graph.columns(point))
    made = [
        it.double() @ (u if shared else u[sample]).flatten().double()
        for sample, it in enumerate(rows)
    ]
    return torch.stack(made).view(1, *block.shape[: block.dim() - _inside(u, shared)])


def _inside(u: Tensor, shared: bool) -> int:
    """Return how many axes of a block are those of the input."""
    return u.dim() if shared else u.dim() - 1


def _seen(
    graph: Graph, vectors: Sequence[Tensor]
) -> tuple[list[Tensor | None], Tensor]:
    """Return a VJP, and the square of the largest gradient on its way."""
    squares: list[Tensor] = [square(it) for it in vectors]

    def seen(grads: Sequence[Tensor | None]) -> None:
        squares.extend(square(it) for it in grads if it is not None)

    hooks = [cast(Any, node).register_prehook(seen) for node in graph.nodes]
    try:
        grads = vjp(graph.roots, graph.points, vectors)
    finally:
        for hook in hooks:
            hook.remove()
    return grads, torch.stack([it.to(squares[0]) for it in squares]).max()


def square(values: Tensor) -> Tensor:
    """Return the sum of the squares of finite values, without waiting for a GPU."""
    values = values.detach().double()
    return values.where(values.isfinite(), 0).square().sum()
