"""The slope of a function along a direction, by a pair of calls."""

from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

from gradlib.errors import DetachedPathError
from gradlib.jacobian.again import Called
from gradlib.jacobian.differences import (
    ROUNDING,
    Caller,
    by_sample,
    slopes,
    tensors_of,
)
from gradlib.jacobian.directions import Moves
from gradlib.jacobian.lifted import Cast
from gradlib.jacobian.repeatable import (
    close_for,
    not_repeatable,
    record_from_now_on,
)

CLOSER = 0.1
"""A slope in doubt is computed once more, with a step shorter by this factor.

Among a million ReLUs one or two have a kink within the first step.
"""

LEAP = 1e-4
"""By which part of its size an output may move between calls that are so near. Kinks
move it by a hundredth of that, and randomness by more."""

SAME_CAST = 1e-3
"""By which part of a step's change a sum may differ when the same call is repeated."""


@dataclass(frozen=True)
class Slopes:
    """The slope of each output along a direction.

    Attributes:
        caller: Calls the function.
        along: The direction.
        step: How far each of a pair of calls went along it.
        rounding: By how many eps of its dtype an output may be off.
        steep: The slope of each output, ``(batch, out)``.
        sizes: The norm of each output for each sample, ``(batch,)``.
    """

    caller: Caller
    along: Moves
    step: float
    rounding: float
    steep: list[Tensor]
    sizes: list[Tensor]

    def noise(self, root: int) -> Tensor:
        """Return how far rounding may move each sample's slope, ``(batch,)``."""
        size = self.sizes[root]
        return size * (self.rounding * torch.finfo(size.dtype).eps / self.step)

    def closer(self) -> "Slopes":
        """Return the slopes along the same direction by a shorter step.

        It meets few kinks.

        Rounding is larger then, and no allowance is made for it.
        """
        return _slopes(self.caller, self.along, CLOSER * self.step, 0)

    def leaps(self, closer: "Slopes") -> bool:
        """Tell whether an output moves more, in two pairs of calls, than by a kink."""
        for root, sizes in enumerate(self.sizes):
            size, nearer = length(sizes, 0), length(closer.sizes[root], 0)
            pairs = (self.step, self.steep), (closer.step, closer.steep)
            rises = [2 * step * length(it[root].flatten(), 0) for step, it in pairs]
            moved = ((size - nearer).abs(), *rises)
            if any(bool(it > LEAP * size) for it in moved):
                return True
        return False

    def repeated(self, times: int) -> "Slopes":
        """Compute the slopes again, with calls that autograd records.

        Returns:
            These slopes; or the new ones, where recording alone changes them. Then all
            further calls are recorded.

        Raises:
            NotRepeatableError: The very same calls give other slopes.
        """
        recorded = self
        for _ in range(times):
            recorded = self._again(graph=True)
            if not self._is_like(recorded):
                break
        else:
            return self
        record_from_now_on(self.caller, lambda: self._is_like(self._again(graph=False)))
        return recorded

    def _again(self, *, graph: bool) -> "Slopes":
        return _slopes(self.caller, self.along, self.step, self.rounding, graph=graph)

    def _is_like(self, other: "Slopes") -> bool:
        close = close_for(self.caller) / self.step
        return all(
            torch.allclose(a, b, 0, close * _largest(sizes), equal_nan=True)
            for a, b, sizes in zip(self.steep, other.steep, self.sizes, strict=True)
        )


def first_slopes(caller: Caller) -> Slopes:
    """Return the slopes along a random direction.

    Raises:
        DetachedPathError: Numbers that depend on an input become integers.
    """
    return _slopes(caller, caller.direction(), caller.how.step, ROUNDING)


def length(values: Tensor, axis: int = 1) -> Tensor:
    """Return the norm of each row."""
    return cast(Any, torch.linalg).vector_norm(values, dim=axis)


def _largest(sizes: Tensor) -> float:
    finite = sizes[sizes.isfinite()]
    return finite.max().item() if finite.numel() else 0.0


def _slopes(
    caller: Caller, along: Moves, step: float, rounding: float, *, graph: bool = False
) -> Slopes:
    ahead = caller.at((step, along), graph=graph).without_graph()
    behind = caller.at((-step, along), graph=graph).without_graph()
    cast_ = _cast_of_input(ahead, behind)
    if cast_ is not None:
        _require_same_casts(ahead, behind, caller.at((step, along), graph=graph))
        if not (graph or caller.needs_graph):  # as where fn rounds what has no graph
            caller.needs_graph = True
            return _slopes(caller, along, step, rounding)
        raise _cast_path(cast_)
    return Slopes(
        caller,
        along,
        step,
        rounding,
        slopes(ahead, behind, step),
        [length(by_sample(it)) for it in tensors_of(ahead)],
    )


def _cast_of_input(ahead: Called, behind: Called) -> Cast | None:
    """Return a cast to integers that depends on the input and is used as numbers."""
    for a, b in zip(ahead.lifted.casts, behind.lifted.casts, strict=False):
        if a.used and b.used and not torch.equal(a.sums, b.sums):
            return a
    return None


def _require_same_casts(ahead: Called, behind: Called, again: Called) -> None:
    """Raise where the same call casts other numbers to integers when repeated."""
    before, now = ahead.lifted.casts, again.lifted.casts
    is_same = len(before) == len(now) and all(
        (a.sums - c.sums).abs() <= SAME_CAST * (a.sums - b.sums).abs()
        for a, b, c in zip(before, behind.lifted.casts, now, strict=False)
    )
    if not is_same:
        raise not_repeatable()


def _cast_path(found: Cast) -> DetachedPathError:
    return DetachedPathError(
        f"A value that depends on the input is cast to integers in {found.where}, "
        "and they are used as numbers: no derivative goes through that, and "
        "the Jacobian knows nothing of it. Leave the cast out; or, if it is "
        "meant to be constant, pass check=False."
    )
