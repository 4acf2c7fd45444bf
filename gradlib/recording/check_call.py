"""Replaying one call, and whether what was recorded of it comes out again."""

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from gradlib.errors import CannotReplayError
from gradlib.random_state import seed_all
from gradlib.recording.another_output import NO_SUCH_OUTPUT, other_outputs
from gradlib.recording.difference import (
    Difference,
    Gap,
    Tolerance,
    difference_at,
    rtol_of,
)
from gradlib.recording.finite_differences import wrong_shares
from gradlib.recording.flow import Key
from gradlib.recording.gaps import gaps_of_shares
from gradlib.recording.notes import closed, note
from gradlib.recording.own_dtype import wrong_in_own_dtype
from gradlib.recording.places import key_name, pass_prefix, share_name
from gradlib.recording.replay import Replayed, replay
from gradlib.recording.replayable import require_whole
from gradlib.recording.trace import CallTrace
from gradlib.recording.verification import Skipped
from gradlib.recording.why_apart import why_apart

NO_SLOPE = "finite differences disagree"
OWN_DTYPE = "not what it is in float64, where finite differences agree"
SEED = 9_341_077

PAST_OUTPUT = (
    "its output got no gradient: passes came to it through a tensor from inside"
)


def check_call(
    trace: CallTrace,
    traces: Sequence[CallTrace],
    numerical: bool,
    tolerance: Tolerance,
) -> Iterator[Difference | Skipped | str]:
    """Yield what comes out differently in a call, and what was not checked of it.

    Not checked are passes that were not replayed, and inputs and own parameters, by
    name.

    Raises:
        CannotReplayError: No pass was replayed, or none gave the output a gradient, or
            of none is known all that it gave the call.
    """
    passes, left_out = _passes_of(trace)
    yield from left_out
    through = [number for number in passes if trace.arrived(number)]
    unknown: list[Skipped] = []
    is_other = False  # whether the replay returned something else
    for number in passes:
        least = rtol_of(_dtypes_inside(trace, number))
        tolerance = dataclasses.replace(tolerance, least=least)
        # Another seed: after the same forward, a backward would draw the same numbers.
        replayed = replay(trace, number, turn=partial(seed_all, SEED))
        if number == passes[0]:
            wrong = [*other_outputs(trace, number, replayed, tolerance)]
            yield from wrong
            is_other = bool(wrong)
            if replayed.shares is None and not is_other:
                yield difference_at(trace, "output", math.inf, NO_SUCH_OUTPUT)
        if replayed.shares is None or number not in through:
            continue
        apart = _other_shares(trace, number, replayed.shares, tolerance)
        repeats = None if apart or is_other else replayed
        why = ""
        try:
            if apart and not is_other:  # gradients of another output differ anyway
                why = why_apart(trace, number, replayed, traces, tolerance)
        except CannotReplayError as error:
            unknown.append(_skipped(trace, number, error))
        else:
            for key, it in apart:
                field = _field(trace, number, key)
                yield difference_at(trace, field, it.error, it.reason or why)
        if numerical:
            yield from _by_differences(trace, number, repeats, tolerance)
    if len(unknown) == len(through):
        why = unknown[0].reason if unknown else ", ".join(closed(trace))
        raise CannotReplayError(why or PAST_OUTPUT)
    yield from unknown


def _passes_of(trace: CallTrace) -> tuple[list[int], list[Skipped]]:
    """Return the passes to replay, and those that gave a call more than its VJP.

    The latter, or those that gave a part of it, cannot be replayed.

    Raises:
        CannotReplayError: There is no pass to replay.
    """
    passes: list[int] = []
    left_out: list[Skipped] = []
    for number in trace.passes():
        try:
            require_whole(trace, number)
            passes.append(number)
        except CannotReplayError as error:
            left_out.append(_skipped(trace, number, error))
    if not passes:
        raise CannotReplayError(left_out[0].reason if left_out else note(trace))
    return passes, left_out


def _skipped(trace: CallTrace, number: int, error: CannotReplayError) -> Skipped:
    return Skipped(trace.name, trace.index, error.args[0], number)


def _field(trace: CallTrace, number: int, key: Key) -> str:
    """Return the expression for a share in a pass: ``passes[1].grad_input[0]``."""
    return pass_prefix(trace, number) + share_name(trace, key)


def _by_differences(
    trace: CallTrace,
    number: int,
    replayed: Replayed | None,
    tolerance: Tolerance,
) -> Iterator[Difference | str]:
    """Yield the gradients that are no VJP, and the names of those it cannot check.

    Args:
        trace: The call.
        number: Our number of the backward pass.
        replayed: The replay, if all came out as recorded, or ``None``.
        tolerance: What the dtypes allow.
    """

    def wrong(key: Key, error: float, why: str) -> Difference:
        return difference_at(trace, _field(trace, number, key), error, why)

    rtol = tolerance.rtol or 0.0
    by_slope = wrong_shares(trace, number, rtol)
    for key, error in by_slope.items():
        if not math.isnan(error):
            yield wrong(key, error, NO_SLOPE)
        else:
            yield key_name(trace, key)
    if replayed and all(map(math.isnan, by_slope.values())):
        inside = _dtypes_inside(trace, number)
        own_dtype = wrong_in_own_dtype(trace, number, replayed, inside, rtol)
        for key, error in own_dtype.items():
            yield wrong(key, error, OWN_DTYPE)


def _dtypes_inside(trace: CallTrace, number: int) -> set[torch.dtype]:
    """Return the dtypes that autocast used, in the call's forward and in the pass."""
    forward = trace.world.autocast.values() if trace.world else ()
    backward = trace.block.autocast.get(number, {}).values()
    return {*forward, *backward, *trace.summed_in}


def _other_shares(
    trace: CallTrace, number: int, again: Mapping[Key, Any], tolerance: Tolerance
) -> list[tuple[Key, Gap]]:
    """Return which of a call's shares are not what was recorded, and how far."""
    found = gaps_of_shares(trace.gradients("shares", number), again)
    return [(key, it) for key, it in found if not tolerance.allows(it)]
