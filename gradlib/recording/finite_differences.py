"""Checking a call's vector-Jacobian product (VJP) against finite differences.

All is computed in float64. With L = v·f(x), where v is the recorded ``grad_output``,
the slope of L along a direction d is (L(x + h d) - L(x - h d)) / 2h, and by the VJP it
is the product of d with the gradient. The error is the norm of their differences along
a few random directions, as a part of the larger of the two norms: along a single one
the slope, or its error, may be small by chance.
"""

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from gradlib.double import doubled
from gradlib.errors import CannotReplayError
from gradlib.plain_tensors import wide, widest
from gradlib.private.tensors import has_values
from gradlib.recording.attributes import Change
from gradlib.recording.flow import Key
from gradlib.recording.gaps import shape_of
from gradlib.recording.replay import forward_again, in_float64, inputs_of, replay
from gradlib.recording.slopes import HIDING, Apart, Slope, apart
from gradlib.recording.trace import CallTrace
from gradlib.stats import norm, root_mean_square

TOLERANCE = 1e-4
"""An error above this means a wrong backward, unless `rtol` allows more."""


class Look(NamedTuple):
    """Where slopes are taken, with parts of the value's root mean square."""

    away: float  # how far the point is from the recorded one, as such a part
    step: float  # the step h, as such a part
    least_step: float = 0.0  # the least h


# A kink at the point (an input of ReLU that is exactly 0, two equal inputs of a
# maximum) fools the first look, but none beside it. The least step is for a tiny value
# that the call adds to 1, where a small step is lost.
LOOKS = (
    Look(0.0, 1e-5),
    Look(1e-3, 1e-8),
    Look(1e-2, 1e-7),
    Look(1e-3, 1e-6),
    Look(0.0, 1e-5, least_step=1e-7),
)

# Of several values at once. Where these see an error, others look at each value alone.
# They allow less, as an error has to be seen by each.
LOOKS_AT_SEVERAL = LOOKS[0], LOOKS[2]
STRICTER = 4

# With two, a gradient with random errors of a thousandth of its norm often passed; with
# four, nearly none did in small modules.
DIRECTIONS = 4

ALIKE = 4
"""Slopes that are alike differ by this factor at most."""

MOST_NAMED = 32
"""How many wrong gradients of a call are looked for one by one.

Each takes dozens of forwards of the call, so that the time would grow by the square of
the number of its inputs and parameters, where a detach() makes all of them wrong.
"""

# Where an error is found, the slopes are taken again, with OTHER_STEP times the step.
# By how much they change, times ROOM, is added to the noise: rounding inside of a call
# shows nowhere else if what the call returns cancels out.
OTHER_STEP, ROOM = 1.5, 10

SEED = 7_105_243


def wrong_shares(trace: CallTrace, number: int, rtol: float) -> dict[Key, float]:
    """Return each input and own parameter whose gradient is wrong, with the error.

    Args:
        trace: The call.
        number: Our number of the backward pass.
        rtol: The error to allow, where it is more than `TOLERANCE`.

    Returns:
        The errors; NaN where slopes say nothing: for a parameter that the call itself
        writes to, as if it is initialised from the first batch, for one that a hook
        replaces, for a value that decides the shape of the output, and for one that
        may be wrong where `MOST_NAMED` others are.

    Raises:
        CannotReplayError: Too little is known of the call, or it raises in float64.
    """
    inputs = inputs_of(trace)
    if any(it.is_mkldnn for it in inputs.values()):
        raise CannotReplayError(
            "one of its inputs is in the layout of oneDNN, which knows no float64, and "
            "finite differences need that"
        )
    generator = torch.Generator("cpu").manual_seed(SEED)
    allowed = max(TOLERANCE, rtol)
    places = defaultdict[int, list[Key]](list)  # of each tensor, by its id
    for key, value in inputs.items():
        places[id(value)].append(key)
    values = {keys[0]: inputs[keys[0]] for keys in places.values()}
    errors = dict[Key, float]()
    with in_float64():
        for some in _together(trace, number, values):
            checked = _Checked(trace, number, some, generator, allowed)
            wrong = sum(error > allowed for error in errors.values())
            errors |= _singled_out(checked, MOST_NAMED - wrong)
    found = {key: errors[places[id(value)][0]] for key, value in inputs.items()}
    return {key: error for key, error in found.items() if not error <= allowed}


def _together(
    trace: CallTrace, number: int, values: dict[Key, Tensor]
) -> Iterator[dict[Key, Tensor]]:
    """Yield the values that are moved at once, at first.

    Those without a gradient, or with one of zeros, are moved apart from the others: any
    slope along them is an error. The others come in the order of their slopes, so that
    a half of them has slopes of about one size.
    """
    again = None if len(values) < 2 else replay(trace, number, doubled)
    if again is None or again.shares is None:
        yield from ({key: value} for key, value in values.items())
        return
    slopes: dict[Key, float] = {}
    for key, value in values.items():
        grad = again.shares.get(key)
        size = 0.0 if grad is None else norm([grad])
        slopes[key] = size * _scale(_widened(value))
    order = sorted(slopes, key=slopes.__getitem__)
    still = [key for key in order if not slopes[key]]
    for keys in (still, order[len(still) :]):
        if keys:
            yield {key: values[key] for key in keys}


def _singled_out(checked: "_Checked", most: int) -> dict[Key, float]:
    """Return the error of each value; 0 where those moved at once have none.

    Where they may have one, each half of them is moved at once, and so on.

    Args:
        checked: The values.
        most: After how many wrong ones those that may be wrong too get NaN.
    """
    errors = dict[Key, float]()
    wrong = 0
    waiting = [[*checked.values]]
    while waiting:
        keys = waiting.pop()
        part = checked.of(keys)
        error = part.error()
        if len(keys) == 1:
            errors[keys[0]] = error
            wrong += error > part.allowed
        elif error <= part.allowed:
            errors |= dict.fromkeys(keys, 0.0)
        elif wrong >= most:
            errors |= dict.fromkeys(keys, math.nan)
        else:
            middle = len(keys) // 2
            waiting += keys[middle:], keys[:middle]
    return errors


@dataclass(frozen=True, slots=True)
class _Checked:
    """Inputs and own parameters whose gradients are checked, all at once.

    Attributes:
        trace: The call.
        number: Our number of the backward pass.
        values: Their recorded values, each only once.
        generator: Draws the directions.
        allowed: The largest error that is allowed.
    """

    trace: CallTrace
    number: int
    values: dict[Key, Tensor]
    generator: torch.Generator
    allowed: float

    def of(self, keys: Iterable[Key]) -> "_Checked":
        """Return the check of some of the values, a stricter one of several."""
        values = {key: self.values[key] for key in keys}
        allowed = self.allowed / (STRICTER if len(values) > 1 else 1)
        return replace(self, values=values, allowed=allowed)

    def error(self) -> float:
        """Return the smallest error of all looks: one look without an error is enough.

        It is NaN where slopes say nothing, and of several values where each has to be
        looked at alone. A look in which rounding may hide an error counts only if none
        is clear. Where the shape of the output depends on which entries are 0, as if
        padding is dropped, these stay 0.
        """
        least: dict[bool, float] = {}  # by whether a look is clear
        several = len(self.values) > 1
        for look in LOOKS_AT_SEVERAL if several else LOOKS:
            seen = self._seen_from(look)
            if seen is None:
                if several:
                    return math.nan
                continue
            if math.isnan(seen.error):
                return math.nan
            known = least.get(seen.is_clear, math.inf)
            least[seen.is_clear] = min(seen.error, known)
            if least.get(True, math.inf) <= self.allowed:
                break
        if not least:
            seen = self._seen_from(LOOKS[0], holds_zeros=True)
            return math.nan if seen is None else seen.error
        return least.get(True, least.get(False, math.nan))

    def _seen_from(self, look: Look, *, holds_zeros: bool = False) -> Apart | None:
        """Return how far the slopes at one point are apart.

        It is ``None`` where there are no slopes, and of several values where only some
        have one, or rounding may hide more than it would alone. The error is NaN where
        slopes say nothing, as the call uses another value than the one that is moved.

        Args:
            look: The point, and the step.
            holds_zeros: Whether entries that are 0 stay so.
        """
        if not all(map(has_values, self.values.values())):
            return Apart(math.nan, is_clear=True)
        points = {key: _widened(value) for key, value in self.values.items()}
        scales = {key: _scale(point) for key, point in points.items()}
        for key, point in points.items():
            far = look.away * scales[key]
            points[key] = point + far * drawn_like(point, self.generator)
        again = replay(self.trace, self.number, self._moved(points))
        if again.shares is None or not points.keys() <= again.shares.keys():
            return None
        grads = {key: again.shares[key] for key in points}
        for key, point in points.items():
            if key in again.written or not _fits(grads[key], point):
                return Apart(math.nan, is_clear=True)
        steps = {
            key: max(look.step * it, look.least_step) for key, it in scales.items()
        }
        moves = [self._move(points, steps, holds_zeros) for _ in range(DIRECTIONS)]
        return self._compared(points, grads, moves)

    def _move(
        self,
        points: Mapping[Key, Tensor],
        steps: Mapping[Key, float],
        holds_zeros: bool,
    ) -> dict[Key, Tensor]:
        """Return a step in a random direction, from each point."""
        move: dict[Key, Tensor] = {}
        for key, point in points.items():
            direction = drawn_like(point, self.generator)
            if (row := _row_without_gradient(self.trace, key)) is not None:
                direction[row] = 0
            if holds_zeros:
                direction *= point != 0
            move[key] = steps[key] * direction
        return move

    def _compared(
        self,
        points: Mapping[Key, Tensor],
        grads: Mapping[Key, Tensor | None],
        moves: list[dict[Key, Tensor]],
    ) -> Apart | None:
        """Return how far the slopes by the two ways are apart; see `_seen_from`.

        Of several values, the steps are made shorter until all slopes are as small as
        the smallest. So an error counts as much as if each value were moved alone.
        """
        known = {key: [_along(grads[key], it[key]) for it in moves] for key in points}
        sizes = {key: math.hypot(*it) for key, it in known.items()}
        smallest = min(sizes.values()) if len(sizes) > 1 else 0.0
        if any(sizes.values()) and len(sizes) > 1:
            if not (smallest and math.isfinite(sum(sizes.values()))):
                return None
            for key, size in sizes.items():
                known[key] = [it * smallest / size for it in known[key]]
                for move in moves:
                    move[key] = move[key] * (smallest / size)
        slopes = [self._slope(points, it) for it in moves]
        for slope, of_each in zip(
            slopes, zip(*known.values(), strict=True), strict=True
        ):
            slope.known = sum(of_each)
        if smallest:
            are_alike = max(sizes.values()) <= ALIKE * smallest
            hiding = HIDING if are_alike else self.allowed
            found = apart(slopes, smallest, hiding)
            return found if found and found.is_clear else None
        found = apart(slopes)
        if found is None or found.error <= self.allowed:
            return found
        for slope, move in zip(slopes, moves, strict=True):
            longer = {key: OTHER_STEP * it for key, it in move.items()}
            other = self._slope(points, longer).seen / OTHER_STEP
            slope.noise += ROOM * abs(slope.seen - other)
        return apart(slopes)

    def _slope(self, points: Mapping[Key, Tensor], move: Mapping[Key, Tensor]) -> Slope:
        """Return the slope along a step, by finite differences, times its length.

        It is NaN where the output has another shape there.
        """
        trace = self.trace
        ahead, behind = (
            forward_again(
                trace,
                self._moved({key: it + sign * move[key] for key, it in points.items()}),
            )
            for sign in (1, -1)
        )
        rise = rounding = 0.0
        counted: set[int] = set()
        leaves = dict[Any, Any](enumerate(trace.output_leaves()))
        for key, v in trace.arrived(self.number).items():
            kept = id(leaves.get(key, v))
            if kept in counted:
                continue  # a tensor that is returned twice has one gradient
            counted.add(kept)
            y, before = (_leaf_like(v, it.get(key)) for it in (ahead, behind))
            if y is None or before is None:
                return Slope(math.nan, 0.0)
            v, y, before = doubled(v).to(y.device), wide(y), wide(before)
            rise += _dot(v, y - before)
            rounding += _dot(v.abs(), y.abs())
        return Slope(rise / 2, 100 * torch.finfo(torch.float64).eps * rounding)

    def _moved(self, moved: Mapping[Key, Tensor]) -> Change:
        by_id = {id(self.values[key]): it for key, it in moved.items()}

        def change(kept: Tensor) -> Tensor:
            found = by_id.get(id(kept))
            return doubled(kept) if found is None else found

        return change


def _fits(grad: Tensor | None, point: Tensor) -> bool:
    return grad is None or grad.is_nested or grad.shape == point.shape


def _along(grad: Tensor | None, move: Tensor) -> float:
    return 0.0 if grad is None else _dot(grad, move.to(grad.device))


def _widened(value: Tensor) -> Tensor:
    """Return the value to move, also one of eight bits.

    A value that is not moved keeps its eight bits: the few operations that take it take
    no other dtype.
    """
    return value.detach().to(widest(value))


def _scale(point: Tensor) -> float:
    return root_mean_square(point) or 1.0


def _leaf_like(grad: Tensor, leaf: Any) -> Tensor | None:
    """Return a leaf of an output, if it has the shape of its recorded gradient."""
    fits = isinstance(leaf, Tensor) and shape_of(leaf) == shape_of(grad)
    return leaf if fits else None


def _row_without_gradient(trace: CallTrace, key: Key) -> int | None:
    """Return the row of a weight that torch gives no gradient on purpose, if any."""
    module = trace.module
    if key != "weight" or not isinstance(module, nn.Embedding | nn.EmbeddingBag):
        return None
    return module.padding_idx


def drawn_like(tensor: Tensor, generator: torch.Generator) -> Tensor:
    """Return a tensor like another one, with random entries."""
    if tensor.is_nested:
        made = torch.zeros_like(tensor)
        for part in made.unbind():
            part.copy_(drawn_like(part, generator))
        return made
    if tensor.layout != torch.strided:  # entries that are not stored stay zero
        made = tensor.clone()
        is_coo = made.layout == torch.sparse_coo
        values = cast(Any, made)._values() if is_coo else made.values()
        values.copy_(drawn_like(values, generator))
        return made
    drawn = torch.randn(
        tensor.shape, generator=generator, dtype=widest(tensor), device="cpu"
    )
    return drawn.to(tensor.device, tensor.dtype)


def _dot(a: Tensor, b: Tensor) -> float:
    """Return the change of a real L, for the gradient `a`, along `b`."""
    a, b = wide(a), wide(b)
    return (a.conj() * b).real.sum().item() if a.is_complex() else (a * b).sum().item()
