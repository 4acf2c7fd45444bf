"""The JVPs of operations that mix entries: products, softmax, norms."""

from collections.abc import Mapping

from torch import Tensor

from gradlib.jacobian.fast.operation import Operation
from gradlib.jacobian.fast.pushed.forth import Forth, as_samples, of_one, once
from gradlib.jacobian.fast.stacked import mixing as stacked
from gradlib.jacobian.fast.stacked.back import Back, Part


def addmm(op: Operation) -> Forth | None:
    """A matrix plus a product of two."""
    return _product(op, 1, op.saved("mat2"), op.saved("alpha"))


def mm(op: Operation) -> Forth | None:
    """A product of two matrices."""
    return _product(op, 0, op.saved("mat2"), 1)


def _product(op: Operation, place: int, matrix: Tensor, scale: float) -> Forth | None:
    """Return the JVP of a product with a matrix.

    Args:
        op: The operation.
        place: The position of the input that is multiplied.
        matrix: The matrix, ``(ins, outs)``.
        scale: The factor of the product.
    """
    if set(op.shapes) != {place}:
        return None
    matrix = matrix * scale if scale != 1 else matrix
    push = once(as_samples(lambda t: t @ matrix))
    return lambda given: push(given[place])


def softmax(op: Operation) -> Forth:
    """A softmax."""
    back = stacked.softmax(op)  # its Jacobian is symmetric
    return of_one(lambda t: _whole(back(t)))


def log_softmax(op: Operation) -> Forth:
    """A log-softmax."""
    p, dim = op.saved("result").exp(), 1 + op.dim()
    return of_one(lambda t: t - (t * p).sum(dim, keepdim=True))


def layer_norm(op: Operation) -> Forth | None:
    """A layer norm."""
    return _normed(stacked.layer_norm(op, plain=True), op.saved("weight"))


def group_norm(op: Operation) -> Forth | None:
    """A group norm, or a norm of each channel."""
    weight: Tensor | None = op.saved("weight")
    if weight is not None:
        weight = weight.view(-1, *[1] * (len(op.shape) - 2))
    return _normed(stacked.group_norm(op, plain=True), weight)


def _normed(back: Back | None, weight: Tensor | None) -> Forth | None:
    """Return the JVP of a norm, whose Jacobian without weight is symmetric."""
    if back is None:
        return None
    scale = 1 if weight is None else weight
    return of_one(lambda t: _whole(back(t)) * scale)


def _whole(grads: Mapping[int, Tensor | Part]) -> Tensor:
    """Return the gradient of the only input."""
    grad = grads[0]
    assert isinstance(grad, Tensor), "it is no part"
    return grad
