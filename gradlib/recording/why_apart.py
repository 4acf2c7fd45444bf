"""Why a call's recorded shares may differ from those that a replay computes.

Gradients may have entered the call otherwise than through its output, or its backward
may have used other values than its forward.
"""

from collections import defaultdict, deque
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any, cast

from torch import Tensor, nn

from gradlib.errors import CannotReplayError
from gradlib.recording.difference import Tolerance
from gradlib.recording.flow import Key
from gradlib.recording.gaps import gap_of_gradients
from gradlib.recording.hooked_outside import who_hooked
from gradlib.recording.in_words import numbered
from gradlib.recording.replay import Replayed, replay
from gradlib.recording.trace import CallTrace
from gradlib.recording.written_between import gives, perhaps_written, written_between
from gradlib.tree import Tree
from gradlib.wording import listed

NOT_TWICE = (
    "its backward does not repeat: two passes with the same values differ, as where it "
    "draws random numbers"
)
SAID = "gradients may have come by another way too: {}"
BY_ATTRIBUTE = "attribute {}"
BY_ELSEWHERE = "what it put elsewhere, as into a global list"
NOT_KNOWN = "gradients also came by {}, and a replay lacks them"
PERHAPS_NOT_KNOWN = "gradients may have come by {} too, and a replay lacks them"
BY_HOOK = (
    "{} has set a hook on its graph after it had returned, and a replay of this call "
    "alone lacks it"
)
PERHAPS_BY_HOOK = (
    "hooks were set between its forward and the pass: if one is on its graph, a replay "
    "of this call lacks it"
)
HOOKED = (
    "saved_tensors_hooks were in force in its forward, and may not give back what was "
    "saved"
)
WRITTEN = (
    "{} got other values between the forward and the backward, unseen by autograd, and "
    "with these its gradients are as recorded"
)
PERHAPS_WRITTEN = (
    "it may have used other values in its backward: after the forward, {} got others, "
    "unseen by autograd, and which it had in the backward is not known"
)
AGAIN = "the checkpoint that computed it again may have come to something else"


def why_apart(
    trace: CallTrace,
    number: int,
    replayed: Replayed,
    traces: Sequence[CallTrace],
    tolerance: Tolerance,
) -> str:
    """Say why a call's recorded shares differ from those of a replay, or ``""``.

    Args:
        trace: The call.
        number: Our number of the backward pass.
        replayed: The replay.
        traces: The calls of the recording.
        tolerance: How far two gradients may be apart.

    Raises:
        CannotReplayError: A replay lacks some gradients that came to the call, or a
            hook that changed them.
    """
    shares = replayed.shares or {}
    # This time the backward draws other random numbers.
    if not gives(trace, number, shares, tolerance, {}):
        return NOT_TWICE
    if names := written_between(trace, number, traces, tolerance):
        return WRITTEN.format(listed(names))
    inside = _inside(trace, traces)
    _require_known(replayed, (trace, *inside))
    if (outer := who_hooked(trace, number, traces)) is not None:
        raise CannotReplayError(BY_HOOK.format(numbered(outer.name, outer.index)))
    if trace.block.was_hooked_between(trace.forward, number):
        raise CannotReplayError(PERHAPS_BY_HOOK)
    reasons: list[str] = []
    if trace.recomputed_in is not None:
        reasons.append(AGAIN)
    elif trace.world is not None and trace.world.saves_through_hooks:
        reasons.append(HOOKED)
    if call := _last_apart(trace, number, inside, tolerance):
        reasons.append(SAID.format(f"output of {numbered(call.name, call.index)}"))
    elif replayed.overwritten:
        overwritten = ", ".join(replayed.overwritten)
        reasons.append(SAID.format(f"{overwritten}, which it overwrites"))
    if reasons:
        return "; or ".join(reasons)
    names = perhaps_written(trace, number, shares, traces, tolerance)
    return PERHAPS_WRITTEN.format(listed(names)) if names else ""


def _require_known(replayed: Replayed, calls: Iterable[CallTrace]) -> None:
    """Raise where gradients came, or may have come, by what a call has left."""
    left_in = ", ".join(replayed.lost or replayed.left_in)
    left = left_in and BY_ATTRIBUTE.format(left_in)
    left_elsewhere = any(it.left_elsewhere for call in calls for it in call.flows)
    if replayed.lost or left_elsewhere:
        raise CannotReplayError(NOT_KNOWN.format(left or BY_ELSEWHERE))
    if left:
        raise CannotReplayError(PERHAPS_NOT_KNOWN.format(left))


def _inside(trace: CallTrace, traces: Sequence[CallTrace]) -> list[CallTrace]:
    """Return the calls inside a call, at any depth, in the order they began."""
    moments = {trace.moment}
    found: list[CallTrace] = []
    for call in traces:
        if call.caller in moments:
            moments.add(call.moment)
            found.append(call)
    return found


def _last_apart(
    trace: CallTrace, number: int, inside: list[CallTrace], tolerance: Tolerance
) -> CallTrace | None:
    """Return the last call inside whose output gets another gradient in a replay.

    Its extra gradient flows on to the calls before it.
    """
    waiting: defaultdict[nn.Module, deque[CallTrace]] = defaultdict(deque)
    for call in inside:
        if call.module is not None:
            waiting[call.module].append(call)
    arrived: dict[CallTrace, dict[Key, Tensor]] = {}

    def returns(module: nn.Module, _args: object, output: object) -> None:
        if waiting[module]:
            grads = arrived.setdefault(waiting[module].popleft(), {})
            for place, leaf in enumerate(Tree.of(output).leaves):
                if isinstance(leaf, Tensor) and leaf.requires_grad:
                    cast(Any, leaf).register_hook(partial(grads.__setitem__, place))

    def watch() -> None:
        for module in waiting:
            module.register_forward_hook(returns)

    replay(trace, number, begin=watch)
    for call, grads in reversed(arrived.items()):
        recorded = call.gradients("outputs", number)
        for place, grad in grads.items():
            if not tolerance.allows(gap_of_gradients(recorded.get(place), grad)):
                return call
    return None
