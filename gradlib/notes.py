"""Why a call lacks something, in words."""

from torch import Tensor

from gradlib.trace import CallTrace, PassTrace


def note(call: CallTrace) -> str:
    """Return why something of `call` is missing, or ``""``."""
    remarks = [*_why_no_pass(call), *_why_never(call)]
    if call.recomputed_in is not None:
        remarks.append("a checkpoint computed it again for the backward pass")
    for trace in call.passes.values():
        remarks += _missed(call, trace)
    return "; ".join(remarks)


def _why_no_pass(call: CallTrace) -> list[str]:
    if call.passes:
        return []
    return [call.no_pass_because or "no backward pass reached it inside the block"]


def _why_never(call: CallTrace) -> list[str]:
    """Say what no pass can give."""
    if call.no_pass_because:
        return []
    idle = [
        *(
            input_name(call, place)
            for place, leaf in enumerate(call.inputs.leaves)
            if isinstance(leaf, Tensor) and place not in call.inputs_asked
        ),
        *(name for name, trainable in call.parameters.items() if not trainable),
    ]
    remarks = [f"{name} does not require grad" for name in idle]
    remarks += [
        f"it returned {input_name(call, place)} as it was: the two are one tensor, and "
        "their gradient is that of all its uses"
        for place in call.returned_inputs
    ]
    return remarks


def _missed(call: CallTrace, trace: PassTrace) -> list[str]:
    """Say what one pass could have given and did not."""
    missed = [
        *(
            input_name(call, place)
            for place in call.inputs_asked
            if place not in trace.input_shares
        ),
        *(
            output_name(call, place)
            for place in call.outputs_asked
            if place not in trace.outputs
        ),
        *(
            name
            for name, trainable in call.parameters.items()
            if trainable and name not in trace.param_shares
        ),
    ]
    return [
        f"backward pass {trace.backward} gave {name} no gradient" for name in missed
    ]


def input_name(call: CallTrace, place: int) -> str:
    """Return how one asks for an input: ``args[0]`` or ``kwargs['mask']``."""
    path = call.inputs.path(place)
    return ("args" if path.startswith("[0]") else "kwargs") + path[3:]


def output_name(call: CallTrace, place: int) -> str:
    """Return how one asks for an output: ``output`` or ``output[1]``."""
    return "output" + (call.output.path(place) if call.output else "")
