"""The JVPs of operations that move, pick, join or sum entries."""

from collections.abc import Mapping, Sequence

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


def transposed(op: Operation) -> Forth:
    """Two dimensions exchanged."""
    one, other = moves.exchanged(op)
    return of_one(lambda t: t.transpose(1 + one, 1 + other))


def selected(op: Operation) -> Forth:
    """One row of a dimension."""
    dim, index = moves.row(op)
    return of_one(lambda t: t.select(1 + dim, index))


def sliced(op: Operation) -> Forth:
    """Some rows of a dimension."""
    return _rows(moves.sliced(op))


def split(op: Operation) -> Forth:
    """Parts of a dimension, each an output."""
    return _rows(moves.split(op))


def _rows(picked: moves.Rows) -> Forth:
    return of_one(lambda t: _at(t, picked))


def _at(tangent: Tensor, picked: moves.Rows) -> Tensor:
    """Return some rows of a tangent, as a view."""
    rows = slice(picked.rows.start, picked.rows.stop, picked.rows.step)
    return tangent[(slice(None),) * (1 + picked.dim) + (rows,)]


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
            _at(made, rows[i]).copy_(tangent)
        return made

    return push


def averaged(op: Operation) -> Forth:
    """A mean over dimensions."""
    gone, count = moves.reduced(op)
    return _reduced(op, gone, 1 / max(1, count))


def summed(op: Operation) -> Forth:
    """A sum over dimensions."""
    return _reduced(op, moves.reduced(op)[0], 1)


def _reduced(op: Operation, gone: Sequence[int], scale: float) -> Forth:
    dims = [1 + it for it in gone]
    return of_one(lambda t: (t.sum(dims) * scale).view(t.size(0), *op.shape))
