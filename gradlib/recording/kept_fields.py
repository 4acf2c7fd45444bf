"""The fields that a call and a pass show, and which of them were kept."""

from gradlib.errors import NotKeptError
from gradlib.recording.trace import FIELDS, CallTrace

# Each with the field in `keep` that includes it.
CALL_FIELDS = {"args": "args", "kwargs": "args", "output": "output"}
PASS_FIELDS = {
    "grad_input": "grad_input",
    "grad_kwargs": "grad_input",
    "grad_input_total": "grad_input",
    "grad_kwargs_total": "grad_input",
    "grad_output": "grad_output",
    "param_grads": "param_grads",
    "param_grads_total": "param_grads",
}
TRAVELS_WITH = CALL_FIELDS | PASS_FIELDS


def is_kept(call: CallTrace, field: str) -> bool:
    """Tell whether a field in `keep` was kept of a call."""
    return field in call.block.fields


def require_kept(call: CallTrace, field: str) -> None:
    """Raise `NotKeptError` unless a field in `keep` was kept of a call."""
    if not is_kept(call, field):
        kept = tuple(name for name in FIELDS if is_kept(call, name))
        _, *travels = (name for name, it in TRAVELS_WITH.items() if it == field)
        too = f", nor {', '.join(travels)}" if travels else ""
        raise NotKeptError(
            f'"{field}" was not kept{too}: record(..., keep={kept}) left it out. '
            f'Record again, with "{field}" in keep.'
        )
