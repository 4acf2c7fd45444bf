"""Refuses to begin where the numbers of tensors cannot be read."""

from gradlib.errors import JacobianArgumentError
from gradlib.private.modes import graph_is_captured, values_are_stand_ins


def require_values() -> None:
    """Raise inside a transform or a trace, where inputs only stand for tensors."""
    if values_are_stand_ins():
        raise JacobianArgumentError(
            "This is called inside of torch.func (vmap, grad, jvp and so on) or "
            "torch.jit.trace, where inputs only stand for tensors. Call it outside, "
            "with the whole batch; create_graph=True lets gradients flow through the "
            "result. Inside of torch.func, vmap(jacrev(fn)) gives such Jacobians."
        )


def require_not_captured(mode: str, *, check: bool) -> None:
    """Raise where a number would be read while a CUDA graph is captured."""
    if graph_is_captured() and (check or mode not in ("reverse", "loop")):
        raise JacobianArgumentError(
            "While a CUDA graph is captured no number can be read, which a check and "
            'most ways do. Pass check=False, mode="reverse" and max_bytes=, and check '
            "the function once before."
        )
