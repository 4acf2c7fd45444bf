"""Refuses to begin where the numbers of tensors cannot be read."""

from gradlib.errors import JacobianArgumentError
from gradlib.private.modes import (
    graph_is_captured,
    operations_are_traced,
    tensors_are_fake,
    values_are_stand_ins,
)


def require_values() -> None:
    """Raise inside a transform or a trace, where inputs only stand for tensors."""
    if values_are_stand_ins():
        raise JacobianArgumentError(
            "This is called inside of torch.func (vmap, grad, jvp and so on) or "
            "torch.jit.trace, where inputs only stand for tensors. Call it outside, "
            "with the whole batch; create_graph=True lets gradients flow through the "
            "result. Inside of torch.func, vmap(jacrev(fn)) gives such Jacobians."
        )
    if tensors_are_fake():
        raise JacobianArgumentError(
            "This is called in a mode of fake tensors, which have no values, as "
            'make_fx is with tracing_mode="fake" or "symbolic". Call it outside; '
            'make_fx with tracing_mode="real" can trace it, with check=False.'
        )


def require_readable(mode: str, *, check: bool) -> None:
    """Raise where a number would be read while a CUDA graph or make_fx notes calls."""
    if graph_is_captured() and (check or mode not in ("reverse", "loop")):
        raise JacobianArgumentError(
            "While a CUDA graph is captured no number can be read, which a check and "
            'most ways do. Pass check=False, mode="reverse" and max_bytes=, and check '
            "the function once before."
        )
    if (check or mode == "split") and operations_are_traced():
        raise JacobianArgumentError(
            "While make_fx traces no number can be read, which a check and a split "
            "do. Pass check=False and another mode, and check the function once "
            "before."
        )
