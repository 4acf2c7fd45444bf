"""The expression by which a user asks a call for a value or gradient: ``args[0]``."""

from gradlib.recording.flow import Key
from gradlib.recording.in_words import of_pass
from gradlib.recording.trace import CallTrace


def full_name(call: CallTrace, path: str) -> str:
    """Return the model's name for what the call's module names `path`."""
    return f"{call.name}.{path}".removeprefix(".")


def key_name(call: CallTrace, key: Key) -> str:
    """Return the expression for an input, or the name of a parameter."""
    return input_name(call, key) if isinstance(key, int) else key


def pass_prefix(call: CallTrace, number: int) -> str:
    """Return what goes before the fields of a pass, by our number of it."""
    passes = call.passes()
    return of_pass(passes.index(number), len(passes))


def input_name(call: CallTrace, place: int) -> str:
    """Return the expression for an input: ``args[0]`` or ``kwargs['mask']``."""
    return _of_input(call, place, "args", "kwargs")


def _of_input(call: CallTrace, place: int, args: str, kwargs: str) -> str:
    path = call.inputs.path(place)
    return (args if path.startswith("[0]") else kwargs) + path[3:]


def output_name(call: CallTrace, place: int) -> str:
    """Return the expression for an output: ``output`` or ``output[1]``."""
    return "output" + (call.output.path(place) if call.output else "")


def share_name(call: CallTrace, key: Key) -> str:
    """Return the expression for a share: ``grad_input[0]``, ``param_grads['bias']``."""
    if isinstance(key, str):
        return f"param_grads[{key!r}]"
    return _of_input(call, key, "grad_input", "grad_kwargs")


def total_name(call: CallTrace, key: Key) -> str:
    """Return the expression for a total: ``param_grads_total['bias']``."""
    field, bracket, rest = share_name(call, key).partition("[")
    return f"{field}_total{bracket}{rest}"


def grad_output_name(call: CallTrace, place: int) -> str:
    """Return the expression for the gradient of an output: ``grad_output[0]``."""
    if call.output is None or call.output.is_leaf():
        return "grad_output[0]"
    return "grad_output" + call.output.path(place)
