"""The way forward through each operation that is known, by the name of its node."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor

from gradlib.jacobian.fast import moves
from gradlib.jacobian.fast.chains.layers import aten
from gradlib.jacobian.fast.moves import RESHAPED
from gradlib.jacobian.fast.operation import Operation
from gradlib.jacobian.fast.slopes import ELEMENTWISE, slopes
from gradlib.jacobian.fast.stacked import mixing
from gradlib.jacobian.fast.stacked.back import Back, Part
from gradlib.jacobian.fast.stacked.convolving import Convolution, read, way_back

Forth: TypeAlias = Callable[[Mapping[int, Tensor]], Tensor]
"""From the tangents of what went in, ``(vectors, *in)``, by position, to that of what
came out, ``(vectors, *out)``. Some may be missing: they are zero."""

Rule: TypeAlias = Callable[[Operation], Forth | None]


def _of_one(push: Callable[[Tensor], Tensor]) -> Forth:
    """Return the way from what went in alone."""
    return lambda given: push(given[0])


def _weighted(op: Operation, weights: Mapping[int, Any]) -> Forth:
    """Return the way to a sum, with a number or a slope for each."""
    shape = op.shape
    scales = {i: it for i, it in weights.items() if isinstance(it, Tensor) or it != 1}

    def part(i: int, tangent: Tensor) -> Tensor:
        fitted = _fitted(tangent, shape)
        return fitted * scales[i] if i in scales else fitted

    def push(given: Mapping[int, Tensor]) -> Tensor:
        first, *others = (part(i, it) for i, it in given.items())
        for other in others:
            first = first + other
        return first.expand(-1, *shape)

    return push


def _fitted(tangent: Tensor, shape: Sequence[int]) -> Tensor:
    """Return a tangent with as many axes as what came out, to be broadcast to it."""
    more = 1 + len(shape) - tangent.dim()
    if not more:
        return tangent
    count, *size = tangent.shape
    return tangent.reshape(count, *[1] * more, *size)


def _sum(op: Operation) -> Forth:
    return _weighted(op, {0: 1, 1: op.saved("alpha")})


def _difference(op: Operation) -> Forth:
    return _weighted(op, {0: 1, 1: -op.saved("alpha")})


def _unchanged(op: Operation) -> Forth:
    return _weighted(op, {0: 1})


def _negated(op: Operation) -> Forth:
    return _weighted(op, {0: -1})


def _elementwise(op: Operation) -> Forth | None:
    return _along_all(op, slopes(op))


def _along_all(op: Operation, found: dict[int, Tensor]) -> Forth | None:
    return _weighted(op, found) if found.keys() == op.shapes.keys() else None


def _reshaped(op: Operation) -> Forth:
    return _of_one(lambda t: t.reshape(t.size(0), *op.shape))


def _permuted(op: Operation) -> Forth:
    order = [1 + it for it in moves.order(op)]
    return _of_one(lambda t: t.permute(0, *order))


def _transposed(op: Operation) -> Forth:
    one, other = moves.exchanged(op)
    return _of_one(lambda t: t.transpose(1 + one, 1 + other))


def _selected(op: Operation) -> Forth:
    return _row(*moves.selected(op))


def _unbound(op: Operation) -> Forth:
    return _row(*moves.unbound(op))


def _row(dim: int, index: int) -> Forth:
    return _of_one(lambda t: t.select(1 + dim, index))


def _sliced(op: Operation) -> Forth:
    return _rows(moves.sliced(op))


def _split(op: Operation) -> Forth:
    return _rows(moves.split(op))


def _rows(picked: moves.Rows) -> Forth:
    return _of_one(lambda t: _at(t, picked))


def _at(tangent: Tensor, picked: moves.Rows) -> Tensor:
    """Return some rows of a tangent, as a view."""
    rows = slice(picked.rows.start, picked.rows.stop, picked.rows.step)
    return tangent[(slice(None),) * (1 + picked.dim) + (rows,)]


def _concatenated(op: Operation) -> Forth | None:
    found = moves.joined(op)
    return _placed(op, found) if found.keys() == op.shapes.keys() else None


def _placed(op: Operation, rows: Mapping[int, moves.Rows]) -> Forth:
    """Return the way to what holds each of several tensors in some rows."""

    def push(given: Mapping[int, Tensor]) -> Tensor:
        some = next(iter(given.values()))
        made = some.new_zeros(len(some), *op.shape)
        for i, tangent in given.items():
            _at(made, rows[i]).copy_(tangent)
        return made

    return push


def _averaged(op: Operation) -> Forth:
    gone, count = moves.reduced(op)
    return _reduced(op, gone, 1 / max(1, count))


def _summed(op: Operation) -> Forth:
    return _reduced(op, moves.reduced(op)[0], 1)


def _reduced(op: Operation, gone: Sequence[int], scale: float) -> Forth:
    dims = [1 + it for it in gone]
    return _of_one(lambda t: (t.sum(dims) * scale).view(t.size(0), *op.shape))


def _addmm(op: Operation) -> Forth | None:
    alpha, beta = op.saved("alpha"), op.saved("beta")
    return _product(op, 1, op.saved("mat2"), alpha) if beta == 1 else None


def _mm(op: Operation) -> Forth | None:
    return _product(op, 0, op.saved("mat2"), 1)


def _product(
    op: Operation, place: int, matrix: Tensor | None, scale: float
) -> Forth | None:
    """Return the way through the product of what stands in a place with a matrix."""
    if matrix is None or set(op.shapes) != {place}:
        return None
    matrix = matrix.detach() * scale if scale != 1 else matrix.detach()
    push = _once(_as_samples(lambda t: t @ matrix))
    return lambda given: push(given[place])


def _softmax(op: Operation) -> Forth:
    back = mixing.softmax(op)  # its matrix is symmetric
    return _of_one(lambda t: _whole(back(t)))


def _log_softmax(op: Operation) -> Forth:
    p, dim = op.saved("result").detach().exp(), 1 + op.dim()
    return _of_one(lambda t: t - (t * p).sum(dim, keepdim=True))


def _layer_norm(op: Operation) -> Forth | None:
    return _normed(mixing.layer_norm(op, plain=True), op.saved("weight"))


def _group_norm(op: Operation) -> Forth | None:
    weight: Tensor | None = op.saved("weight")
    if weight is not None:
        weight = weight.view(-1, *[1] * (len(op.shape) - 2))
    return _normed(mixing.group_norm(op, plain=True), weight)


def _normed(back: Back | None, weight: Tensor | None) -> Forth | None:
    """Return the way through a norm: without its weight its matrix is symmetric."""
    if back is None:
        return None
    scale = 1 if weight is None else weight.detach()
    return _of_one(lambda t: _whole(back(t)) * scale)


def _whole(grads: Mapping[int, Tensor | Part]) -> Tensor:
    """Return the gradient of what alone went in."""
    grad = grads[0]
    assert isinstance(grad, Tensor), "it is no part"
    return grad


def _convolved(op: Operation) -> Forth | None:
    if set(op.shapes) != {0}:
        return None
    push = _through(read(op, op.shapes[0][1:]), op.shape[1:])
    return _of_one(_once(_as_samples(push)))


def _through(it: Convolution, size: Sequence[int]) -> Callable[[Tensor], Tensor]:
    """Return the way through a convolution, to outputs of a size."""
    if it.transposed and _is_way_back(it):
        return way_back(it.turned_back(size))
    return lambda t: torch.convolution(t, it.weight, None, *it[2:])


def _is_way_back(it: Convolution) -> bool:
    """Tell whether a transposed convolution goes forward as another goes back.

    One that puts as many places at the far edge as its strides are long has more places
    than another may begin with.
    """
    moves = zip(it.output_padding, it.stride, strict=True)
    return all(more < stride for more, stride in moves)


def _as_samples(push: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """Return the way of all vectors, as if they were more samples."""

    def go(t: Tensor) -> Tensor:
        made = push(t.flatten(0, 1))
        return made.view(*t.shape[:2], *made.shape[1:])

    return go


def _once(push: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """Return a way that is gone once for all samples, where their tangents are one.

    So they are as far as no slope of a sample's own has come into them.
    """

    def go(t: Tensor) -> Tensor:
        count = t.size(1)
        if t.stride(1) or count == 1:
            return push(t)
        made = push(t[:, :1])
        return made.expand(-1, count, *made.shape[2:])

    return go


def _by_kernel(kernel: Any, *names: str) -> Rule:
    """Return the rule of an operation that is linear, and does not look at places.

    Args:
        kernel: torch's.
        names: What the node has saved of what it takes.
    """

    def rule(op: Operation) -> Forth:
        rest = [op.saved(name) for name in names]
        return _of_one(_as_samples(lambda t: kernel(t, *rest)))

    return rule


def _largest(op: Operation) -> Forth:
    places = op.saved("result1").flatten(-2)
    shape = op.shape

    def push(tangent: Tensor) -> Tensor:
        found = tangent.flatten(-2).gather(
            -1, places.expand(len(tangent), *places.shape)
        )
        return found.view(len(tangent), *shape)

    return _of_one(push)


RULES: dict[str, Rule] = {
    "AddBackward0": _sum,
    "SubBackward0": _difference,
    "AddBackward1": _unchanged,
    "NegBackward0": _negated,
    "CloneBackward0": _unchanged,
    "AliasBackward0": _unchanged,
    "ExpandBackward0": _unchanged,
    "TransposeBackward0": _transposed,
    "TBackward0": _transposed,
    "PermuteBackward0": _permuted,
    "SelectBackward0": _selected,
    "UnbindBackward0": _unbound,
    "SliceBackward0": _sliced,
    "SplitBackward0": _split,
    "SplitWithSizesBackward0": _split,
    "CatBackward0": _concatenated,
    "MeanBackward1": _averaged,
    "SumBackward1": _summed,
    "AddmmBackward0": _addmm,
    "MmBackward0": _mm,
    "SoftmaxBackward0": _softmax,
    "LogSoftmaxBackward0": _log_softmax,
    "NativeLayerNormBackward0": _layer_norm,
    "NativeGroupNormBackward0": _group_norm,
    "ConvolutionBackward0": _convolved,
    "MaxPool2DWithIndicesBackward0": _largest,
    "AvgPool2DBackward0": _by_kernel(
        aten.avg_pool2d.default,
        *("kernel_size", "stride", "padding"),
        *("ceil_mode", "count_include_pad", "divisor_override"),
    ),
    "UpsampleNearest2DBackward0": _by_kernel(
        aten.upsample_nearest2d.default, "output_size", "scales_h", "scales_w"
    ),
    "UpsampleBilinear2DBackward0": _by_kernel(
        aten.upsample_bilinear2d.default,
        *("output_size", "align_corners", "scales_h", "scales_w"),
    ),
    "PixelShuffleBackward0": _by_kernel(aten.pixel_shuffle.default, "upscale_factor"),
    "PixelUnshuffleBackward0": _by_kernel(
        aten.pixel_unshuffle.default, "downscale_factor"
    ),
    **dict.fromkeys(RESHAPED, _reshaped),
    **dict.fromkeys(ELEMENTWISE, _elementwise),
}
