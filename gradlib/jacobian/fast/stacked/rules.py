"""The backward of each known operation, by the name of its node."""

from collections.abc import Callable
from typing import TypeAlias

from torch import Tensor

from gradlib.jacobian.fast.moves import (
    PERMUTED,
    RESHAPED,
    SELECTED,
    SLICED,
    SUMMED,
)
from gradlib.jacobian.fast.operation import FACTORS, Operation
from gradlib.jacobian.fast.slopes import ELEMENTWISE, SCALED, slopes
from gradlib.jacobian.fast.stacked import convolving, mixing, moving
from gradlib.jacobian.fast.stacked.back import Back, Scale, sum_to_shape, times

Rule: TypeAlias = Callable[[Operation], Back | None]


def _scaled(by: Callable[[Operation], tuple[float, ...]]) -> Rule:
    return lambda op: _summed_up(op, times(*by(op)))


def _summed_up(op: Operation, back: Scale) -> Back:
    """Return a backward that also sums over axes along which inputs were broadcast."""
    broadcast = {i: shape for i, shape in op.shapes.items() if shape != op.shape}
    if not broadcast:
        return back

    def with_sums(grad: Tensor) -> dict[int, Tensor]:
        grads = back(grad).items()
        return {i: sum_to_shape(it, broadcast.get(i, op.shape)) for i, it in grads}

    return with_sums


def _elementwise(op: Operation) -> Back | None:
    by_input = slopes(op)
    if by_input.keys() != op.shapes.keys():
        return None
    return _summed_up(op, lambda grad: {i: grad * it for i, it in by_input.items()})


REDUCED = tuple(
    f"{it}Backward0"
    for it in ("Amax", "Amin", "LinalgVectorNorm", "Logsumexp", "Max", "Min")
)
"""The names of the nodes that make one number of several, with slopes of their own."""

RULES: dict[str, Rule] = {
    **{name: _scaled(by) for name, by in SCALED.items()},
    **dict.fromkeys(RESHAPED, moving.reshaped),
    **dict.fromkeys(ELEMENTWISE, _elementwise),
    **dict.fromkeys(PERMUTED, moving.permuted),
    **dict.fromkeys(SELECTED, moving.selected),
    **dict.fromkeys(SLICED, moving.sliced),
    **dict.fromkeys(SUMMED, moving.summed),
    "CatBackward0": moving.concatenated,
    "StackBackward0": moving.stacked,
    **dict.fromkeys(REDUCED, mixing.reduced),
    "CumsumBackward0": mixing.cumsum,
    **dict.fromkeys(FACTORS, mixing.addmm),
    "MmBackward0": mixing.mm,
    "BmmBackward0": mixing.mm,
    "SoftmaxBackward0": mixing.softmax,
    "SafeSoftmaxBackward0": mixing.softmax,
    "LogSoftmaxBackward0": mixing.log_softmax,
    "NativeLayerNormBackward0": mixing.layer_norm,
    "FusedRmsNormBackward0": mixing.rms_norm,
    "NativeGroupNormBackward0": mixing.group_norm,
    "ConvolutionBackward0": convolving.convolution,
    "ScaledDotProductFlashAttentionForCpuBackward0": mixing.attention,
    "ScaledDotProductEfficientAttentionBackward0": mixing.attention,
}
