"""Whether a Jacobian agrees with a VJP, but for rounding."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial, reduce
from typing import Any, TypeAlias, cast

import torch
from torch import Tensor

from gradlib.errors import NoSuchWayError
from gradlib.jacobian.chance import Chance
from gradlib.jacobian.forward import BY_COLUMNS, Linearized
from gradlib.jacobian.graph import Graph
from gradlib.jacobian.look import Look, first_coupled
from gradlib.jacobian.memory import is_out_of_memory
from gradlib.jacobian.nodes import narrowest_dtype
from gradlib.jacobian.passes import vjp
from gradlib.jacobian.pieces import Block

CLOSE = {torch.float64: 1e-6, torch.float32: 1e-3}
"""By which part of a slope the Jacobian's may differ, for each dtype."""

COARSE = 0.05
"""The same for narrower dtypes, and where a GPU may use TF32."""


def closeness(graph: Graph) -> float:
    """Return by which part two slopes may differ, given the precision of gradients.

    That precision is lower where a dtype on the way is narrow, or a GPU uses TF32.
    """
    dtype, device = narrowest_dtype(graph.drawing), graph.points[0].device
    if dtype == torch.float32 and may_use_tf32(device, graph.drawing.names):
        return COARSE
    return CLOSE.get(dtype, COARSE)


def may_use_tf32(device: torch.device, nodes: Iterable[str]) -> bool:
    """Tell whether a device may multiply float32 numbers with fewer digits.

    Args:
        device: The device.
        nodes: The names of the nodes whose backward passes run there.
    """
    if device.type != "cuda":
        return False
    try:
        in_matmul = bool(torch.backends.cuda.matmul.allow_tf32)
        in_cudnn = bool(torch.backends.cudnn.allow_tf32)
    except RuntimeError:  # set by the newer names, to what the older cannot express
        return True
    cudnns = any("Convolution" in name or "Cudnn" in name for name in nodes)
    return in_matmul or (in_cudnn and cudnns)


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


def require_rows(
    graph: Graph, blocks: Mapping[Block, Tensor], look: Look, *, mode: str = "reverse"
) -> None:
    """Raise where a Jacobian disagrees with a VJP.

    Columns come from the graph of a backward pass, which a custom backward may lack.

    Args:
        graph: The graph of the forward pass.
        blocks: The Jacobian.
        look: The VJP.
        mode: How the Jacobian was computed: ``"forward"`` by columns, whose rounding
            differs, ``"split"`` as a product of rows and columns, or by rows.

    Raises:
        NoSuchWayError: They differ by more than rounding.
    """
    if _is_right_at_once(graph, blocks, look):
        return
    wrong = [
        point for point, is_wrong in _wrong(graph, blocks, look).items() if is_wrong
    ]
    if not wrong:
        return
    for again, draws in ((_multiples, DRAWS), (_sums, MORE)):
        rows = _rounding_of_rows(graph, look, again(graph, look))
        rounding = _rounding(graph, blocks, rows, mode, draws)
        apart = _wrong(graph, blocks, look, rounding)
        wrong = [point for point, is_wrong in apart.items() if is_wrong]
        if not wrong:
            return
    raise NoSuchWayError(
        f"The Jacobian with respect to {graph.names[wrong[0]]} is not what a backward "
        f"pass gives. {_why_apart(graph, mode)}"
    )


def _why_apart(graph: Graph, mode: str) -> str:
    """Return what may be wrong, and what to do."""
    also = "it may also be that samples influence each other, or zero meets infinity"
    if mode not in BY_COLUMNS:
        return (
            "Most likely torch has another result for several rows at once, or a hook "
            f'changes gradients; {also}. Use mode="loop".'
        )
    dtype = narrowest_dtype(graph.drawing)
    also += f", or that derivatives cancel and {dtype} keeps too few digits of them"
    if mode == "split":
        also += ", or that what it is split at has no row for each sample"
    return (
        "Most likely the backward of an operation here has no graph of its own, which "
        f'columns need, or a hook changes gradients; {also}. Use mode="reverse".'
    )


def _is_right_at_once(graph: Graph, blocks: Mapping[Block, Tensor], look: Look) -> bool:
    """Tell by few operations whether all agree; False where that is in doubt."""
    norm: Callable[[Tensor], Tensor] = partial(
        cast(Any, torch.linalg).vector_norm, dtype=torch.float64
    )
    apart: list[Tensor] = []
    sizes: list[Tensor] = []
    for point, grad in enumerate(look.grads):
        if grad is None:
            return False
        total = reduce(torch.add, _parts(graph, blocks, look, point))
        apart.append(norm(total - grad))
        sizes.append(norm(total))
    close = closeness(graph)
    # Together, which waits for a GPU once.
    every = torch.stack([it.to(apart[0]) for it in (*apart, *sizes)])
    numbers: list[float] = cast(Any, every).tolist()
    pairs = zip(numbers, numbers[len(apart) :], strict=False)
    return all(a < close * b for a, b in pairs)


def _wrong(
    graph: Graph,
    blocks: Mapping[Block, Tensor],
    look: Look,
    rounding: Mapping[int, Tensor] | None = None,
) -> dict[int, Tensor]:
    """Return for each point whether the Jacobian disagrees with the VJP."""
    close = closeness(graph)
    wrong: dict[int, Tensor] = {}
    for point, grad in enumerate(look.grads):
        if grad is None:  # no way leads there, or a hook stopped it
            mine = [it for (_, of), it in blocks.items() if of == point]
            wrong[point] = torch.stack([it.count_nonzero() for it in mine]).sum() > 0
            continue
        total = torch.zeros_like(grad, dtype=torch.float64)
        size = torch.zeros((), dtype=torch.float64, device=grad.device)
        for parts in _parts(graph, blocks, look, point):
            size = size + _square(parts)
            total += parts
        apart = _square(total - grad)
        same = (total.isfinite() == grad.isfinite()).all()
        allowed = close**2 * size + (0 if rounding is None else rounding[point])
        wrong[point] = (apart > allowed) | ~same
    return wrong


def _parts(
    graph: Graph, blocks: Mapping[Block, Tensor], look: Look, point: int
) -> Iterator[Tensor]:
    """Yield each output's vector times its block, in the shape of the gradient.

    For a tensor that all samples share this is the sum over samples.
    """
    sums = 1 if graph.shared[point] else graph.batch
    for root, vector in enumerate(look.vectors):
        block = blocks[root, point].detach()
        rows = graph.batch * graph.rows(root) // max(1, sums)
        block = block.reshape(sums, rows, graph.columns(point))
        v = vector.reshape(sums, 1, rows).to(block)
        yield (v @ block).view_as(graph.points[point])


def _rounding(
    graph: Graph,
    blocks: Mapping[Block, Tensor],
    rows: tuple[dict[int, Tensor], Tensor],
    mode: str,
    draws: int,
) -> dict[int, Tensor]:
    """Return the square of how far rounding may move each point's gradient.

    Where derivatives cancel, rounding is all that is left. VJPs and JVPs are linear, so
    those of multiples and sums differ from multiples and sums of them by rounding only.
    """
    squares, most = rows
    if mode in BY_COLUMNS and not _samples_mix(graph):  # mixing is no rounding
        for point, off in squares.items():
            in_columns = _rounding_of_columns(graph, blocks, point, draws).to(off)
            if mode == "split":  # its tensor's first axis may not be the samples
                in_columns = torch.minimum(in_columns, most.to(off))
            squares[point] = torch.maximum(off, in_columns)
    return {point: ROUNDING**2 * off for point, off in squares.items()}


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
    eps = torch.finfo(narrowest_dtype(graph.drawing)).eps
    squares: dict[int, Tensor] = {}
    limits: list[Tensor] = []
    for others, largest in again:
        limits.append(min(eps, (MANY * eps) ** 2) * largest)
        for point, (grad, it) in enumerate(zip(look.grads, others, strict=True)):
            if grad is not None and it is not None:
                off = _square(it - grad)
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
                _square(_along(graph, blocks[root, point], point, u) - asked.double())
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
    squares: list[Tensor] = [_square(it) for it in vectors]

    def seen(grads: Sequence[Tensor | None]) -> None:
        squares.extend(_square(it) for it in grads if it is not None)

    hooks = [cast(Any, node).register_prehook(seen) for node in graph.nodes]
    try:
        grads = vjp(graph.roots, graph.points, vectors)
    finally:
        for hook in hooks:
            hook.remove()
    return grads, torch.stack([it.to(squares[0]) for it in squares]).max()


def _square(values: Tensor) -> Tensor:
    """Return the sum of the squares of finite values, without waiting for a GPU."""
    values = values.detach().double()
    return values.where(values.isfinite(), 0).square().sum()
