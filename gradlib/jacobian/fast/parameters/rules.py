"""The block of a parameter, for each operation that may use it."""

import math
import operator
from collections.abc import Callable
from typing import TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor

from gradlib.jacobian.fast.operation import of_each_axis
from gradlib.jacobian.fast.parameters.use import Samples, Use
from gradlib.jacobian.passes import chunks

Scale: TypeAlias = Callable[[Tensor], Tensor]

Write: TypeAlias = Callable[[Tensor, Tensor], None]
"""From gradients of the operation's output, ``(rows, batch, *out)``, writes rows of the
parameter's block, ``(batch, rows, *param)``."""

Rule: TypeAlias = Callable[[Use, Samples, Tensor], Write | None]
"""From a parameter's use and value to what writes its block; ``None`` if not known."""

COLUMNS = 2**24
"""How many bytes of a convolution's input are unfolded at once."""


def products(use: Use, param: Tensor) -> int:
    """Return the multiply-adds of one row of all samples, after the backward pass."""
    if use.node.name() not in PRODUCTS or param.dim() < 2:
        return 0
    channels = use.shape[PRODUCTS[use.node.name()]]
    return math.prod(use.shape) // channels * param.numel()


def _matrix(name: str, scale: str | None = None) -> Rule:
    """Return the rule of a parameter that a saved matrix is multiplied by.

    Args:
        name: The name of the saved matrix.
        scale: The name of a saved factor of the product, if there is one.
    """

    def rule(use: Use, samples: Samples, _param: Tensor) -> Write | None:
        x = samples.first(use.saved(name)).flatten(1, -2)  # (batch, tokens, in)
        alpha = 1 if scale is None else use.saved(scale)

        def write(grads: Tensor, into: Tensor) -> None:
            g = grads.flatten(2, -2).transpose(0, 1)  # (batch, rows, tokens, out)
            g = g if alpha == 1 else g * alpha
            if x.shape[1] == 1 and use.turned:
                torch.mul(g.mT, x[:, None], out=into)
            elif x.shape[1] == 1:
                torch.mul(x[:, None].mT, g, out=into)
            elif use.turned:
                torch.bmm(g.mT.flatten(1, 2), x, out=into.flatten(1, 2))
            else:
                for row in range(into.shape[1]):
                    torch.bmm(x.mT, g[:, row], out=into[:, row])

        return write

    return rule


def _spread(use: Use, samples: Samples, param: Tensor, scale: Scale) -> Write | None:
    """Return what writes the block of a parameter that is broadcast to the samples."""
    if not _spreads(use, samples, param):
        return None
    return lambda grads, into: _sum(scale(grads), param, samples, into)


def _by(number: float) -> Scale:
    return lambda grads: grads if number == 1 else grads * number


def _bias(use: Use, samples: Samples, param: Tensor) -> Write | None:
    return _spread(use, samples, param, _by(use.saved("beta")))


def _added(use: Use, samples: Samples, param: Tensor) -> Write | None:
    factor = 1
    if use.index and use.node.name() != "ExpandBackward0":
        factor = use.saved("alpha") * (-1 if use.node.name() == "SubBackward0" else 1)
    return _spread(use, samples, param, _by(factor))


def _multiplied(use: Use, samples: Samples, param: Tensor) -> Write | None:
    other = use.saved("self" if use.index else "other")
    other = samples.first(other.expand(use.shape))
    return _spread(use, samples, param, other.mul)


def _layer_norm(use: Use, samples: Samples, param: Tensor) -> Write | None:
    if use.index == 2:
        return _spread(use, samples, param, _by(1))
    x, mean, rstd = (use.saved(it) for it in ("input", "result1", "result2"))
    return _spread(use, samples, param, samples.first((x - mean) * rstd).mul)


def _group_norm(use: Use, _samples: Samples, _param: Tensor) -> Write:
    x, mean, rstd = (use.saved(it) for it in ("input", "result1", "result2"))
    shape = *mean.shape, 1
    normal = x.reshape(*mean.shape, -1) - mean.view(shape)
    return _of_channels(use, (normal * rstd.view(shape)).view(x.shape))


def _batch_norm(use: Use, _samples: Samples, _param: Tensor) -> Write | None:
    if use.saved("training"):  # it mixes the samples
        return None
    x, mean, variance = map(use.saved, ("input", "running_mean", "running_var"))
    shape = -1, *(1,) * (x.dim() - 2)
    is_cudnns = use.node.name() == "CudnnBatchNormBackward0"
    rstd = (variance + use.saved("epsilon" if is_cudnns else "eps")).rsqrt()
    return _of_channels(use, (x - mean.view(shape)) * rstd.view(shape))


def _of_channels(use: Use, normal: Tensor) -> Write:
    """Return what writes the block of a norm's weight or bias, one for each channel."""

    def write(grads: Tensor, into: Tensor) -> None:
        _sum_places(grads if use.index == 2 else grads * normal, into)

    return write


def _filters(use: Use, samples: Samples, param: Tensor) -> Write | None:
    if use.saved("transposed"):
        return None
    x, groups = use.saved("input"), use.saved("groups")
    inside, places = tuple(param.shape[2:]), use.shape[2:]
    axes = len(inside)
    pad = [
        it
        for it in reversed(of_each_axis(use.saved("padding"), axes))
        for _ in range(2)
    ]
    size = x.shape[1] * math.prod((*inside, *places)) * x.element_size()
    step = max(1, COLUMNS // max(1, size))

    def columns(x: Tensor) -> Tensor:  # torch's unfold takes several times as long
        x = F.pad(x, pad).contiguous()
        steps = x.stride()[2:]
        within = map(operator.mul, of_each_axis(use.saved("dilation"), axes), steps)
        along = map(operator.mul, of_each_axis(use.saved("stride"), axes), steps)
        strides = (*x.stride()[:2], *within, *along)
        windows = x.as_strided((*x.shape[:2], *inside, *places), strides)
        return windows.reshape(len(x), groups, -1, math.prod(places))

    def write(grads: Tensor, into: Tensor) -> None:
        for start, length in chunks(samples.batch, step):
            ours = slice(start, start + length)
            unfolded = columns(x[ours]).mT
            g = grads[:, ours].flatten(3).transpose(0, 1)
            if groups == 1:
                part = into[ours].flatten(3).flatten(1, 2)
                torch.bmm(g.flatten(1, 2), unfolded[:, 0], out=part)
                continue
            rows, size = g.shape[1], g.shape[2] // groups
            g = g.reshape(length, rows, groups, size, -1).transpose(1, 2)
            product = g.flatten(2, 3) @ unfolded
            product = product.view(length, groups, rows, size, -1).transpose(1, 2)
            into[ours].copy_(product.reshape(into[ours].shape))

    return write


def _table(use: Use, samples: Samples, param: Tensor) -> Write | None:
    if use.saved("scale_grad_by_freq"):
        return None
    indices = samples.first(use.saved("indices")).reshape(samples.batch, -1)
    constant = use.saved("padding_idx")

    def write(grads: Tensor, into: Tensor) -> None:
        g = grads.reshape(len(grads), *indices.shape, -1).transpose(0, 1)
        into.zero_().scatter_add_(2, indices[:, None, :, None].expand_as(g), g)
        if 0 <= constant < len(param):
            into[:, :, constant] = 0

    return write


def _spreads(use: Use, samples: Samples, param: Tensor) -> bool:
    """Tell whether a parameter is broadcast along the samples of the output."""
    whole = (1,) * (len(use.shape) - param.dim()) + tuple(param.shape)
    return whole[0 if samples.of_rows else samples.axis] == 1


def _sum_places(grads: Tensor, into: Tensor) -> None:
    """Write sums over places of gradients ``(rows, batch, channels, *places)``."""
    into.copy_(grads.unsqueeze(-1).flatten(3).sum(3).transpose(0, 1))


def _sum(grads: Tensor, param: Tensor, samples: Samples, into: Tensor) -> None:
    """Write sums of gradients ``(rows, batch, *rest)`` over a parameter's broadcast."""
    missing = grads.dim() - 1 - param.dim() - samples.of_rows
    whole = [*[1] * missing, *param.shape]
    if samples.of_rows:
        whole = [1, *whole]
    del whole[samples.axis]
    same = [2 + i for i, size in enumerate(whole) if size == 1]
    grads = grads.sum(same, keepdim=True) if same else grads
    into.copy_(grads.transpose(0, 1).reshape(into.shape))


TOKENWISE = frozenset(
    {
        "AddBackward0",
        "EmbeddingBackward0",
        "ExpandBackward0",
        "MulBackward0",
        "NativeLayerNormBackward0",
        "SubBackward0",
    }
)
"""Operations whose samples may be on the second axis."""

PRODUCTS = {"AddmmBackward0": -1, "ConvolutionBackward0": 1, "MmBackward0": -1}
"""The axis of the channels in the output of each product."""

TURNED = (("AddmmBackward0", 2), ("MmBackward0", 1))
"""Operations that may take a parameter transposed, and as which input."""

KNOWN: dict[str, dict[int, Rule]] = {
    "AddBackward0": {0: _added, 1: _added},
    "AddmmBackward0": {0: _bias, 2: _matrix("mat1", "alpha")},
    "ConvolutionBackward0": {
        1: _filters,
        2: lambda _use, _samples, _param: _sum_places,
    },
    "CudnnBatchNormBackward0": {1: _batch_norm, 2: _batch_norm},
    "EmbeddingBackward0": {0: _table},
    "ExpandBackward0": {0: _added},
    "MmBackward0": {1: _matrix("self")},
    "MulBackward0": {0: _multiplied, 1: _multiplied},
    "NativeBatchNormBackward0": {1: _batch_norm, 2: _batch_norm},
    "NativeGroupNormBackward0": {1: _group_norm, 2: _group_norm},
    "NativeLayerNormBackward0": {1: _layer_norm, 2: _layer_norm},
    "SubBackward0": {0: _added, 1: _added},
}
"""The rule for each operation and the position of its input."""
