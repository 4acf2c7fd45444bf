"""The softmax that a chain may end with: it mixes the entries of a sample's output."""

from torch import Tensor, nn

from gradlib.jacobian.fast.kernels import aten
from gradlib.private.modes import grad_is_enabled


def softened(
    softmax: nn.Softmax | nn.LogSoftmax, y: Tensor, jacobian: Tensor
) -> Tensor:
    """Return the Jacobian of a softmax of y, or of its logarithm.

    The logarithm grows as y does, less the mean of all entries, each weighted by its
    own softmax. All are measured from the entry that has most of it: where that is
    nearly all, its own row is small, and nothing of it is lost to rounding.

    Args:
        softmax: Which of the two it is.
        y: What it is given, ``(batch, outs)``.
        jacobian: Of y: ``(batch, outs, ins)``, which may be overwritten, or
            ``(outs, ins)`` if all samples share it.
    """
    p = aten._softmax.default(y, 1, False)
    most = p.argmax(1)
    if jacobian.dim() < 3:
        made = jacobian - jacobian[most].unsqueeze(1)
    else:
        there = most.view(-1, 1, 1).expand(-1, 1, jacobian.shape[2])
        made = _less(jacobian, jacobian.gather(1, there))
    made = _less(made, p.unsqueeze(1) @ made)
    if type(softmax) is nn.LogSoftmax:
        return made
    return made * p.unsqueeze(2) if grad_is_enabled() else made.mul_(p.unsqueeze(2))


def _less(jacobian: Tensor, row: Tensor) -> Tensor:
    return jacobian - row if grad_is_enabled() else jacobian.sub_(row)
