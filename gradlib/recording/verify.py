"""Whether what was recorded comes out again when each call is replayed."""

import dataclasses
import itertools
import math
import pickle
import random
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any, cast

import numpy
import torch
from torch import nn

from gradlib.errors import CannotReplayError
from gradlib.progress import reported
from gradlib.random_state import generators_of_devices, seed_all
from gradlib.recording.difference import (
    Difference,
    Gap,
    Tolerance,
    difference_at,
    rtol_of,
)
from gradlib.recording.finite_differences import wrong_shares
from gradlib.recording.gaps import gaps, gaps_of_shares
from gradlib.recording.notes import closed, note
from gradlib.recording.other_ways import why_apart
from gradlib.recording.own_dtype import wrong_in_own_dtype
from gradlib.recording.places import full_name, key_name, pass_prefix, share_name
from gradlib.recording.replay import Replayed, replay
from gradlib.recording.replayable import label, require_replayable, require_whole
from gradlib.recording.trace import CallTrace, Key
from gradlib.recording.verification import Skipped, Verification

ANOTHER_OUTPUT = (
    "it may use what was not kept as it was then, such as an object of another class, "
    "a hook, a setting or what parametrize.cached() held"
)
NO_SUCH_OUTPUT = (
    f"the recorded gradient fits no output of it this time: {ANOTHER_OUTPUT}"
)
DRAWN_ELSEWHERE = (
    "it draws from Python's random or NumPy, whose states are not kept as torch's are"
)
SEEDED = "it gives torch's generators another seed each time, as torch.seed() does"
NO_SLOPE = "finite differences disagree"
OWN_DTYPE = "not what it is in float64, where finite differences agree"
SEED = 9_341_077

BEGAN_INSIDE = "its backward passes began inside of it: its output got no gradient"


def verify(
    traces: Sequence[CallTrace], *, numerical: bool, tolerance: Tolerance
) -> Verification:
    """Replay each call and compare; see `Recording.verify`."""
    if not traces:
        return Verification((), (), agreed=0, calls=0)
    with require_replayable(traces[0].block).looked_at_once():
        return _verified(traces, numerical, tolerance)


def _verified(
    traces: Sequence[CallTrace], numerical: bool, tolerance: Tolerance
) -> Verification:
    found: list[Difference] = []
    skipped: list[Skipped] = []
    unchecked = _owned_by_no_call(traces) if numerical else {}
    agreed = 0
    around: set[int] = set()  # the moments of calls that have a disagreement inside
    # Backwards, so that the calls inside a call come before it.
    done = itertools.count()
    said = f"verify: {{}} of {len(traces)} calls".format
    for trace in reported(traces[::-1], lambda _: said(next(done))):
        wrong: list[Difference] = []
        left: list[Skipped] = []
        if trace.moment not in around:
            try:
                for it in _check(trace, traces, numerical, tolerance):
                    match it:
                        case Skipped():
                            left.append(it)
                        case Difference():
                            wrong.append(it)  # kept if a later pass raises
                        case name:
                            unchecked[full_name(trace, name)] = None
                agreed += not wrong
            except CannotReplayError as error:
                reason = error.args[0].replace(label(trace), "it")
                left.append(Skipped(trace.name, trace.index, reason))
        if wrong or trace.moment in around:
            around.add(trace.caller)
        found += reversed(wrong)
        skipped += reversed(left)
    return Verification(
        tuple(found[::-1]), tuple(skipped[::-1]), agreed, len(traces), tuple(unchecked)
    )


def _owned_by_no_call(traces: Sequence[CallTrace]) -> dict[str, None]:
    """Return the names of parameters in called modules that no recorded call owns."""
    found = dict[str, None]()
    met = {it.module for it in traces}
    history = require_replayable(traces[0].block)
    for trace in filter(CallTrace.passes, traces):
        called = cast(nn.Module, trace.module)
        for it, path in history.inside(called, trace.moment).items():
            if it in met:
                continue
            met.add(it)
            for name, kept in history.parameters(it, trace.moment).items():
                if kept is not None and kept.requires_grad:
                    found[full_name(trace, path + name)] = None
    return found


def _check(
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
            wrong = [*_other_outputs(trace, number, replayed, tolerance)]
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
            apart = []
        for key, it in apart:
            field = _field(trace, number, key)
            yield difference_at(trace, field, it.error, it.reason or why)
        if numerical:
            yield from _by_differences(trace, number, repeats, tolerance)
    if len(unknown) == len(through):
        why = unknown[0].reason if unknown else ", ".join(closed(trace))
        raise CannotReplayError(why or BEGAN_INSIDE)
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


def _other_outputs(
    trace: CallTrace, number: int, replayed: Replayed, tolerance: Tolerance
) -> Iterator[Difference]:
    """Yield where a replay returned something else than was recorded."""
    if trace.output is None or "output" not in trace.block.fields:
        return
    found = gaps(trace.output.build(), replayed.output.build())
    apart = [(path, it) for path, it in found if not tolerance.allows(it)]
    why = _why_another(trace, number) if apart else ""
    for path, it in apart:
        reason = ": ".join(filter(None, (it.reason, why)))
        yield difference_at(trace, "output" + path, it.error, reason)


def _why_another(trace: CallTrace, number: int) -> str:
    """Say why a forward may have returned something else than was recorded."""
    states: list[object] = []
    seeds: list[list[int]] = []

    def look() -> None:
        numpys = numpy.random.get_state(legacy=False)
        states.append((random.getstate(), pickle.dumps(numpys)))
        seeds.append([it.initial_seed() for it in generators_of_devices()])

    replay(trace, number, begin=look, turn=look)
    if states[0] != states[1]:
        return DRAWN_ELSEWHERE
    if seeds[0] != seeds[1]:  # it gives a seed, but perhaps the same each time
        replay(trace, number, turn=look)
    return SEEDED if seeds[1] != seeds[-1] else ANOTHER_OUTPUT
