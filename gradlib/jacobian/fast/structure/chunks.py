"""Computes products and sums a few rows at a time, so that caches hold them."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product as every

from torch import Tensor

from gradlib.jacobian.fast.structure.contract import Room
from gradlib.jacobian.fast.structure.named_axes import Axis
from gradlib.jacobian.fast.structure.program import Now, Slices, Value

CHUNK = 2**21
"""How many bytes a value takes at most on a CPU, if slicing rows can achieve that."""

FILLING = 2**28
"""The same on other devices: an H100 gains up to 2**26."""


@dataclass
class _State:
    """The state of a value during a run.

    Attributes:
        uses: How many values are computed from it.
        grain: By how many of the sliced axes it is sliced itself, the first ones.
        brief: Whether every value computed from it is sliced like it, so that it can be
            freed after its last use.
        left: How many uses are still to come, for the current rows.
        key: The rows that it was computed for last.
        held: The tensor computed last.
        memory: That tensor, if its memory is its own, to be reused.
    """

    uses: int = 0
    grain: int = 0
    brief: bool = True
    left: int = 0
    key: tuple[tuple[int, int], ...] | None = None
    held: Tensor | None = None
    memory: Tensor | None = None


def _slicing(
    values: Sequence[Value], rows: Sequence[Axis], size: int, most: int
) -> dict[Axis, int]:
    """Return the axes of Y to slice, and the length of a slice of each."""
    steps: dict[Axis, int] = {}
    for axis in rows:
        steps[axis] = 1
        # The bytes of each value that has this axis, for one entry of it.
        taken = [
            size * _entries(it, steps) for it in values if it.parts and axis in it.axes
        ]
        fit = most // max(taken, default=1)
        if fit >= 1:
            steps[axis] = min(axis.size, fit)
            break
    return steps


def _entries(value: Value, steps: dict[Axis, int]) -> int:
    return math.prod(steps.get(axis, axis.size) for axis in value.axes)


class Run:
    """Computes the last value, a few rows at a time, from those before it."""

    def __init__(
        self, values: Sequence[Value], rows: Sequence[Axis], like: Tensor
    ) -> None:
        """Choose the axes that each value is sliced by.

        Args:
            values: The values, each after those that it is computed from.
            rows: The axes of Y.
            like: A tensor of the dtype and device.
        """
        self.last = values[-1]
        self.size = like.element_size()
        most = CHUNK if like.device.type == "cpu" else FILLING
        self.steps = _slicing(values, rows, self.size, most)
        self.sliced = sliced = list(self.steps)
        self.room = Room(like)
        self.states = {value: _State() for value in values}
        for value in values:
            state = self.states[value]
            if not value.parts:
                continue
            for part in value.parts:
                self.states[part].uses += 1
            state.grain = max(self.states[part].grain for part in value.parts)
            while self._bytes(value) > most and state.grain < len(sliced):
                state.grain += 1
        self.states[self.last].grain = len(sliced)
        for value in values:
            for part in value.parts:
                if self._axes(part) != self._axes(value):
                    self.states[part].brief = False

    @property
    def turns(self) -> int:
        """How many slices of rows there are."""
        return math.prod(-(-axis.size // step) for axis, step in self.steps.items())

    def write(self, into: Tensor) -> None:
        """Compute the last value, and write it into a contiguous tensor."""
        into = into.view([axis.size for axis in self.last.axes])
        ranges = (range(0, axis.size, step) for axis, step in self.steps.items())
        for starts in every(*ranges):
            slices = {
                axis: (start, min(step, axis.size - start))
                for start, (axis, step) in zip(starts, self.steps.items(), strict=True)
            }
            part = into
            for axis, (start, count) in slices.items():
                part = part.narrow(self.last.axes.index(axis), start, count)
            self._compute(self.last, slices, part)

    def bytes_held(self) -> int:
        """Return how many bytes would be held if no value were freed before the end."""
        return sum(map(self._bytes, self.states))

    def _bytes(self, value: Value) -> int:
        """Return how many bytes a value takes, sliced as it is."""
        steps = {axis: self.steps[axis] for axis in self._axes(value)}
        return self.size * _entries(value, steps)

    def _of(self, value: Value, slices: Slices) -> Tensor:
        state = self.states[value]
        mine = {axis: slices[axis] for axis in self._axes(value)}
        key = tuple(mine.values())
        if state.held is None or state.key != key:
            self._let_go(state)
            state.held, state.key = self._compute(value, slices, None), key
            state.left = state.uses
        tensor = state.held
        for axis, (start, count) in slices.items():
            if axis in value.axes and axis not in mine:
                tensor = tensor.narrow(value.axes.index(axis), start, count)
        return tensor

    def _compute(self, value: Value, slices: Slices, into: Tensor | None) -> Tensor:
        grain = self.states[value].grain
        ours = {it: slices[it] for it in self.sliced[:grain]}
        given = [self._of(it, ours) for it in value.parts]
        done = [self._is_done(part) for part in value.parts]
        made = value.compute(given, Now(ours, self.room, tuple(done), into))
        mine = self.states[value]
        if value.parts and into is None:
            mine.memory = made
        for part, held, is_done in zip(value.parts, given, done, strict=True):
            state = self.states[part]
            if _is_same(made, held):
                mine.memory, state.memory = state.memory, None
            if is_done:
                self._let_go(state)
        return made

    def _is_done(self, value: Value) -> bool:
        """Note a use of a value, and return whether its memory is free afterwards."""
        state = self.states[value]
        state.left -= 1
        return not state.left and state.brief and state.memory is not None

    def _axes(self, value: Value) -> list[Axis]:
        """Return the axes that a value is sliced by."""
        grain = self.states[value].grain
        return [axis for axis in self.sliced[:grain] if axis in value.axes]

    def _let_go(self, state: _State) -> None:
        if state.memory is not None:
            self.room.give(state.memory)
        state.held = state.memory = None


def _is_same(one: Tensor, two: Tensor) -> bool:
    """Return whether two tensors share memory."""
    return one.untyped_storage().data_ptr() == two.untyped_storage().data_ptr()
