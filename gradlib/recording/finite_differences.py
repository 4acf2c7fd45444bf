"""Checking a call's vector-Jacobian product (VJP) against finite differences.

All is computed in float64. With L = v·f(x), where v is the recorded ``grad_output``,
the slope of L along a direction d is (L(x + h d) - L(x - h d)) / 2h, and by the VJP it
is the product of d with the gradient. The error is the norm of their differences along
a few random directions, as a part of the larger of the two norms: along a single one
the slope, or its error, may be small by chance.
"""

import math
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

from gradlib.double import Double, wider
from gradlib.errors import CannotReplayError
from gradlib.private.tensors import has_values
from gradlib.recording.difference import shape_of
from gradlib.recording.replay import forward_again, inputs_of, replay
from gradlib.recording.scene import Change
from gradlib.recording.trace import CallTrace, Key
from gradlib.stats import wide
from gradlib.tree import Tree

TOLERANCE = 1e-4
"""An error above this means a wrong backward, unless `rtol` allows more."""

# How far from the recorded point, and with which step h, both as parts of the value's
# root mean square; and the least step. A kink at the point (an input of ReLU that is
# exactly 0, two equal inputs of a maximum) fools the first look, but none beside it.
# The least step is for a tiny value that the call adds to 1, where a small step is
# lost.
LOOKS = (
    (0.0, 1e-5, 0.0),
    (1e-3, 1e-8, 0.0),
    (1e-2, 1e-7, 0.0),
    (1e-3, 1e-6, 0.0),
    (0.0, 1e-5, 1e-7),
)

# With two, a gradient with random errors of a thousandth of its norm often passed; with
# four, nearly none did in small modules.
DIRECTIONS = 4

HIDING = 0.1
"""Rounding of more than this part of the slopes may hide an error."""

# Where an error is found, the slopes are taken again, with OTHER_STEP times the step.
# By how much they change, times ROOM, is added to the noise: rounding inside of a call
# shows nowhere else if what the call returns cancels out.
OTHER_STEP, ROOM = 1.5, 10

SEED = 7_105_243

IN_FLOAT64 = (
    "Finite differences compute it in float64; as it was recorded, verify() without "
    "numerical=True compares it"
)


def wrong_shares(trace: CallTrace, number: int, rtol: float) -> dict[Key, float]:
    """Return each input and own parameter whose gradient is wrong, with the error.

    Args:
        trace: The call.
        number: Our number of the backward pass.
        rtol: The error to allow, where it is more than `TOLERANCE`.

    Returns:
        The errors; NaN where slopes say nothing: for a parameter that the call itself
        writes to, as if it is initialised from the first batch, for one that a hook
        replaces, and for a value that decides the shape of the output.

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
    try:
        with Double():
            errors = {
                key: _Checked(trace, number, key, value, generator, allowed).error()
                for key, value in inputs.items()
            }
    except CannotReplayError as error:
        raise CannotReplayError(f"{error}. {IN_FLOAT64}") from error
    return {key: error for key, error in errors.items() if not error <= allowed}


@dataclass(frozen=True, slots=True)
class _Checked:
    """An input or own parameter whose gradient is checked.

    Attributes:
        trace: The call.
        number: Our number of the backward pass.
        key: Which input or parameter.
        value: Its recorded value.
        generator: Draws the directions.
        allowed: The largest error that is allowed.
    """

    trace: CallTrace
    number: int
    key: Key
    value: Tensor
    generator: torch.Generator
    allowed: float

    def error(self) -> float:
        """Return the smallest error of all looks: one look without an error is enough.

        It is NaN where slopes say nothing. A look in which rounding may hide an error
        counts only if none is clear. Where the shape of the output depends on which
        entries are 0, as if padding is dropped, these stay 0.
        """
        least: dict[bool, float] = {}  # by whether a look is clear
        for away, step, least_step in LOOKS:
            look = self._look(away, step, least_step)
            if look is not None and math.isnan(look[0]):
                return math.nan
            if look is not None:
                error, is_clear = look
                least[is_clear] = min(error, least.get(is_clear, math.inf))
            if least.get(True, math.inf) <= self.allowed:
                break
        if not least:
            look = self._look(*LOOKS[0], holds_zeros=True)
            return math.nan if look is None else look[0]
        return least.get(True, least.get(False, math.nan))

    def _look(
        self, away: float, step: float, least_step: float, *, holds_zeros: bool = False
    ) -> tuple[float, bool] | None:
        """Return the error at one point, and whether rounding is too small to hide one.

        It is ``None`` where there are no slopes. The error is NaN where these say
        nothing, as the call uses another value than the one that is moved.

        Args:
            away: How far the point is from the recorded one, as a part of the value.
            step: The step h, as a part of the value.
            least_step: The least step h.
            holds_zeros: Whether entries that are 0 stay so.
        """
        if not has_values(self.value):
            return math.nan, True
        point = self.value.detach().to(_widest(self.value))
        scale = root_mean_square(point) or 1.0
        point = point + away * scale * drawn_like(point, self.generator)
        again = replay(self.trace, self.number, self._moved(point))
        shares = again.shares
        if shares is None or self.key not in shares:
            return None
        if self.key in again.written:
            return math.nan, True
        grad, h = shares[self.key], max(step * scale, least_step)
        if grad is not None and not grad.is_nested and grad.shape != point.shape:
            return math.nan, True
        directions = [self._direction(point) for _ in range(DIRECTIONS)]
        if holds_zeros:
            directions = [it * (point != 0) for it in directions]
        slopes = [self._slope(point, it, h) for it in directions]
        for slope, direction in zip(slopes, directions, strict=True):
            if grad is not None:
                slope.known = _dot(grad, direction.to(grad.device))
        found = _relative(slopes)
        if found is None or found[0] <= self.allowed:
            return found
        for slope, direction in zip(slopes, directions, strict=True):
            other = self._slope(point, direction, OTHER_STEP * h)
            slope.noise += ROOM * abs(slope.seen - other.seen)
        return _relative(slopes)

    def _direction(self, point: Tensor) -> Tensor:
        direction = drawn_like(point, self.generator)
        if (row := _row_without_gradient(self.trace, self.key)) is not None:
            direction[row] = 0
        return direction

    def _slope(self, point: Tensor, direction: Tensor, h: float) -> "_Slope":
        """Return the slope at a point, by finite differences.

        It is NaN where the output has another shape there.
        """
        trace = self.trace
        ahead, behind = (
            forward_again(trace, self._moved(point + shift * direction))
            for shift in (h, -h)
        )
        rise = rounding = 0.0
        counted: set[int] = set()
        grads = cast(dict[int, Tensor], trace.gradients("outputs", self.number))
        for place, v in grads.items():
            kept = trace.output.leaves[place] if trace.output else None
            if id(kept) in counted:
                continue  # a tensor that is returned twice has one gradient
            counted.add(id(kept))
            y, before = (_leaf_like(v, it, place) for it in (ahead, behind))
            if y is None or before is None:
                return _Slope(math.nan, 0.0)
            v = doubled(v).to(y.device)
            rise += _dot(v, y - before)
            rounding += _dot(v.abs(), y.abs())
        noise = 100 * torch.finfo(torch.float64).eps * rounding / h
        return _Slope(rise / (2 * h), noise)

    def _moved(self, moved: Tensor) -> Change:
        return lambda kept: moved if kept is self.value else doubled(kept)


@dataclass(slots=True)
class _Slope:
    """The slope of L along one direction."""

    seen: float  # by finite differences
    noise: float  # how far rounding may have moved that
    known: float = 0.0  # by the VJP


def _relative(slopes: list[_Slope]) -> tuple[float, bool] | None:
    """Return how far the slopes by the two ways are apart, as a part of the larger.

    Returns:
        That, and whether rounding is too small to hide more; ``None`` where a finite
        difference is not finite.
    """
    seen, known = [it.seen for it in slopes], [it.known for it in slopes]
    if not all(map(math.isfinite, seen)):
        return None
    if not all(map(math.isfinite, known)):
        return math.inf, True
    apart = [max(abs(it.seen - it.known) - it.noise, 0.0) for it in slopes]
    size = max(math.hypot(*seen), math.hypot(*known))
    is_clear = math.hypot(*(it.noise for it in slopes)) <= HIDING * size
    return (math.hypot(*apart) / size if any(apart) else 0.0), is_clear


def _leaf_like(grad: Tensor, output: Tree, place: int) -> Tensor | None:
    """Return a leaf of an output, if it has the shape of its recorded gradient."""
    leaf = output.leaves[place] if place < len(output.leaves) else None
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
        tensor.shape, generator=generator, dtype=_widest(tensor), device="cpu"
    )
    return drawn.to(tensor.device, tensor.dtype)


def _widest(tensor: Tensor) -> torch.dtype:
    """Return the dtype in which a value is moved, also one of eight bits.

    An eight-bit value that is not moved keeps its dtype: the few operations that take
    it take no other.
    """
    return torch.complex128 if tensor.is_complex() else torch.float64


def doubled(tensor: Tensor) -> Tensor:
    """Return a tensor in float64, or complex128."""
    return tensor.detach().to(wider(tensor.dtype))


def _dot(a: Tensor, b: Tensor) -> float:
    """Return the change of a real L, for the gradient `a`, along `b`."""
    a, b = wide(a), wide(b)
    return (a.conj() * b).real.sum().item() if a.is_complex() else (a * b).sum().item()


def root_mean_square(tensor: Tensor) -> float:
    """Return the root mean square of a tensor's entries."""
    norm = wide(tensor).abs().square().sum().sqrt().item()
    return norm / math.sqrt(max(tensor.numel(), 1))
