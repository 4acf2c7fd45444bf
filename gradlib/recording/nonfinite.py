"""Where NaN or inf first appeared."""

import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from gradlib.errors import NotKeptError
from gradlib.recording.flow import Key
from gradlib.recording.in_words import quoted
from gradlib.recording.nan_or_inf import INF, NAN, kinds_in
from gradlib.recording.order import rounds
from gradlib.recording.places import (
    full_name,
    grad_output_name,
    input_name,
    output_name,
    pass_prefix,
    share_name,
    total_name,
)
from gradlib.recording.trace import CallTrace
from gradlib.render import Printable, Table
from gradlib.stats import TensorStats


@dataclass(frozen=True, slots=True)
class Nonfinite(Printable):
    """Where NaN or inf first appeared.

    Attributes:
        name: The name of the module in whose call it appeared; the root is ``""``.
        index: Which call of this module in the block, from 0.
        direction: ``"forward"`` or ``"backward"``.
        field: Where in the call, after ``"passes[1]."`` where the call has several
            passes. ``"output"``, ``"grad_input[0]"`` or ``"param_grads['weight']"``:
            the call made it. ``"args[0]"``, ``"param weight"``, ``"buffer
            running_var"`` or ``"grad_output[0]"``: it was there before, and no recorded
            call made it. If a call was given inf and made NaN of it, this is where the
            inf was, and the text says where NaN appeared. ``"grad_input_total[0]"`` or
            ``"param_grads_total['weight']"``: no call made it, but another use of the
            tensor, as a penalty in the loss, or the sum.
    """

    name: str
    index: int
    direction: str
    field: str
    _remark: str = dataclasses.field(default="", repr=False, compare=False)
    _was_reduced: bool = dataclasses.field(default=False, repr=False, compare=False)

    def _table(self) -> Table:
        said = self._remark or _meaning(self.field)
        return Table(
            f"NaN or inf first appeared in the {self.direction} of "
            f"{quoted(self.name)}, call {self.index}: {self.field}. "
            f"{said}{REDUCED * self._was_reduced}",
            (),
            [],
        )


def first_nonfinite(traces: Sequence[CallTrace]) -> Nonfinite | None:
    """Return where NaN or inf first appeared in what was recorded.

    Raises:
        NotKeptError: The outputs were not kept.
    """
    if traces and "output" not in traces[0].block.fields:
        raise NotKeptError(
            'first_nonfinite() needs "output" to tell the forward from the backward: '
            "record(..., keep=...) left it out."
        )
    look = _Look(traces)
    for round_ in rounds(traces):
        for event in round_.events():
            match event:
                case CallTrace() as call, begins:
                    found = None if begins else look.forward(call)
                case number, reached:
                    found = look.backward(reached, number)
            if found is not None:
                was_reduced = look.was_reduced and not any(map(_has_tensors, traces))
                return replace(found, _was_reduced=was_reduced)
    return None


def _has_tensors(call: CallTrace) -> bool:
    """Tell whether a tensor of a call was kept as a tensor or as its statistics."""
    return any(isinstance(it, Tensor | TensorStats) for it in call.leaves())


def nonfinite_state(call: CallTrace) -> Mapping[str, int] | None:
    """Return which weights and buffers in a call's module had NaN or inf.

    Returns:
        By name, as ``"param weight"``, the bits `NAN` and `INF` of what each had. Empty
        where the call's output is finite, as the answer is not needed then. ``None``
        where they were not kept.
    """
    history = call.block.history
    if history is None or call.module is None:
        return call.nonfinite_state
    if call.output is None or not any(map(kinds_in, call.output.leaves)):
        return {}
    held = history.whole(call.module, call.moment)
    return {name: kinds for name, it in held.items() if (kinds := kinds_in(it.value))}


class _Look:
    """Looks at each tensor once."""

    def __init__(self, traces: Sequence[CallTrace]) -> None:
        self._by_moment = {call.moment: call for call in traces}
        # Whether the last one found is in what the user's `reduce` returned.
        self.was_reduced = False
        # By id, which no other tensor has while this one is held here.
        self._known: dict[int, tuple[Tensor, int]] = {}

    def forward(self, call: CallTrace) -> Nonfinite | None:
        """Return where NaN or inf in a call's output came from, if it is there."""
        outputs = [*enumerate(call.output_leaves())]
        place = self._first(outputs)
        if place is None:
            return None
        kinds = (NAN | INF,)
        if self._first(outputs, NAN) is not None:
            kinds = NAN, INF  # NaN comes first: the -inf of a mask is harmless
        origins = (self._origin(call, it) for it in kinds)
        return next(filter(None, origins), None) or _made_forward(call, place)

    def _origin(self, call: CallTrace, kinds: int) -> Nonfinite | None:
        """Return the argument, weight or buffer that had it before the call did."""
        source, giver = self._source(call, kinds)
        if source is None:
            return self._held(call, kinds)
        if kinds == INF:
            remark = f"The call was given inf. {_first_nan(call)}"
            return replace(source, _remark=remark)
        # The giver may have made it of its weights. An inf there may be a mask's.
        held = self._held(giver, NAN) if giver and kinds == NAN else None
        return held or source

    def _source(
        self, call: CallTrace, kinds: int
    ) -> tuple[Nonfinite | None, CallTrace | None]:
        """Return the outermost call that was given it, and the call around that.

        The latter gave it, and no call inside that had made it.
        """
        found, inner = None, call
        for around in self._outwards(call):
            place = self._first(enumerate(around.inputs.leaves), kinds)
            if place is None:
                if found is not None:
                    found = replace(found, _remark=self._between(inner, around))
                return found, around
            name = input_name(around, place)
            found = Nonfinite(around.name, around.index, "forward", name)
            inner = around
        return found, None

    def backward(self, calls: Sequence[CallTrace], number: int) -> Nonfinite | None:
        for call in reversed(calls):
            if self._first(call.gradients("outputs", number).items()) is not None:
                return self._arrived(call, number)
            key = self._first(call.gradients("shares", number).items())
            if key is not None:
                return _made_backward(call, number, key)
        for call in reversed(calls):
            key = self._first(call.gradients("totals", number).items())
            if key is not None:
                return _in_pass(call, number, total_name(call, key))
        return None

    def _arrived(self, call: CallTrace, number: int) -> Nonfinite | None:
        """Return the outermost call to which it came with ``grad_output``."""
        found: Nonfinite | None = None
        for around in self._outwards(call):
            place = self._first(around.gradients("outputs", number).items())
            if not isinstance(place, int):
                break
            before, remark = around.graph_before(number), ""
            if before is not None:
                remark = (
                    f"{CAME}: look at what comes after it, and, as this pass may have "
                    f"gone through the graph of {before} too, at the call itself."
                )
            name = grad_output_name(around, place)
            found = _in_pass(around, number, name, remark)
        return found

    def _outwards(self, call: CallTrace) -> Iterator[CallTrace]:
        """Yield a call, the one around it, and so on."""
        around: CallTrace | None = call
        while around is not None:
            yield around
            around = self._by_moment.get(around.caller)

    def _between(self, call: CallTrace, around: CallTrace) -> str:
        """Say where in the forward around it what a call was given was made."""
        calls = self._by_moment.values()
        inside = [it for it in calls if it.caller == around.moment]
        before = [it for it in inside if it.moment < call.moment]
        after = ""
        if before:
            last = max(before, key=lambda it: it.moment)
            after = f" after {quoted(last.name)}, call {last.index},"
        return (
            f"The call was given it by the forward of {quoted(around.name)}: look at "
            f"what comes{after} before the call."
        )

    def _held(self, call: CallTrace, kinds: int) -> Nonfinite | None:
        """Return the weight or buffer that had it, unless its module has its own call.

        That is one in the same forward.
        """
        calls = self._by_moment.values()
        called = {it.name for it in calls if it.forward == call.forward} - {call.name}
        for name, found in (nonfinite_state(call) or {}).items():
            if found & kinds and _holder(call, name) not in called:
                remark = ""
                if kinds == INF:
                    remark = f"It has inf, as a mask may. {_first_nan(call)}"
                return Nonfinite(call.name, call.index, "forward", name, remark)
        return None

    def _first(self, values: Iterable[tuple[Any, Any]], kinds: int = -1) -> Any:
        """Return the key of the first value that has a NaN or inf."""
        for key, value in values:
            if self._has(value) & kinds:
                self.was_reduced = not isinstance(value, Tensor | TensorStats)
                return key
        return None

    def _has(self, value: object) -> int:
        if not isinstance(value, Tensor):
            return kinds_in(value)
        known = self._known.get(id(value))
        if known is None:
            known = self._known[id(value)] = value, kinds_in(value)
        return known[1]


def _first_nan(call: CallTrace) -> str:
    name = quoted(call.name)
    return f"The first output with NaN is that of {name}, call {call.index}."


def _holder(call: CallTrace, name: str) -> str:
    """Return the name of the module to which a weight or buffer in a call belongs."""
    return full_name(call, name.partition(" ")[2]).rpartition(".")[0]


def _made_forward(call: CallTrace, place: int) -> Nonfinite:
    remark = ""
    if "args" not in call.block.fields:
        remark = "The call made it, or was given it: its arguments were not kept."
    elif call.holds_state:
        remark = (
            "The call made it, or its weights or buffers had it: these were not kept. "
            "What it was given is finite."
        )
    return Nonfinite(call.name, call.index, "forward", output_name(call, place), remark)


def _made_backward(call: CallTrace, number: int, key: Key) -> Nonfinite:
    remark = ""
    if "grad_output" not in call.block.fields:
        remark = (
            "The call made it, or it came with the gradient of its output, which was "
            "not kept."
        )
    return _in_pass(call, number, share_name(call, key), remark)


def _in_pass(call: CallTrace, number: int, field: str, remark: str = "") -> Nonfinite:
    """Return a result that names a field of one pass, as a user asks for it."""
    field = pass_prefix(call, number) + field
    return Nonfinite(call.name, call.index, "backward", field, remark)


REDUCED = " Or reduce made it, whose result this is."
CAME = "It came with the gradient of the call's output"


def _meaning(field: str) -> str:
    """Say of a field whether the call made what is there."""
    if field.startswith("passes["):
        field = field.partition(".")[2]
    if field.startswith(("args", "kwargs")):
        return "The call was given it: look at what comes before the call."
    if field.startswith(("param ", "buffer ")):
        return "It was there when the call began."
    if field.startswith("grad_output"):
        return f"{CAME}: look at what comes after it."
    if field.startswith("output"):
        return "The call made it: what it was given is finite."
    if "_total[" in field:
        return (
            "What the recorded calls gave it is finite: another use of the tensor made "
            "it, as a penalty in the loss, or a hook of it, or the sum is too large."
        )
    return "The call made it: the gradient that came to it is finite."
