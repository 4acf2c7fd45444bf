"""Where two recordings first differ, and how far each pair of values is apart."""

import dataclasses
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from operator import attrgetter

import torch
from torch import Tensor

from gradlib.recording.backward_pass import Pass
from gradlib.recording.call import Call
from gradlib.recording.comparison import Comparison, Unmatched
from gradlib.recording.difference import (
    Difference,
    Gap,
    Tolerance,
    difference_at,
    rtol_of,
)
from gradlib.recording.gaps import gaps, gaps_of_recorded, in_one_scale
from gradlib.recording.in_words import calls_text, numbered, of_pass
from gradlib.recording.kept_fields import TRAVELS_WITH
from gradlib.recording.notes import closed
from gradlib.recording.order import rounds, steps
from gradlib.recording.pairing import keyed
from gradlib.recording.trace import FIELDS, CallTrace
from gradlib.stats import TensorStats

# The fields that a call has when it begins and when it ends, and the gradients that
# arrive at it and leave it in a backward pass.
BEGIN, END = ("args", "kwargs"), ("output",)
ARRIVES, LEAVES = ("grad_output",), ("grad_input", "grad_kwargs", "param_grads")


def compare(
    traces: Sequence[CallTrace],
    others: Sequence[CallTrace],
    names: Mapping[str, str],
    tolerance: Tolerance,
) -> Comparison:
    """Compare two recordings; see `Recording.compare`."""
    by_key = dict(keyed(others, {}))
    pairs: dict[CallTrace, CallTrace] = {}
    unmatched: list[Unmatched] = []
    for key, trace in dict(keyed(traces, names)).items():
        if key in by_key:
            pairs[trace] = by_key.pop(key)
        else:
            unmatched.append(Unmatched(trace.name, trace.index, "this"))
    unmatched += [Unmatched(it.name, it.index, "other") for it in by_key.values()]
    both = _Both(traces, others, pairs)
    # What was coarse once stays so: a later float32 may hold what bfloat16 computed.
    tolerance = dataclasses.replace(tolerance, least=_rtol((*traces, *others)))
    found = [*both.gaps()]
    errors = tuple(
        _difference(trace, pairs[trace], place, it) for trace, place, it in found
    )
    # Where only gradients were kept, the rtol of their dtypes.
    rtol = tolerance.least or max((it.rtol for *_, it in found), default=0.0)
    first = _first((it for *_, it in found), tolerance)
    return Comparison(
        None if first is None else errors[first],
        errors,
        tuple(unmatched),
        tuple(both.skipped()),
        len(pairs) if found else 0,
        rtol if tolerance.rtol is None else float(tolerance.rtol),
        tuple(_returned(traces)),
    )


def _returned(traces: Sequence[CallTrace]) -> Iterator[tuple[str, int]]:
    """Name the calls in the order in which they returned."""
    for round_ in rounds(traces):
        for trace, begins in steps(round_.calls):
            if not begins:
                yield trace.name, trace.index


def _rtol(traces: Iterable[CallTrace]) -> float:
    """Return the rtol of the coarsest dtype in some calls, autocast's included."""
    dtypes = set[torch.dtype]()
    for trace in traces:
        dtypes |= trace.block.cast_to
        kept = (it for it in trace.leaves() if isinstance(it, Tensor | TensorStats))
        dtypes.update(it.dtype for it in kept)
    return rtol_of(dtypes)


def _difference(trace: CallTrace, other: CallTrace, place: str, it: Gap) -> Difference:
    one, another = trace.module_type, other.module_type
    reasons = f"classes {one} and {another}" * (one != another), it.reason
    return difference_at(trace, place, it.error, ", ".join(filter(None, reasons)))


def _first(found: Iterable[Gap], tolerance: Tolerance) -> int | None:
    """Return the index of the first gap that is not allowed."""
    drift = 0.0
    for i, it in enumerate(found):
        if not tolerance.allows(it, drift):
            return i
        drift = max(drift, it.error)
    return None


def _have_no_values(traces: Sequence[CallTrace]) -> bool:
    return any(_has_no_values(leaf) for trace in traces for leaf in trace.leaves())


def _are_summed_up(traces: Sequence[CallTrace]) -> bool:
    """Tell whether of some tensors only what `reduce` gave was kept."""
    return any(
        trace.block.is_reduced
        or any(isinstance(it, TensorStats) for it in trace.leaves())
        for trace in traces
    )


def _without_values(*both: Sequence[CallTrace]) -> list[str]:
    """Say which of two recordings has tensors without values, or without entries."""
    empty, summed_up = [*map(_have_no_values, both)], [*map(_are_summed_up, both)]
    if any(empty):
        has = "have" if all(empty) else "has"
        return [f'values: {_which(empty)} {has} tensors on the device "meta"']
    if any(summed_up):
        return [f"entries: {_which(summed_up)} kept only what reduce gave of tensors"]
    return []


def _which(has_it: Sequence[bool]) -> str:
    """Name the one of two recordings that has something, or both."""
    if all(has_it):
        return "both recordings"
    return f"{'this' if has_it[0] else 'the other'} recording"


def _has_no_values(leaf: object) -> bool:
    if isinstance(leaf, TensorStats):
        return math.isnan(leaf.nonfinite)
    return isinstance(leaf, Tensor) and leaf.is_meta


class _Both:
    """Two recordings, and the pairs of their calls."""

    def __init__(
        self,
        traces: Sequence[CallTrace],
        others: Sequence[CallTrace],
        pairs: Mapping[CallTrace, CallTrace],
    ) -> None:
        self._traces, self._others, self._pairs = traces, others, pairs
        self._passes = {
            trace: Call(trace).passes for trace in (*traces, *pairs.values())
        }
        self._ran = [any(it.passes() for it in each) for each in (traces, others)]
        self._have = [set(it[0].block.fields) for it in (traces, others) if it]
        self._fields = set(FIELDS).intersection(*self._have)

    def skipped(self) -> Iterator[str]:
        """Say what cannot be compared."""
        for field in FIELDS:
            if field in set().union(*self._have) - self._fields:
                yield f'"{field}", which only one of the two has kept'
        if not all(self._ran) and self._kept((*ARRIVES, *LEAVES)):
            missing = "has no" if any(self._ran) else "has a"
            this, other = self._ran
            which = "the other" if this else "this" if other else "neither"
            yield f"gradients: {which} recording {missing} backward pass"
        yield from _without_values(self._traces, self._others)
        yield from self._closed()

    def _closed(self) -> Iterator[str]:
        """Say which calls have values that were not opened."""
        names: dict[str, list[str]] = {}
        for trace in self._traces:
            other = self._pairs.get(trace)
            both = [*closed(trace), *closed(other)] if other else []
            for said in dict.fromkeys(both):
                names.setdefault(said, []).append(numbered(trace.name, trace.index))
        return (f"{calls_text(found)} ({said})" for said, found in names.items())

    def gaps(self) -> Iterator[tuple[CallTrace, str, Gap]]:
        """Yield each gap, with its call and place, in the order of computation."""
        for round_ in rounds(self._traces):
            # The calls that passes have reached in the other recording alone.
            missed = [*filter(self._is_missed, round_.calls)] if all(self._ran) else []
            for event in round_.events():
                match event:
                    case CallTrace() as trace, begins:
                        yield from self._forward(trace, BEGIN if begins else END)
                    case number, reached if all(self._ran):
                        calls = sorted((*reached, *missed), key=attrgetter("moment"))
                        for trace, begins in reversed([*steps(calls)]):
                            if trace not in missed:
                                yield from self._of_pass(trace, number, begins)
                            elif not begins:
                                yield self._missing(trace)
                        missed = []
                    case _:
                        pass
            yield from map(self._missing, reversed(missed))

    def _is_missed(self, trace: CallTrace) -> bool:
        return bool(self._passes_of_other(trace) and not self._passes[trace])

    def _missing(self, trace: CallTrace) -> tuple[CallTrace, str, Gap]:
        count, other = len(self._passes[trace]), len(self._passes_of_other(trace))
        reason = f"{count} and {other} backward passes"
        return trace, "grad_output", Gap(1.0, 0.0, 0.0, reason)

    def _passes_of_other(self, trace: CallTrace) -> tuple[Pass, ...]:
        other = self._pairs.get(trace)
        return () if other is None else self._passes[other]

    def _forward(
        self, trace: CallTrace, fields: Iterable[str]
    ) -> Iterator[tuple[CallTrace, str, Gap]]:
        other = self._pairs.get(trace)
        if other is None:
            return
        one, another = Call(trace), Call(other)
        for field in self._kept(fields):
            for path, it in gaps(getattr(one, field), getattr(another, field)):
                yield trace, field + path, it

    def _of_pass(
        self, trace: CallTrace, number: int, begins: bool
    ) -> Iterator[tuple[CallTrace, str, Gap]]:
        if trace not in self._pairs:
            return
        own, others = self._passes[trace], self._passes_of_other(trace)
        if len(others) != len(own):
            yield self._missing(trace)
            return
        place = [it.backward for it in own].index(number)
        one, another = own[place], others[place]
        prefix = of_pass(place, len(own))
        for field in self._kept(LEAVES if begins else ARRIVES):
            found = gaps_of_recorded(getattr(one, field), getattr(another, field))
            if field == "param_grads":
                found = in_one_scale(found)
            for path, it in found:
                yield trace, prefix + field + path, it

    def _kept(self, fields: Iterable[str]) -> list[str]:
        return [it for it in fields if TRAVELS_WITH[it] in self._fields]
