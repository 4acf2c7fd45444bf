"""The derivatives of known operations, in named axes.

Each rule reads a node's saved tensors, and gives a map for each input of its operation:
from the axes of the output to those of the input, and the factors between the two.
"""

from collections.abc import Callable
from typing import TypeAlias

from torch import Tensor

from gradlib.jacobian.fast.moves import PERMUTED, RESHAPED, SELECTED, SLICED, SUMMED
from gradlib.jacobian.fast.operation import FACTORS, Operation
from gradlib.jacobian.fast.slopes import ELEMENTWISE, SCALED, slopes
from gradlib.jacobian.fast.structure import mixing, moving
from gradlib.jacobian.fast.structure.step import Back, Step, same

Rule: TypeAlias = Callable[[Operation], dict[int, Back]]


def _scaled(by: Callable[[Operation], tuple[float, ...]]) -> Rule:
    return lambda op: same(*by(op))


def _elementwise(op: Operation) -> dict[int, Back]:
    def back(slope: Tensor) -> Back:
        return lambda dims: Step(dims, ((slope, dims),), work=2 * slope.numel())

    return {i: back(slope) for i, slope in slopes(op).items()}


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
    **dict.fromkeys(FACTORS, mixing.addmm),
    "MmBackward0": mixing.mm,
    "BmmBackward0": mixing.mm,
    "SoftmaxBackward0": mixing.softmax,
    "SafeSoftmaxBackward0": mixing.softmax,
    "LogSoftmaxBackward0": mixing.log_softmax,
    "NativeLayerNormBackward0": mixing.layer_norm,
    "FusedRmsNormBackward0": mixing.rms_norm,  # on a GPU; elsewhere it is many nodes
    "ScaledDotProductFlashAttentionForCpuBackward0": mixing.attention,
    # No other kernel of a GPU takes float32 or float64.
    "ScaledDotProductEfficientAttentionBackward0": mixing.attention,
}
