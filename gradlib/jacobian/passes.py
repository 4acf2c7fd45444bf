"""Backward passes through a graph, several at once where torch can do that."""

import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from gradlib.edges import Differentiable
from gradlib.jacobian.retained import drop_filled
from gradlib.private.modes import for_several

_MAY_SHARE = torch.__version__ >= "2.9"
"""Whether an FFT on a CPU takes samples that share memory; in torch 2.8 it fails."""


def pull(
    output: Differentiable,
    inputs: Sequence[Differentiable],
    vectors: Tensor,
    *,
    create_graph: bool = False,
) -> list[Tensor | None]:
    """Return the VJPs of several vectors, in one pass, and keep the graph.

    With more than one vector, every node must be able to work on batched values.

    Args:
        output: The tensor y that the pass begins at, or an edge of a graph.
        inputs: The tensors x, or edges, that it ends at.
        vectors: The cotangents, ``(count, *y.shape)``.
        create_graph: Whether the result has a graph too.

    Returns:
        For each input ``(count, *x.shape)``, or ``None`` where no way leads to it.
    """
    if len(vectors) == 1:
        vjps = vjp([output], inputs, [vectors[0]], create_graph=create_graph)
        return [None if grad is None else grad.unsqueeze(0) for grad in vjps]
    reached: list[bool] = []

    def one(v: Tensor) -> list[Tensor]:
        vjps = vjp([output], inputs, [v], create_graph=create_graph)
        reached[:] = [it is not None for it in vjps]
        return [it for it in vjps if it is not None]

    try:
        # Not is_grads_batched=True: its vmap is an older one without rules for
        # convolutions and norms, which loop over the vectors there.
        grads = iter(for_several(one, vectors))
    finally:
        drop_filled()
    return [next(grads) if it else None for it in reached]


def one_hot(count: int, like: Tensor, start: int, length: int) -> Tensor:
    """Return unit vectors ``start``, ``start + 1`` and so on.

    Args:
        count: How many there are.
        like: A tensor of the dtype and on the device they shall have.
        start: Which entry of the first vector is 1.
        length: The length of each vector.

    Returns:
        ``(count, length)``.
    """
    if count == length and type(like) is Tensor:
        return torch.eye(count, dtype=like.dtype, device=like.device)
    made = like.new_zeros(count, length)
    made.diagonal(start).fill_(1)
    return made


def one_hot_for_all(
    count: int, like: Tensor, start: int, shape: Sequence[int]
) -> Tensor:
    """Return unit vectors ``start``, ``start + 1`` and so on, for every sample.

    Args:
        count: How many there are.
        like: A tensor of the dtype and on the device they shall have.
        start: Which entry of each sample's first vector is 1.
        shape: ``(batch, ...)``.

    Returns:
        ``(count, batch, ...)``; the samples share memory where torch allows it.
    """
    batch, *out = shape
    made = one_hot(count, like, start, math.prod(out))
    made = made.view(count, 1, *out).expand(count, batch, *out)
    return made if count > 1 or _MAY_SHARE else made.contiguous()


def chunks(total: int, size: int) -> Iterator[tuple[int, int]]:
    """Return where each chunk starts, and how long it is."""
    for start in range(0, total, size):
        yield start, min(size, total - start)


def vjp(
    outputs: Sequence[Differentiable],
    inputs: Sequence[Differentiable],
    vectors: Sequence[Tensor],
    *,
    create_graph: bool = False,
) -> list[Tensor | None]:
    """Return the VJP of a vector for each output, dense, and keep the graph."""
    grad: Any = torch.autograd.grad  # its stubs know no edge among tensors
    grads: Sequence[Tensor | None] = grad(
        outputs,
        list(inputs),
        vectors,
        retain_graph=True,
        create_graph=create_graph,
        allow_unused=True,
    )
    return [
        # An embedding may give a sparse one.
        it.to_dense() if it is not None and it.layout != torch.strided else it
        for it in grads
    ]
