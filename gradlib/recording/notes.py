"""The notes of a call: why it lacks something, in words. There are no others."""

from collections import defaultdict
from typing import Any

from gradlib.recording.in_words import passes_text
from gradlib.recording.places import input_name, key_name, output_name
from gradlib.recording.trace import CallTrace

# Why no backward pass gave the call anything.
NOT_ASKED = "no field with gradients was kept"
STAND_INS = (
    "its tensors were stand-ins, of torch.func, torch.jit.trace, torch.export, make_fx "
    "or a FakeTensorMode"
)
CAPTURED = (
    "a CUDA graph was captured, in which nothing has a value yet: record the model "
    "without the graph"
)
DISABLED = "gradients were disabled when it was called"
NO_GRAD_OUT = "it returned no tensor that requires grad"
RAISED = "its forward raised {}"
HOOK_RAISED = "a hook raised {} when its forward had returned"
BROKEN_OFF = "its forward was broken off"
HOOK_TAKEN = (
    "the recorder's hook was taken off its module before it returned, as where a "
    "forward clears its module's hooks: what it returned was not seen"
)
NOT_RETURNED = "its forward has not returned"
NOT_REACHED = "no backward pass reached its output in the block"

# Why a tensor of the call has no gradient, or one that is not this call's alone.
NO_GRAD = "{} does not require grad"
NOT_OPENED = "{} is of type {}: tensors in it, if there are any, are not seen"
NOTHING_GIVEN = "backward {} gave no gradient to {}"
NOT_THROUGH_IT = NOTHING_GIVEN + " through this call"
NOT_FROM_OUTSIDE = NOTHING_GIVEN + " from outside of this call"
RETURNED = (
    "it returned {} as it was: the two are one tensor, and its uses outside of this "
    "call count in the gradients of both"
)

SECOND_ORDER = (
    "backward pass {} may have gone through the graph of a pass with is_grads_batched "
    "too: what came that way is in its totals, and in its shares only if it came "
    "through a tensor made inside the call"
)
BETWEEN_OUTPUTS = ", and in grad_output if it came from one output to another"
HOOKS_INSIDE = (
    "backward pass {} may have gone through what a hook has made that was set inside "
    "the call: what came that way is in its totals, and in its shares only if it came "
    "through a tensor made inside the call"
)
HOOKED_CASTS = (
    "a hook was set inside the call under autocast: if on the cast of a leaf, the "
    "share is from before the hook, and the total from after it"
)
GAVE_BACK = (
    "its backward returned a tensor that it had saved, in a pass with "
    "create_graph=True: what a later pass brings through that is in totals alone"
)
LEFT_ELSEWHERE = (
    "backward pass {} went through what the call had put elsewhere, as into a global "
    "list, before it came to what it returned: what came that way is in totals alone"
)
TANGENTS = (
    "it returned tangents of forward-mode AD: what flows back through these is in its "
    "shares, but grad_output has no place for it"
)

# What else there is to know.
BATCHED = "a backward pass with is_grads_batched is not recorded"
CAPTURED_PASS = "a backward pass that a CUDA graph captured is not recorded"
RECOMPUTED = "a checkpoint computed it again for the backward pass"
UNFINISHED = "backward pass {} raised, or has not ended yet"


def note(call: CallTrace) -> str:
    """Return why something of `call` is missing, or ``""``."""
    passes = call.passes()
    remarks = [*_why_no_pass(call, passes), *_why_never(call, passes), *closed(call)]
    if call.block.batched and call.flows:
        remarks.append(BATCHED)
    if call.block.captured and call.flows:
        remarks.append(CAPTURED_PASS)
    if call.recomputed_in is not None:
        remarks.append(RECOMPUTED)
    remarks += _missed(call, passes)
    remarks += _second_order(call, passes)
    if passes and call.hooks_inside and call.passes_over_casts:
        remarks.append(HOOKED_CASTS)
    if passes and call.has_tangents:
        remarks.append(TANGENTS)
    return "; ".join(remarks)


def _why_no_pass(call: CallTrace, passes: list[int]) -> list[str]:
    if passes:
        return []
    if call.no_pass_because:
        return [call.no_pass_because]
    if call.closed_outputs and not any(flow.outputs for flow in call.flows):
        return []  # the remark on closed values says why
    if call.output is None:
        return [NOT_RETURNED]
    unfinished = map(UNFINISHED.format, sorted(call.block.unfinished))
    return [NOT_REACHED, *unfinished]


def _why_never(call: CallTrace, passes: list[int]) -> list[str]:
    """Say which gradients no pass can give, or none for this call alone."""
    if call.no_pass_because and not passes:
        return []
    idle = [
        *(key_name(call, it) for it in call.idle),
        *(output_name(call, place) for place in call.idle_outputs),
    ]
    returned = [key_name(call, it) for it in call.returned]
    return [*map(NO_GRAD.format, idle), *map(RETURNED.format, returned)]


def closed(call: CallTrace) -> list[str]:
    """Name the values that were not opened, each with its class."""
    given, returned = call.inputs.leaves, call.output_leaves()
    found = [
        *((input_name(call, it), given[it]) for it in call.closed_inputs),
        *((output_name(call, it), returned[it]) for it in call.closed_outputs),
    ]
    return [NOT_OPENED.format(name, leaf.text) for name, leaf in found]


def _missed(call: CallTrace, passes: list[int]) -> list[str]:
    """Say which gradients passes could have given and did not, each remark once."""
    lacking: defaultdict[tuple[str, str], list[int]] = defaultdict(list)
    for number in passes:
        for remark in _missed_in(call, number):
            lacking[remark].append(number)
    alike: defaultdict[tuple[str, str], list[str]] = defaultdict(list)
    for (said, name), numbers in lacking.items():
        alike[said, passes_text(numbers)].append(name)
    remarks = [said.format(some, ", ".join(it)) for (said, some), it in alike.items()]
    short = {number for numbers in lacking.values() for number in numbers}
    return [
        *remarks,
        *map(UNFINISHED.format, sorted(short & call.block.unfinished)),
    ]


def _missed_in(call: CallTrace, number: int) -> list[tuple[str, str]]:
    """Return a remark on, and the name of, each gradient that one pass did not give."""
    shares, totals = _unfilled(call, number, "shares"), call.given("totals", number)
    says = {key: NOT_THROUGH_IT if key in totals else NOTHING_GIVEN for key in shares}
    if call.has_missed(number):  # some may have come through it
        shares = [key for key in shares if key not in totals]
    outputs = _unfilled(call, number, "outputs")
    # One output may be made from another, as a loss from logits, inside the call.
    of_output = NOT_FROM_OUTSIDE if call.given("outputs", number) else NOTHING_GIVEN
    return [
        *((says[it], input_name(call, it)) for it in shares if isinstance(it, int)),
        *((of_output, output_name(call, it)) for it in outputs),
        *((says[it], it) for it in shares if isinstance(it, str)),
    ]


def _second_order(call: CallTrace, passes: list[int]) -> list[str]:
    """Say what may have come through graphs that the recorder did not see made."""
    said = [SECOND_ORDER.format(it) for it in passes if call.is_behind_batched(it)]
    if any(len(flow.outputs) > 1 for flow in call.flows):
        said = [it + BETWEEN_OUTPUTS for it in said]
    if call.hooks_inside:
        said += [HOOKS_INSIDE.format(it) for it in passes if call.graph_before(it)]
    said += [LEFT_ELSEWHERE.format(it) for it in passes if call.has_missed(it)]
    return [*said, *[GAVE_BACK] * any(flow.gave_back for flow in call.flows)]


def _unfilled(call: CallTrace, number: int, gathered: str) -> list[Any]:
    """Return the keys that waited for a gradient in a pass and got none."""
    given = call.given(gathered, number)
    waited = dict.fromkeys(
        key for flow in call.flows for key in getattr(flow, gathered)
    )
    return [key for key in waited if key not in given]
