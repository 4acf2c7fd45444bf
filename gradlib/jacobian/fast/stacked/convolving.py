"""The backward of convolutions."""

from collections.abc import Sequence

from torch import Tensor

from gradlib.jacobian.fast.convolution import Convolution
from gradlib.jacobian.fast.operation import Operation, of_each_axis
from gradlib.jacobian.fast.stacked.back import Back
from gradlib.jacobian.fast.stacked.mixing import is_of_input_alone
from gradlib.jacobian.fast.way_back import way_back


def convolution(op: Operation) -> Back | None:
    """A convolution, or a transposed one."""
    if not is_of_input_alone(op):
        return None
    shape: Sequence[int] = op.shapes[0]
    pull = way_back(read(op, shape[1:]))

    def back(grad: Tensor) -> dict[int, Tensor]:
        return {0: pull(grad.flatten(0, 1)).view(grad.size(0), *shape)}

    return back


def read(op: Operation, size: Sequence[int]) -> Convolution:
    """Return the convolution that an operation is.

    Args:
        op: The operation.
        size: The shape of a sample of its input.
    """
    weight = op.saved("weight")
    axes = weight.dim() - 2
    return Convolution(
        weight,
        size,
        of_each_axis(op.saved("stride"), axes),
        of_each_axis(op.saved("padding"), axes),
        of_each_axis(op.saved("dilation"), axes),
        op.saved("transposed"),
        of_each_axis(op.saved("output_padding"), axes),
        op.saved("groups"),
    )
