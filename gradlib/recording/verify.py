"""Whether what was recorded comes out again when each call is replayed."""

import itertools
from collections.abc import Sequence
from typing import cast

from torch import nn

from gradlib.errors import CannotReplayError, RecordingArgumentError
from gradlib.flags import as_flag
from gradlib.progress import reported
from gradlib.recording.check_call import check_call
from gradlib.recording.difference import Difference, Tolerance
from gradlib.recording.places import full_name
from gradlib.recording.replayable import label, require_replayable
from gradlib.recording.trace import CallTrace
from gradlib.recording.verification import Skipped, Verification


def verify(
    traces: Sequence[CallTrace], *, numerical: bool, tolerance: Tolerance
) -> Verification:
    """Replay each call and compare; see `Recording.verify`."""
    numerical = as_flag("numerical", numerical, RecordingArgumentError)
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
                for it in check_call(trace, traces, numerical, tolerance):
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
