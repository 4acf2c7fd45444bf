"""Why a call lacks something, in words."""

from typing import Any

from gradlib.trace import CallTrace


def note(call: CallTrace) -> str:
    """Return why something of `call` is missing, or ``""``."""
    passes = call.passes()
    remarks = [*_why_no_pass(call, passes), *_why_never(call)]
    if call.recomputed_in is not None:
        remarks.append("a checkpoint computed it again for the backward pass")
    for number in passes:
        remarks += _missed(call, number)
    return "; ".join(remarks)


def _why_no_pass(call: CallTrace, passes: list[int]) -> list[str]:
    if passes:
        return []
    return [call.no_pass_because or "no backward pass reached it inside the block"]


def _why_never(call: CallTrace) -> list[str]:
    """Say what no pass can give."""
    if call.no_pass_because:
        return []
    idle = [input_name(call, key) if isinstance(key, int) else key for key in call.idle]
    remarks = [f"{name} does not require grad" for name in idle]
    remarks += [
        f"it returned {input_name(call, place)} as it was: the two are one tensor, and "
        "their gradient is that of all its uses"
        for place in call.returned_inputs
    ]
    return remarks


def _missed(call: CallTrace, number: int) -> list[str]:
    """Say what one pass could have given and did not."""
    shares = _unfilled(call, number, "shares")
    missed = [
        *(input_name(call, key) for key in shares if isinstance(key, int)),
        *(output_name(call, key) for key in _unfilled(call, number, "outputs")),
        *(key for key in shares if isinstance(key, str)),
    ]
    return [f"backward pass {number} gave {name} no gradient" for name in missed]


def _unfilled(call: CallTrace, number: int, gathered: str) -> list[Any]:
    """Return what was waited for and got nothing in a pass."""
    given = call.given(gathered, number)
    waited = dict.fromkeys(
        key for flow in call.flows for key in getattr(flow, gathered)
    )
    return [key for key in waited if key not in given]


def input_name(call: CallTrace, place: int) -> str:
    """Return how one asks for an input: ``args[0]`` or ``kwargs['mask']``."""
    path = call.inputs.path(place)
    return ("args" if path.startswith("[0]") else "kwargs") + path[3:]


def output_name(call: CallTrace, place: int) -> str:
    """Return how one asks for an output: ``output`` or ``output[1]``."""
    return "output" + (call.output.path(place) if call.output else "")
