"""Whether an operation keeps the samples apart, along the first axis.

Where all do, columns are what rows are. Where samples mix, a row is the sum of the
gradients that a sample gets from all, and a column that of the tangents it gets.
"""

from collections.abc import Callable

from gradlib.jacobian.fast import moves
from gradlib.jacobian.fast.moves import RESHAPED
from gradlib.jacobian.fast.operation import Operation

FREE = frozenset((*RESHAPED, "AddmmBackward0"))
"""The names of nodes whose output may have another number of axes, or an operand that
is no sample's: what comes first stays first, as long as it has the same size."""

_ELSEWHERE: dict[str, Callable[[Operation], bool]] = {
    "PermuteBackward0": lambda op: moves.order(op)[0] == 0,
    "TransposeBackward0": lambda op: 0 not in moves.exchanged(op),
    "TBackward0": lambda op: 0 not in moves.exchanged(op),
    "SelectBackward0": lambda op: moves.selected(op)[0] > 0,
    "UnbindBackward0": lambda op: moves.unbound(op)[0] > 0,
    "SoftmaxBackward0": lambda op: op.dim() > 0,
    "LogSoftmaxBackward0": lambda op: op.dim() > 0,
    "NativeLayerNormBackward0": lambda op: (
        len(op.saved("normalized_shape")) < len(op.shape)
    ),
    "MeanBackward1": lambda op: 0 not in moves.reduced(op)[0],
    "SumBackward1": lambda op: 0 not in moves.reduced(op)[0],
}


def keeps_apart(name: str, op: Operation, batch: int) -> bool:
    """Tell whether what comes of a sample is in its row, where it is known.

    Args:
        name: Of the operation's node.
        op: The operation.
        batch: How many samples there are: the size of the first axis.
    """
    shapes = op.shapes.values()
    if any(it[:1] != (batch,) for it in (op.shape, *map(tuple, shapes))):
        return False
    if name in _ELSEWHERE:
        return _ELSEWHERE[name](op)
    return name in FREE or all(len(it) == len(op.shape) for it in shapes)
