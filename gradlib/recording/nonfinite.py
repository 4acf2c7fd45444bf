"""Where NaN or inf first appeared."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from gradlib.errors import NotKeptError
from gradlib.recording.notes import (
    grad_output_name,
    input_name,
    output_name,
    share_name,
)
from gradlib.recording.order import rounds, steps
from gradlib.recording.trace import CallTrace
from gradlib.render import Printable, Table
from gradlib.stats import TensorStats, count_nonfinite, wide


@dataclass(frozen=True, slots=True)
class Nonfinite(Printable):
    """Where NaN or inf first appeared.

    Attributes:
        name: The name of the module in whose call it appeared; the root is ``""``.
        index: Which call of this module in the block, from 0.
        direction: ``"forward"`` or ``"backward"``.
        field: Where in the call. ``"output"``, ``"grad_input[0]"`` or
            ``"param_grads['weight']"``: the call made it. ``"args[0]"``, ``"param
            weight"``, ``"buffer running_var"`` or ``"grad_output[0]"``: it was there
            before; the calls that were recorded did not make it.
    """

    name: str
    index: int
    direction: str
    field: str

    def _table(self) -> Table:
        where = f'"{self.name}"' if self.name else "the root"
        return Table(
            f"NaN or inf first appeared in the {self.direction} of {where}, call "
            f"{self.index}: {self.field}. {_meaning(self.field)}",
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
    look = _Look()
    for round_ in rounds(traces):
        found = look.forward(round_.calls)
        for number, reached in round_.passes.items():
            found = found or look.backward(reached, number)
        if found is not None:
            return found
    return None


class _Look:
    """Looks at each tensor once."""

    def __init__(self) -> None:
        # By id, which is a tensor's own while it is held here.
        self._known: dict[int, tuple[Tensor, bool]] = {}

    def forward(self, calls: Sequence[CallTrace]) -> Nonfinite | None:
        by_moment = _by_moment(calls)
        for call, begins in steps(calls):
            if begins or call.output is None:
                continue
            place = self._first(enumerate(call.output.leaves))
            if place is None:
                continue
            source = self._source(call, by_moment)
            if source is not None:
                return source
            field = self._state(call) or output_name(call, place)
            return Nonfinite(call.name, call.index, "forward", field)
        return None

    def _source(
        self, call: CallTrace, by_moment: Mapping[int, CallTrace]
    ) -> Nonfinite | None:
        """Return the outermost call that was given it; no call inside had made it."""
        found: Nonfinite | None = None
        around: CallTrace | None = call
        while around is not None:
            place = self._first(enumerate(around.inputs.leaves))
            if place is None:
                break
            field = input_name(around, place)
            found = Nonfinite(around.name, around.index, "forward", field)
            around = by_moment.get(around.caller)
        return found

    def _state(self, call: CallTrace) -> str | None:
        """Return which weight or buffer of the call's own has it."""
        history = call.block.history
        if history is None or call.module is None:
            return None
        own = history.at(call.module, call.moment)
        name = self._first((name, kept.value) for name, kept in own.items())
        if name is None:
            return None
        return f"param {name}" if name in call.parameters else f"buffer {name}"

    def backward(self, calls: Sequence[CallTrace], number: int) -> Nonfinite | None:
        by_moment = _by_moment(calls)
        for call in reversed(calls):
            arrived = call.gradients("outputs", number)
            left = call.gradients("shares", number)
            key = self._first(left.items())
            came = self._first(arrived.items())
            if came is not None:
                return self._arrived(call, by_moment, number)
            if key is not None:
                field = share_name(call, key)
                return Nonfinite(call.name, call.index, "backward", field)
        return None

    def _arrived(
        self, call: CallTrace, by_moment: Mapping[int, CallTrace], number: int
    ) -> Nonfinite | None:
        """Return the outermost call to which it came with the gradient."""
        found: Nonfinite | None = None
        around: CallTrace | None = call
        while around is not None:
            place = self._first(around.gradients("outputs", number).items())
            if not isinstance(place, int):
                break
            field = grad_output_name(around, place)
            found = Nonfinite(around.name, around.index, "backward", field)
            around = by_moment.get(around.caller)
        return found

    def _first(self, values: Iterable[tuple[Any, Any]]) -> Any:
        """Return the key of the first value that has a NaN or inf."""
        return next((key for key, value in values if self._has(value)), None)

    def _has(self, value: object) -> bool:
        if isinstance(value, float | complex):
            return not math.isfinite(abs(value))
        if isinstance(value, TensorStats):
            return value.nonfinite > 0
        if not isinstance(value, Tensor) or value.is_meta:
            return False
        known = self._known.get(id(value))
        if known is None:
            known = self._known[id(value)] = value, _has_nonfinite(value)
        return known[1]


def _by_moment(calls: Sequence[CallTrace]) -> dict[int, CallTrace]:
    return {call.moment: call for call in calls}


def _has_nonfinite(tensor: Tensor) -> bool:
    if not (tensor.is_floating_point() or tensor.is_complex()):
        return False
    return bool(count_nonfinite(wide(tensor)))


def _meaning(field: str) -> str:
    """Say who made it."""
    if field.startswith(("args", "kwargs")):
        return "The call was given it."
    if field.startswith(("param ", "buffer ")):
        return "It was there when the call began."
    if field.startswith("grad_output"):
        return "It came with the gradient of the call's output."
    if field.startswith("output"):
        return "The call made it: what it was given is finite."
    return "The call made it: the gradient that came to it is finite."
