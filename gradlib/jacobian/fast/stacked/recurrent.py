"""The backward of an LSTM's layer by oneDNN, which vmap runs for one vector at a time.

Only its kernel can read the workspace that it saves. So the layer goes forward again,
with each sample repeated for each vector: both passes together take less time than
going back with a few vectors one by one, while its states are small.
"""

from torch import Tensor

from gradlib.jacobian.fast.kernels import aten
from gradlib.jacobian.fast.operation import Operation
from gradlib.jacobian.fast.stacked.back import Back
from gradlib.private.modes import enable_grad, grad_is_enabled

_INPUTS = frozenset((0, 5, 6))
"""The positions of the input, ``(time, batch, in)``, and of the two first states."""

_HOW = "mode", "hidden_size", "num_layers", "has_biases"

SMALL = 2**9
"""How many entries a state has at most, all samples together.

With torch 2.13 on a core of an AMD EPYC, 4 to 20 rows of layers of 16 to 128 features,
and of 1 to 64 samples, took a third to all of the time with at most half as many, about
as long with as many, and a tenth to half as long again with 2 to 4 times as many.
"""


def layer(op: Operation) -> Back | None:
    """One direction of a layer: the output, or one of the two last states."""
    if not op.shapes.keys() <= _INPUTS:
        return None
    saved = op.saved("input"), op.saved("hx_"), op.saved("cx_")
    if saved[1].numel() > SMALL:
        return None
    weights = [op.saved(f"weight{it}") for it in range(4)]
    reverse, both = op.saved("reverse"), op.saved("bidirectional")
    how, first = [op.saved(it) for it in _HOW], op.saved("batch_first")

    def back(grad: Tensor) -> dict[int, Tensor]:
        vectors = grad.size(0)
        x, *states = (_repeated(it, vectors) for it in saved)
        given = x, *weights, *states
        *made, workspace = _forward(*given, reverse, [], *how, both, first, True)
        grads: list[Tensor | None] = [None, None, None]
        grads[op.number] = grad.movedim(0, -3).flatten(-3, -2)
        found = aten.mkldnn_rnn_layer_backward(
            *(*given, *made, *grads, reverse, *how, True, both, [], first, workspace)
        )
        return {
            i: found[i].unflatten(-2, (vectors, shape[-2])).movedim(-3, 0)
            for i, shape in op.shapes.items()
        }

    return back


def bytes_of_states(node: object) -> int:
    """Return how many bytes a layer's backward holds for each vector."""
    saved: list[Tensor] = [getattr(node, f"_saved_{it}") for it in ("input", "result3")]
    return sum(it.numel() * it.element_size() for it in saved)


def _forward(*given: object) -> list[Tensor]:
    """Go forward; the kernel makes a workspace only where grad is enabled."""
    before = grad_is_enabled()
    enable_grad(True)
    try:
        return aten.mkldnn_rnn_layer(*given)
    finally:
        enable_grad(before)


def _repeated(saved: Tensor, vectors: int) -> Tensor:
    """Return ``(..., batch, n)`` as ``(..., vectors * batch, n)``, in its own memory.

    The kernel reads on as if that were contiguous, which a repeated batch of one is
    not: ``flatten`` makes no copy of it.
    """
    *outer, batch, size = saved.shape
    many = saved.unsqueeze(-3).expand(*outer, vectors, batch, size)
    return many.flatten(-3, -2).contiguous()
