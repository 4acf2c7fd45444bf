"""Whether an operation keeps the samples apart, along the first axis.

A sample may have several places there, one after the other, as where a linear layer
takes the tokens of all samples. Where all operations keep samples apart, columns give
what rows give. Where samples mix, they differ: a row then sums the gradients that a
sample gets from all samples, and a column the tangents.
"""

from collections.abc import Callable

from gradlib.jacobian.fast import moves
from gradlib.jacobian.fast.moves import PERMUTED, RESHAPED, SELECTED, SUMMED
from gradlib.jacobian.fast.operation import Operation

_ELSEWHERE: dict[str, Callable[[Operation], bool]] = {
    **dict.fromkeys(PERMUTED, lambda op: moves.order(op)[0] == 0),
    **dict.fromkeys(SELECTED, lambda op: moves.row(op)[0] > 0),
    **dict.fromkeys(SUMMED, lambda op: 0 not in moves.reduced(op)[0]),
    "SoftmaxBackward0": lambda op: op.dim() > 0,
    "LogSoftmaxBackward0": lambda op: op.dim() > 0,
    "NativeLayerNormBackward0": lambda op: (
        len(op.saved("normalized_shape")) < len(op.shape)
    ),
}


def keeps_apart(name: str, op: Operation, batch: int) -> bool:
    """Tell whether an operation is known to keep each sample in its own places.

    Args:
        name: The name of the operation's node.
        op: The operation.
        batch: How many samples there are.
    """
    shapes = op.shape, *op.shapes.values()
    if any(it[0] % batch for it in shapes):
        return False
    if name in RESHAPED:  # the order of entries is kept
        return True
    if any(it[0] != op.shape[0] for it in shapes):
        return False
    if name in _ELSEWHERE:
        return _ELSEWHERE[name](op)
    return all(len(it) == len(op.shape) for it in shapes)
