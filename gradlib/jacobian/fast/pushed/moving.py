"""The JVPs of operations that move, pick, join or sum entries."""

from collections.abc import Mapping

from torch import Tensor

from gradlib.jacobian.fast import moves
from gradlib.jacobian.fast.operation import Operation
from gradlib.jacobian.fast.pushed.forth import Forth, of_one


def reshaped(op: Operation) -> Forth:
    """A view that keeps the order of entries."""
    return of_one(lambda t: t.reshape(t.size(0), *op.shape))


def permuted(op: Operation) -> Forth:
    """Dimensions in another order."""
    order = [1 + it for it in moves.order(op)]
    return of_one(lambda t: t.permute(0, *order))


def selected(op: Operation) -> Forth:
    """One row of a dimension."""
    dim, index = moves.row(op)
    return of_one(lambda t: t.select(1 + dim, index))


def sliced(op: Operation) -> Forth:
    """Some rows of a dimension."""
    dim, rows = moves.sliced(op)
    return of_one(lambda t: moves.rows_of(t, 1 + dim, rows))


def concatenated(op: Operation) -> Forth | None:
    """Several tensors, one after the other."""
    rows = moves.joined(op)
    return _placed(op, rows) if rows.keys() == op.shapes.keys() else None


def _placed(op: Operation, rows: Mapping[int, moves.Rows]) -> Forth:
    """Return the JVP of an operation whose output holds each input in some rows."""

    def push(given: Mapping[int, Tensor]) -> Tensor:
        some = next(iter(given.values()))
        made = some.new_zeros(len(some), *op.shape)
        for i, tangent in given.items():
            dim, ours = rows[i]
            moves.rows_of(made, 1 + dim, ours).copy_(tangent)
        return made

    return push


def summed(op: Operation) -> Forth:
    """A sum or mean over dimensions."""
    gone, scale = moves.reduced(op)
    dims = [1 + it for it in gone]
    return of_one(lambda t: (t.sum(dims) * scale).view(t.size(0), *op.shape))
