"""Compares slopes by autograd with slopes by differences, right beside a point."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from gradlib.jacobian.again import Called
from gradlib.jacobian.arguments import Arguments
from gradlib.jacobian.differences import HIDING, ROUNDING, Caller, tensors_of
from gradlib.jacobian.directions import Moves
from gradlib.jacobian.repeatable import is_repeated
from gradlib.jacobian.rounding import TIMES
from gradlib.private.passes import grad_in_modes

SETTLED = 0.2
"""How far slopes by several steps may be apart, as a part of their size, and of the
error that they show."""

THIN = 4
"""How many entries of a sample move where slopes do not settle with all moving. Where
fn rounds to whole numbers, one of hundreds steps over an edge in any direction."""

SUMS = 4
"""How many random sums of the outputs a look compares: two may agree by chance."""


class Verdict(Enum):
    """How slopes by differences compare with those by autograd; FLAT: they are 0."""

    AGREE = 0
    APART = 1
    FLAT = 2
    UNSETTLED = 3


def look_beside(
    caller: Caller,
    root: int,
    unclear: Tensor,
    away: float,
    step: float,
    *,
    thin: bool = False,
) -> tuple[Verdict, Called | None]:
    """Compare the slopes of several sums of the outputs, beside the point, once.

    Where they do not agree, all calls are repeated, to rule out randomness.

    Args:
        caller: Calls the function.
        root: Which output.
        unclear: Which of its entries count, ``(batch, out)``.
        away: How far beside the point.
        step: How far the pair of calls goes from there.
        thin: Whether few entries of each sample move.

    Returns:
        The verdict, and where they agree the call beside the point, else ``None``.
    """
    aside, along = (away, caller.direction()), caller.direction()
    if thin:
        along = _thinned(caller, along)
    line = _Line(caller, root, aside, along)
    base = caller.at(aside, graph=True)
    pair = line.pair(step)
    verdict = _verdict(line, base, unclear, pair, step)
    if verdict is Verdict.AGREE:
        return verdict, base
    y = tensors_of(base)[root].detach()
    del base  # and its graph
    if line.is_repeated(y, pair, step):
        return verdict, None
    # Recording changed an output, so all calls are recorded from now on.
    return look_beside(caller, root, unclear, away, step, thin=thin)


@dataclass(frozen=True)
class _Line:
    """A line through a place beside the point, to call the function on.

    Attributes:
        caller: Calls the function.
        root: Which output counts.
        aside: The move from the point to the place.
        along: The direction of the line.
    """

    caller: Caller
    root: int
    aside: tuple[float, Moves]
    along: Moves

    def pair(self, step: float) -> tuple[Tensor, Tensor]:
        """Return the output a step ahead, and a step behind."""
        ahead, behind = (
            tensors_of(self.caller.at(self.aside, (it, self.along)))[self.root].detach()
            for it in (step, -step)
        )
        return ahead, behind

    def rise(self, step: float) -> Tensor:
        """Return the slope of each entry of the output, like the output."""
        return _rise(self.pair(step), step)

    def is_repeated(self, y: Tensor, pair: tuple[Tensor, Tensor], step: float) -> bool:
        """Tell whether the calls give their outputs again when autograd records them.

        Raises:
            NotRepeatableError: The very same calls give other outputs.
        """
        if not is_repeated(self.caller, y, self.root, self.aside, graph=True):
            return False
        return all(
            is_repeated(self.caller, it, self.root, self.aside, (at, self.along))
            for it, at in zip(pair, (step, -step), strict=True)
        )


def _verdict(
    line: _Line,
    base: Called,
    unclear: Tensor,
    pair: tuple[Tensor, Tensor],
    step: float,
) -> Verdict:
    """Compare slopes by VJPs with slopes by differences.

    Args:
        line: The line that the calls are on.
        base: The call at its place beside the point.
        unclear: Which entries of the output count, ``(batch, out)``.
        pair: The output a step ahead, and a step behind.
        step: The length of that step.
    """
    caller, along = line.caller, line.along
    y = tensors_of(base)[line.root]
    left_out, rows = ~unclear.view(y.shape).to(y.device), unclear.any(1)
    rises = [_rise(pair, step)]
    verdict = Verdict.AGREE
    for _ in range(SUMS):
        v = caller.chance.vector(y)
        v[left_out] = 0
        known, size = _slope_by_vjp(caller.arguments, base, y, v, along, rows)
        slope = _slope(v, rises[0])
        noise = ROUNDING * torch.finfo(y.dtype).eps * _size(_at(v, v * y)) / step
        apart, size = abs(slope - known), max(size, abs(slope))
        if not math.isfinite(apart):
            return Verdict.UNSETTLED
        if apart > caller.how.surer * size + noise:
            if len(rises) == 1:
                rises += [line.rise(times * step) for times in TIMES]
            # Differences that do not settle say nothing.
            others = [_slope(v, it) for it in rises[1:]]
            known_to = max(map(abs, (slope, *others))) + noise / SETTLED
            if max(abs(slope - it) for it in others) > SETTLED * min(apart, known_to):
                return Verdict.UNSETTLED
            if slope == 0 and _is_swallowed(caller, along, step, known * step):
                return Verdict.UNSETTLED
            flat = slope == 0 and verdict is not Verdict.APART
            verdict = Verdict.FLAT if flat else Verdict.APART
        elif noise > HIDING * size and step < caller.how.coarse and slope != known:
            return Verdict.UNSETTLED  # rounding could hide a path
    return verdict


def _rise(pair: tuple[Tensor, Tensor], step: float) -> Tensor:
    """Return the slope of each entry of an output between two calls."""
    ahead, behind = pair
    return (ahead - behind) / (2 * step)


def _slope(v: Tensor, rise: Tensor) -> float:
    return _at(v, v * rise).sum().item()


def _size(values: Tensor) -> float:
    return values.detach().square().sum().sqrt().item()


def _at(v: Tensor, values: Tensor) -> Tensor:
    """Return the values where v is not zero: elsewhere they may be NaN."""
    return values[v != 0]


def _slope_by_vjp(
    arguments: Arguments,
    base: Called,
    y: Tensor,
    v: Tensor,
    along: Moves,
    rows: Tensor,
) -> tuple[float, float]:
    """Return the slope of ``v · y`` along a direction, and the norm of its terms."""
    keys = [it.key for it in arguments.asked]
    if not y.requires_grad:
        return 0.0, 0.0
    with base.again():
        leaves = [base.leaves[it] for it in keys]
        grads = grad_in_modes([y], leaves, [v], retain_graph=True)
    slope = square = 0.0
    for it, name, grad in zip(arguments.asked, keys, grads, strict=True):
        if grad is not None:
            change = grad.to_dense() * along[name].to(grad)
            if not it.shared:  # 0 times NaN in samples that do not count
                others = ~rows.to(change.device)
                change[others] = change[others].nan_to_num(0)
            slope += change.sum().item()
            square += change.square().sum().item()
    return slope, math.sqrt(square)


def _thinned(caller: Caller, moves: Moves) -> Moves:
    """Return a direction in which only a few entries of each sample move."""
    thin: Moves = {}
    for it in caller.arguments.asked:
        moved = moves[it.key]
        rows = moved.reshape(1 if it.shared else len(moved), -1)
        drawn = caller.chance.vector(rows).abs()
        few = drawn.topk(min(THIN, rows.shape[1])).indices
        kept = torch.zeros_like(rows).scatter(1, few, rows.gather(1, few))
        thin[it.key] = kept.view_as(moved)
    return thin


class _Largest(TorchFunctionMode):
    """Keeps the size of the largest number that functions of torch return."""

    def __init__(self) -> None:
        super().__init__()
        self.size = 0.0

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, Tensor) and result.is_floating_point():
            sizes = result.detach()[result.isfinite()].abs()
            if sizes.numel():
                self.size = max(self.size, sizes.max().item())
        return result


def _is_swallowed(caller: Caller, along: Moves, step: float, rise: float) -> bool:
    """Tell whether numbers inside are so large that a step is lost in their rounding.

    Then the output does not change, whatever the path.

    Args:
        caller: Calls the function.
        along: The direction of the step.
        step: How far it goes.
        rise: By how much it should change the output.
    """
    with _Largest() as largest:
        outputs = tensors_of(caller.at())
    eps = max(torch.finfo(it.dtype).eps for it in outputs)
    moved = max(it.abs().max().item() for it in along.values() if it.numel())
    return ROUNDING * eps * largest.size > min(step * moved, abs(rise))
