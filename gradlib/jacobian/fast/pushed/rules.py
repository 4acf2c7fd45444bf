"""The JVP of each known operation, by the name of its node."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

from torch import Tensor

from gradlib.jacobian.fast.kernels import aten
from gradlib.jacobian.fast.moves import PERMUTED, RESHAPED, SELECTED, SLICED, SUMMED
from gradlib.jacobian.fast.operation import Operation
from gradlib.jacobian.fast.pushed import convolving, mixing, moving
from gradlib.jacobian.fast.pushed.convolving import linear_kernel
from gradlib.jacobian.fast.pushed.forth import Forth
from gradlib.jacobian.fast.slopes import ELEMENTWISE, SCALED, slopes

Rule: TypeAlias = Callable[[Operation], Forth | None]


def _scaled(by: Callable[[Operation], tuple[float, ...]]) -> Rule:
    return lambda op: _weighted(op, dict(enumerate(by(op))))


def _elementwise(op: Operation) -> Forth | None:
    by_input = slopes(op)
    return _weighted(op, by_input) if by_input.keys() == op.shapes.keys() else None


def _weighted(op: Operation, weights: Mapping[int, Any]) -> Forth:
    """Return the JVP of a sum of inputs, each times a number or a slope."""
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
    """Return a tangent with as many axes as the output, so that it broadcasts."""
    more = 1 + len(shape) - tangent.dim()
    if not more:
        return tangent
    count, *size = tangent.shape
    return tangent.reshape(count, *[1] * more, *size)


RULES: dict[str, Rule] = {
    **{name: _scaled(by) for name, by in SCALED.items()},
    **dict.fromkeys(RESHAPED, moving.reshaped),
    **dict.fromkeys(ELEMENTWISE, _elementwise),
    **dict.fromkeys(PERMUTED, moving.permuted),
    **dict.fromkeys(SELECTED, moving.selected),
    **dict.fromkeys(SLICED, moving.sliced),
    **dict.fromkeys(SUMMED, moving.summed),
    "CatBackward0": moving.concatenated,
    "AddmmBackward0": mixing.addmm,
    "MmBackward0": mixing.mm,
    "SoftmaxBackward0": mixing.softmax,
    "LogSoftmaxBackward0": mixing.log_softmax,
    "NativeLayerNormBackward0": mixing.layer_norm,
    "NativeGroupNormBackward0": mixing.group_norm,
    "ConvolutionBackward0": convolving.convolution,
    "MaxPool2DWithIndicesBackward0": convolving.largest,
    "AvgPool2DBackward0": linear_kernel(
        aten.avg_pool2d.default,
        *("kernel_size", "stride", "padding"),
        *("ceil_mode", "count_include_pad", "divisor_override"),
    ),
    "UpsampleNearest2DBackward0": linear_kernel(
        aten.upsample_nearest2d.default, "output_size", "scales_h", "scales_w"
    ),
    "UpsampleBilinear2DBackward0": linear_kernel(
        aten.upsample_bilinear2d.default,
        *("output_size", "align_corners", "scales_h", "scales_w"),
    ),
    "PixelShuffleBackward0": linear_kernel(
        aten.pixel_shuffle.default, "upscale_factor"
    ),
    "PixelUnshuffleBackward0": linear_kernel(
        aten.pixel_unshuffle.default, "downscale_factor"
    ),
}
