"""In which order the things that were recorded happened."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from gradlib.recording.trace import CallTrace


@dataclass(frozen=True, slots=True)
class Round:
    """One forward, and the backward passes that came after it."""

    calls: list[CallTrace]
    passes: list[int]  # our numbers


def rounds(traces: Sequence[CallTrace]) -> Iterator[Round]:
    """Return the forwards, each with the passes of which it is the last they reach."""
    forwards: dict[int, list[CallTrace]] = {}
    last: dict[int, int] = {}
    for trace in traces:
        forwards.setdefault(trace.forward, []).append(trace)
        for number in trace.passes():
            last[number] = max(last.get(number, 0), trace.forward)
    for forward, calls in forwards.items():
        yield Round(
            calls, [number for number in sorted(last) if last[number] == forward]
        )


def steps(calls: Sequence[CallTrace]) -> Iterator[tuple[CallTrace, bool]]:
    """Return each call when it begins, with ``True``, and when it ends.

    A call inside another begins after it and ends before it. In a backward pass it is
    the other way around.
    """
    running: list[CallTrace] = []
    for call in calls:
        while running and running[-1].moment != call.caller:
            yield running.pop(), False
        running.append(call)
        yield call, True
    while running:
        yield running.pop(), False
