"""Checking a call's vector-Jacobian product (VJP) against finite differences.

All is computed in float64. With L = v·f(x), where v is the recorded ``grad_output``,
the slope of L along a direction d is (L(x + h d) - L(x - h d)) / 2h, and by the VJP it
is the product of d with the gradient.
"""

import math
from typing import Any, cast

import torch
from torch import Tensor, nn

from gradlib.double import in_double, wider
from gradlib.recording.replay import Change, forward_again, inputs_of, replay
from gradlib.recording.trace import CallTrace, Key
from gradlib.stats import wide
from gradlib.values import clone

TOLERANCE = 1e-4
"""Of the slope, as a part of the gradient's norm: what a wrong backward exceeds."""

# How far from the recorded point, and with which step h, both as parts of the value's
# root mean square. A kink at the point (an input of ReLU that is exactly 0, two equal
# ones of a maximum) fools the first look, and no later one.
LOOKS = ((0.0, 1e-5), (1e-3, 1e-8), (1e-2, 1e-7), (1e-3, 1e-6))

SEED = 7_105_243


def wrong_shares(trace: CallTrace, number: int) -> dict[Key, float]:
    """Return each input and own parameter whose gradient is wrong, with the error.

    Args:
        trace: The call.
        number: Our number of the backward pass.

    Raises:
        CannotReplayError: Too little is known of the call, or it raises in float64.
    """
    generator = torch.Generator("cpu").manual_seed(SEED)
    with in_double():
        errors = {
            key: _error(trace, number, key, value, generator)
            for key, value in inputs_of(trace).items()
        }
    return {key: error for key, error in errors.items() if error > TOLERANCE}


def _error(
    trace: CallTrace, number: int, key: Key, value: Tensor, generator: torch.Generator
) -> float:
    """Return the smallest error of all looks: who is right once is right."""
    least = math.inf
    seen = False
    for away, step in LOOKS:
        error = _look(trace, number, key, value, away, step, generator)
        if error is not None:
            seen, least = True, min(least, error)
        if least <= TOLERANCE:
            break
    return least if seen else 0.0


def _look(
    trace: CallTrace,
    number: int,
    key: Key,
    value: Tensor,
    away: float,
    step: float,
    generator: torch.Generator,
) -> float | None:
    """Return how far the two slopes are apart; ``None`` where there is no slope."""
    point = _double(value)
    scale = _norm(point) / math.sqrt(max(point.numel(), 1)) or 1.0
    point = point + away * scale * drawn_like(point, generator)
    direction = drawn_like(point, generator)
    if (row := _row_without_gradient(trace, key)) is not None:
        direction[row] = 0
    h = step * scale

    def at(shift: float) -> Change:
        return _moved(value, point + shift * direction)

    shares = replay(trace, number, at(0.0)).shares
    if shares is None or key not in shares:
        return None
    grad = shares[key]
    grads = trace.gradients("outputs", number)
    rise = 0.0
    rounding = 0.0
    ahead, behind = (forward_again(trace, at(shift)) for shift in (h, -h))
    counted: set[int] = set()
    for place, v in cast(dict[int, Tensor], grads).items():
        kept = trace.output.leaves[place] if trace.output else None
        if id(kept) in counted:
            continue  # what is returned twice is one tensor, with one gradient
        counted.add(id(kept))
        y = ahead.leaves[place]
        v = _double(v).to(y.device)
        rise += _dot(v, y - behind.leaves[place])
        rounding += _dot(v.abs(), y.abs())
    slope = rise / (2 * h)
    if not math.isfinite(slope):
        return None
    known = size = 0.0
    if grad is not None:
        known, size = _dot(grad, direction.to(grad.device)), _norm(grad)
    noise = 100 * torch.finfo(torch.float64).eps * rounding / h
    apart = abs(slope - known) - noise
    if not math.isfinite(apart):
        return math.inf
    return apart / max(size, abs(slope)) if apart > 0 else 0.0


def _row_without_gradient(trace: CallTrace, key: Key) -> int | None:
    """Return which row of a weight torch gives no gradient, as it is meant to be."""
    module = trace.module
    if key != "weight" or not isinstance(module, nn.Embedding | nn.EmbeddingBag):
        return None
    return module.padding_idx


def _moved(value: Tensor, moved: Tensor) -> Change:
    def change(kept: Tensor) -> Tensor:
        return clone(moved if kept is value else _double(kept))

    return change


def drawn_like(tensor: Tensor, generator: torch.Generator) -> Tensor:
    """Return a tensor of the form of another one, its entries drawn at random."""
    if tensor.is_nested:
        made = torch.zeros_like(tensor)
        for part in made.unbind():
            part.copy_(drawn_like(part, generator))
        return made
    if tensor.layout != torch.strided:  # it stays zero where it is
        made = tensor.clone()
        is_coo = made.layout == torch.sparse_coo
        values = cast(Any, made)._values() if is_coo else made.values()
        values.copy_(drawn_like(values, generator))
        return made
    dtype = torch.complex128 if tensor.is_complex() else torch.float64
    drawn = torch.randn(tensor.shape, generator=generator, dtype=dtype, device="cpu")
    return drawn.to(tensor.device, tensor.dtype)


def _double(tensor: Tensor) -> Tensor:
    return tensor.detach().to(wider(tensor.dtype))


def _dot(a: Tensor, b: Tensor) -> float:
    """Return the change of a real L, for the gradient `a`, along `b`."""
    a, b = wide(a), wide(b)
    return (a.conj() * b).real.sum().item() if a.is_complex() else (a * b).sum().item()


def _norm(tensor: Tensor) -> float:
    return wide(tensor).abs().square().sum().sqrt().item()
