"""The backward of operations that move, pick, join, sum or repeat entries."""

from torch import Tensor

from gradlib.jacobian.fast import moves
from gradlib.jacobian.fast.operation import Operation
from gradlib.jacobian.fast.stacked.back import Back, Part, times


def reshaped(op: Operation) -> Back:
    """A view that keeps the order of entries."""
    shape = op.shapes[0]
    return lambda grad: {0: grad.reshape(grad.size(0), *shape)}


def permuted(op: Operation) -> Back:
    """Dimensions in another order."""
    order = moves.order(op)
    back = [1 + order.index(i) for i in range(len(order))]
    return lambda grad: {0: grad.permute(0, *back)}


def selected(op: Operation) -> Back:
    """One row of a dimension."""
    dim, index = moves.row(op)
    rows = range(index, index + 1)
    return lambda grad: {0: Part(1 + dim, rows, grad.unsqueeze(1 + dim))}


def sliced(op: Operation) -> Back:
    """Some rows of a dimension."""
    dim, rows = moves.sliced(op)
    if len(rows) == op.shapes[0][dim]:  # all of them
        return times(1)
    return lambda grad: {0: Part(1 + dim, rows, grad)}


def concatenated(op: Operation) -> Back | None:
    """Several tensors, one after the other."""
    joined = moves.joined(op)
    if joined.keys() != op.shapes.keys():
        return None
    rows = {i: (1 + it.dim, it.rows.start, len(it.rows)) for i, it in joined.items()}
    return lambda grad: {i: grad.narrow(*it) for i, it in rows.items()}


def stacked(op: Operation) -> Back:
    """Several tensors, along a new dimension."""
    dim = 1 + op.dim()
    return lambda grad: {i: grad.select(dim, i) for i in op.shapes}


def summed(op: Operation) -> Back:
    """A sum or mean over dimensions."""
    shape = op.shapes[0]
    gone, scale = moves.reduced(op)
    kept = [1 if i in gone else size for i, size in enumerate(shape)]

    def back(grad: Tensor) -> dict[int, Tensor | Part]:
        scaled = grad if scale == 1 else grad * scale
        return {0: scaled.reshape(grad.size(0), *kept).expand(-1, *shape)}

    return back
