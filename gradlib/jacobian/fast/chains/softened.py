"""The softmax that a chain may end with, which mixes the entries of a sample."""

from torch import Tensor, nn

from gradlib.jacobian.fast.kernels import aten
from gradlib.private.modes import grad_is_enabled


def softened(
    softmax: nn.Softmax | nn.LogSoftmax, y: Tensor, jacobian: Tensor
) -> Tensor:
    """Return the Jacobian of the softmax or log-softmax of y, ``(batch, outs, ins)``.

    That of the log-softmax is y's, less the mean of its rows weighted by the softmax.
    The row of the largest entry is subtracted from all first: where its softmax is
    nearly 1, the row of the result is small, and nothing of it is lost to rounding.

    Args:
        softmax: The softmax or log-softmax.
        y: Its input, ``(batch, outs)``.
        jacobian: The Jacobian of y, ``(batch, outs, ins)``, which may be overwritten,
            or ``(outs, ins)`` if all samples share it.
    """
    p = aten._softmax.default(y, 1, False)
    most = p.argmax(1)
    if jacobian.dim() < 3:
        made = jacobian - jacobian[most].unsqueeze(1)
    else:
        index = most.view(-1, 1, 1).expand(-1, 1, jacobian.shape[2])
        made = _less(jacobian, jacobian.gather(1, index))
    made = _less(made, p.unsqueeze(1) @ made)
    if type(softmax) is nn.LogSoftmax:
        return made
    return made * p.unsqueeze(2) if grad_is_enabled() else made.mul_(p.unsqueeze(2))


def _less(jacobian: Tensor, row: Tensor) -> Tensor:
    return jacobian - row if grad_is_enabled() else jacobian.sub_(row)
