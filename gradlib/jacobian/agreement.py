"""Whether a Jacobian agrees with a VJP, but for rounding."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial, reduce
from typing import Any, cast

import torch
from torch import Tensor

from gradlib.errors import NoSuchWayError
from gradlib.jacobian.forward import BY_COLUMNS
from gradlib.jacobian.graph import Graph
from gradlib.jacobian.look import Look
from gradlib.jacobian.pieces import Block
from gradlib.jacobian.rounding import roundings, square

CLOSE = {torch.float64: 1e-6, torch.float32: 1e-3}
"""By which part of a slope the Jacobian's may differ, for each dtype."""

COARSE = 0.05
"""The same for narrower dtypes, and where a GPU may use TF32."""


def closeness(graph: Graph) -> float:
    """Return by which part two slopes may differ, given the precision of gradients.

    That precision is lower where a dtype on the way is narrow, or a GPU uses TF32.
    """
    dtype, device = graph.drawing.narrowest_dtype, graph.points[0].device
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
    wrong: list[int] = []
    for rounding in roundings(graph, blocks, look, mode):
        wrong = _wrong(graph, blocks, look, rounding)
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
    dtype = graph.drawing.narrowest_dtype
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
    rounding: Mapping[int, Tensor],
) -> list[int]:
    """Return the points at which the Jacobian disagrees with the VJP."""
    close = closeness(graph)
    wrong: list[int] = []
    for point, grad in enumerate(look.grads):
        if grad is None:  # no way leads there, or a hook stopped it
            if any(it.any() for (_, of), it in blocks.items() if of == point):
                wrong.append(point)
            continue
        total = torch.zeros_like(grad, dtype=torch.float64)
        size = torch.zeros((), dtype=torch.float64, device=grad.device)
        for parts in _parts(graph, blocks, look, point):
            size = size + square(parts)
            total += parts
        apart = square(total - grad)
        same = (total.isfinite() == grad.isfinite()).all()
        allowed = close**2 * size + rounding.get(point, 0)
        if (apart > allowed) | ~same:
            wrong.append(point)
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
