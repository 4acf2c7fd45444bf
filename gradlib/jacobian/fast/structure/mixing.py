"""Rules of operations that mix entries: products, norms, softmax, attention."""

import math
from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from gradlib.jacobian.fast.attention import read
from gradlib.jacobian.fast.operation import FACTORS, Operation
from gradlib.jacobian.fast.structure.named_axes import Dims, fresh
from gradlib.jacobian.fast.structure.step import Back, Step, same


def addmm(op: Operation) -> dict[int, Back]:
    """A matrix plus a product of two, or a batch of those."""
    left, right = map(op.saved, FACTORS[op.node.name()])
    product = _product(op, left, right, op.saved("alpha"))
    return same(op.saved("beta")) | {i + 1: it for i, it in product.items()}


def mm(op: Operation) -> dict[int, Back]:
    """A product of two matrices, or of batches of them."""
    return _product(op, op.saved("self"), op.saved("mat2"), 1)


def _product(
    op: Operation, left: Tensor | None, right: Tensor | None, scale: float
) -> dict[int, Back]:
    """Return the maps of a product of matrices, or of batches of them."""

    def to_left(other: Tensor, dims: Dims) -> Step:
        *batch, rows, columns = dims
        (inner,) = fresh([other.shape[-2]])
        factor = (other, (*batch, inner, columns))
        work = math.prod(op.shape) * other.shape[-2]
        return Step((*batch, rows, inner), (factor,), scale, work)

    def to_right(other: Tensor, dims: Dims) -> Step:
        *batch, rows, columns = dims
        (inner,) = fresh([other.shape[-1]])
        factor = (other, (*batch, rows, inner))
        work = math.prod(op.shape) * other.shape[-1]
        return Step((*batch, inner, columns), (factor,), scale, work)

    maps: dict[int, Back] = {}
    if right is not None:
        maps[0] = partial(to_left, right)
    if left is not None:
        maps[1] = partial(to_right, left)
    return maps


def softmax(op: Operation) -> dict[int, Back]:
    """A softmax."""
    p = op.saved("result").movedim(op.dim(), -1)
    if p.numel() * p.shape[-1] > op.most:
        return {}
    return {0: _along(op, [op.dim()], _softmax_slope(p))}


def _softmax_slope(p: Tensor) -> Tensor:
    """Return the Jacobian of a softmax along the last dimension, from its result."""
    return p.diag_embed() - p[..., None] * p[..., None, :]


def log_softmax(op: Operation) -> dict[int, Back]:
    """A log-softmax."""
    p = op.saved("result").movedim(op.dim(), -1).exp()[..., None, :]
    if p.numel() * p.shape[-1] > op.most:
        return {}
    eye = torch.eye(p.shape[-1], dtype=p.dtype, device=p.device)
    return {0: _along(op, [op.dim()], eye - p)}


def _along(op: Operation, over: Sequence[int], matrix: Tensor) -> Back:
    """Return the map of an operation that mixes the entries along some dimensions.

    Args:
        op: The operation.
        over: The dimensions.
        matrix: The Jacobian along them, for each entry of the other dimensions,
            ``(*others, out, in)``.
    """

    def back(dims: Dims) -> Step:
        others = tuple(axes for i, axes in enumerate(dims) if i not in over)
        new = fresh(op.shape)
        came = tuple(axis for i in over for axis in dims[i])
        went = tuple(axis for i in over for axis in new[i])
        before = tuple(new[i] if i in over else axes for i, axes in enumerate(dims))
        return Step(
            before, ((matrix, (*others, came, went)),), work=8 * math.prod(op.shape)
        )

    return back


def layer_norm(op: Operation) -> dict[int, Back]:
    """A layer norm."""
    count = len(op.saved("normalized_shape"))
    mean, rstd = (op.saved(it).flatten(-count) for it in ("result1", "result2"))
    normal = (op.saved("input").flatten(-count) - mean) * rstd
    return _scaled(op, normal, rstd, 1 / normal.shape[-1])


def rms_norm(op: Operation) -> dict[int, Back]:
    """An RMS norm, which subtracts no mean."""
    count = len(op.saved("normalized_shape"))
    rstd = op.saved("result1").flatten(-count)
    return _scaled(op, op.saved("input").flatten(-count) * rstd, rstd, 0)


def _scaled(
    op: Operation, normal: Tensor, rstd: Tensor, subtracted: float
) -> dict[int, Back]:
    """Return the map of a norm.

    Args:
        op: The operation.
        normal: The normalized input, before the weight.
        rstd: The factor that normalizes it.
        subtracted: The share of each entry in what is subtracted from all: one divided
            by their number for a mean, else 0.
    """
    count, size = len(op.saved("normalized_shape")), normal.shape[-1]
    if normal.numel() * size > op.most:
        return {}
    matrix = torch.eye(size, **op.like) - subtracted
    matrix = matrix - normal[..., None] * (normal[..., None, :] / size)
    matrix *= rstd[..., None]
    if op.saved("weight") is not None:
        matrix *= op.saved("weight").flatten()[:, None]
    return {0: _along(op, range(len(op.shape) - count, len(op.shape)), matrix)}


def attention(op: Operation) -> dict[int, Back]:
    """Return the maps of attention, whose probabilities are computed again."""
    saved = read(op)
    if saved is None or saved.entries * saved.key.shape[-2] > op.most:
        return {}
    q, k, v, scale = saved[:4]
    p = saved.probabilities()
    slope = _softmax_slope(p) * scale
    work = p.numel() * q.shape[-1]

    def to_either(other: Tensor, of_keys: bool, dims: Dims) -> Step:
        *batch, queries, out = dims
        keys, probed, inner = fresh([k.shape[-2], k.shape[-2], q.shape[-1]])
        mine, theirs = (keys, queries) if of_keys else (queries, keys)
        factors = (
            (v, (*batch, probed, out)),
            (slope, (*batch, queries, probed, keys)),
            (other, (*batch, theirs, inner)),
        )
        return Step((*batch, mine, inner), factors, work=2 * work)

    def to_value(dims: Dims) -> Step:
        *batch, queries, out = dims
        (keys,) = fresh([k.shape[-2]])
        factor = (p, (*batch, queries, keys))
        return Step((*batch, keys, out), (factor,), work=work)

    to_query, to_key = partial(to_either, k, False), partial(to_either, q, True)
    return {0: to_query, 1: to_key, 2: to_value}
