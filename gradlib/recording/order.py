"""The order in which the recorded calls and backward passes happened."""

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from gradlib.recording.trace import CallTrace

Event: TypeAlias = tuple[CallTrace, bool] | tuple[int, list[CallTrace]]
"""A call that begins (``True``) or ends, or our number of a backward pass with all
calls that it reached, those of earlier forwards included."""


@dataclass(frozen=True, slots=True)
class Round:
    """One forward, and the backward passes that came inside or after it."""

    calls: list[CallTrace]
    passes: dict[int, list[CallTrace]]  # as they ended: the inner of two comes first

    def events(self) -> Iterator[Event]:
        """Yield the events in the order in which they happened."""
        moments = {call.moment for call in self.calls}
        inside: defaultdict[int, list[tuple[int, int]]] = defaultdict(list)
        for number, reached in self.passes.items():
            where, ended = reached[0].block.happened.get(number, (OUTERMOST, 0))
            inside[where if where in moments else OUTERMOST].append((ended, number))
        after = inside.pop(OUTERMOST, [])
        for call, begins in steps(self.calls):
            waiting = inside[call.caller if begins else call.moment]
            while waiting and (not begins or waiting[0][0] < call.moment):
                number = waiting.pop(0)[1]
                yield number, self.passes[number]
            yield call, begins
        for _, number in after:
            yield number, self.passes[number]


def rounds(traces: Sequence[CallTrace]) -> Iterator[Round]:
    """Yield the forwards, each with the passes that came inside it or before the next.

    A pass that ended at an unknown moment counts after the last forward it reached.
    """
    forwards: dict[int, list[CallTrace]] = {}
    reached: defaultdict[int, list[CallTrace]] = defaultdict(list)
    for trace in traces:
        forwards.setdefault(trace.forward, []).append(trace)
        for number in trace.passes():
            reached[number].append(trace)
    begun = [(calls[0].moment, forward) for forward, calls in forwards.items()]
    passes: defaultdict[int, list[tuple[int, int]]] = defaultdict(list)
    for number, calls in reached.items():
        ended = calls[0].block.ended(number)
        before = bisect_left(begun, (ended, 0))
        last = begun[before - 1][1] if before else max(it.forward for it in calls)
        passes[last].append((ended, number))
    for forward, calls in forwards.items():
        yield Round(calls, {it: reached[it] for _, it in sorted(passes[forward])})


def steps(calls: Sequence[CallTrace]) -> Iterator[tuple[CallTrace, bool]]:
    """Yield each call with ``True`` when it begins, and with ``False`` when it ends.

    A call inside another begins after it and ends before it. In a backward pass it is
    the other way around. Calls that threads ran at once come one after the other.
    """
    moments = {call.moment for call in calls}
    inside: defaultdict[int, list[CallTrace]] = defaultdict(list)
    for call in calls:
        inside[call.caller if call.caller in moments else OUTERMOST].append(call)
    to_come = [(call, True) for call in reversed(inside[OUTERMOST])]
    while to_come:
        call, begins = to_come.pop()
        yield call, begins
        if begins:
            to_come.append((call, False))
            to_come += [(it, True) for it in reversed(inside[call.moment])]


OUTERMOST = -1
"""The caller of a call that no recorded call made."""
