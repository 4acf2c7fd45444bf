"""Telling a kink, a tie or rounding from a path that autograd does not see."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, cast

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from gradlib.jacobian.again import Called
from gradlib.jacobian.arguments import Arguments
from gradlib.jacobian.causes import cut_path, samples_in
from gradlib.jacobian.coupling import require_no_pair
from gradlib.jacobian.differences import HIDING, ROUNDING, Caller, tensors_of
from gradlib.jacobian.directions import Moves, key
from gradlib.jacobian.graph import Graph, output_path
from gradlib.jacobian.look import TIMES
from gradlib.jacobian.repeatable import REPEATS, is_repeated, require_as_first
from gradlib.jacobian.warned import warn

SETTLED = 0.2
"""How far they may be apart, as a part of them and of what a cut path would explain."""

THIN = 4
"""How many entries of a sample move where those of all do not settle: by rounding to
whole numbers one of hundreds steps over an edge wherever one goes."""

SUMS = 4
"""How many sums of the outputs a look takes: two that agree may do so by chance."""


def look_again(caller: Caller, graph: Graph, root: int, unclear: Tensor) -> None:
    """Tell a kink, a tie or rounding from a path that autograd does not see.

    All of it is computed anew, in float64: a VJP at the point or right beside it, and
    the slope there. Who is right once is right.

    Args:
        caller: Calls the function.
        graph: What its call left.
        root: Which output.
        unclear: Which of its entries, ``(batch, out)``. Others may be as large, and
            settle where these, too steep for any step, do not.
    """
    rows = unclear.any(1).cpu()
    verdicts: list[_Verdict] = []
    for away, step in caller.how.looks:
        verdict, base = _look(caller, root, unclear, away, step)
        if base is not None:
            del base  # and its graph
            # A cut path may happen to change nothing along one direction.
            verdict, base = _look(caller, root, unclear, away, step)
        if base is not None:
            if not verdicts:  # at the point itself, where there was doubt
                _require_as_first(caller, graph)
            # They agree over all samples, but not for each.
            y = tensors_of(base)[root]
            if y.requires_grad:
                own = [base.leaves[it] for it in _tracked(caller, base)]
                require_no_pair(caller, [y], own)
            return
        verdicts.append(verdict)
    is_cut = _is_cut(verdicts) or _is_cut_for_few(caller, root, unclear)
    _require_as_first(caller, graph)
    if is_cut:
        raise cut_path(caller, graph, root, rows)
    name = output_path(graph.outputs, graph.places[root])
    warn(
        f"check=True cannot tell whether {name} changes as the Jacobian says "
        f"({samples_in(rows)}): finite differences do not settle there. It is not "
        "finite, too steep, or rounding hides it."
    )


def _require_as_first(caller: Caller, graph: Graph) -> None:
    """Raise where the first call gave other outputs; chance has several tries."""
    for _ in range(REPEATS):
        require_as_first(caller, graph)


def _is_cut(verdicts: Sequence["_Verdict"]) -> bool:
    """Tell whether looks have seen a path that autograd does not.

    The last look takes the longest step: where only shorter ones see the output stay as
    it is, it may be made of steps itself, by rounding.
    """
    last = verdicts[-1] in (_Verdict.APART, _Verdict.FLAT)
    return last or verdicts.count(_Verdict.APART) > 2


def _is_cut_for_few(caller: Caller, root: int, unclear: Tensor) -> bool:
    """Tell the same of one sample, of which few entries move."""
    meant = caller.meant
    if meant.symmetric is not None or meant.triangular is not None:
        return False  # entries of those belong together
    sample = unclear.any(1).nonzero()[0]
    one = torch.zeros_like(unclear).index_copy_(0, sample, unclear[sample])
    looks = caller.how.looks
    verdicts = [_look(caller, root, one, *it, thin=True)[0] for it in looks]
    # By rounding to hundredths the longer steps do not settle here either.
    seen = [it for it in verdicts if it in (_Verdict.APART, _Verdict.FLAT)]
    return _is_cut(verdicts) or len(seen) > 2


def _thinned(caller: Caller, moves: Moves) -> Moves:
    """Return a direction in which only a few entries of each sample move."""
    thin: Moves = {}
    for it in caller.arguments.asked:
        moved = moves[key(it)]
        rows = moved.reshape(1 if it.shared else len(moved), -1)
        drawn = caller.chance.vector(rows).abs()
        few = drawn.topk(min(THIN, rows.shape[1])).indices
        kept = torch.zeros_like(rows).scatter(1, few, rows.gather(1, few))
        thin[key(it)] = kept.view_as(moved)
    return thin


class _Largest(TorchFunctionMode):
    """Keeps how large the largest number is that functions of torch return."""

    def __init__(self) -> None:
        super().__init__()
        self.found = 0.0

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
                self.found = max(self.found, sizes.max().item())
        return result


def _is_swallowed(caller: Caller, along: Moves, step: float, rise: float) -> bool:
    """Tell whether numbers inside are so large that a step is lost in their digits.

    Then the output stays as it is by rounding, whatever the path.

    Args:
        caller: Calls the function.
        along: Where the step leads.
        step: How far it goes.
        rise: By how much it should change the output.
    """
    with _Largest() as seen:
        outputs = tensors_of(caller.at())
    eps = max(torch.finfo(it.dtype).eps for it in outputs)
    moved = max(it.abs().max().item() for it in along.values() if it.numel())
    return ROUNDING * eps * seen.found > min(step * moved, abs(rise))


class _Verdict(Enum):
    """What a look says of the slope by autograd and the one by differences."""

    AGREE = 0
    APART = 1
    FLAT = 2
    UNSETTLED = 3


def _look(
    caller: Caller,
    root: int,
    unclear: Tensor,
    away: float,
    step: float,
    *,
    thin: bool = False,
) -> tuple[_Verdict, Called | None]:
    """Look once, beside the point, from several sums of the outputs.

    Where they are apart all is asked for again: chance may have been at work.

    Returns:
        What the look says; and, where they agree, the call beside the point.
    """
    aside, along = (away, caller.direction()), caller.direction()
    if thin:
        along = _thinned(caller, along)
    there = _There(caller, root, aside, along)
    base = caller.at(aside, graph=True)
    pair = there.pair(step)
    verdict = _verdict(there, base, unclear, pair, step)
    if verdict is _Verdict.AGREE:
        return verdict, base
    y = tensors_of(base)[root].detach()
    del base  # and its graph
    if there.is_repeated(y, pair, step):
        return verdict, None
    return _look(caller, root, unclear, away, step, thin=thin)  # now all are recorded


@dataclass(frozen=True)
class _There:
    """A place beside the point, and a direction from there.

    Attributes:
        caller: Calls the function.
        root: Which output counts.
        aside: The place.
        along: The direction.
    """

    caller: Caller
    root: int
    aside: tuple[float, Moves]
    along: Moves

    def pair(self, step: float) -> tuple[Tensor, Tensor]:
        """Return the output a step ahead, and behind."""
        ahead, behind = (
            tensors_of(self.caller.at(self.aside, (it, self.along)))[self.root].detach()
            for it in (step, -step)
        )
        return ahead, behind

    def rise(self, step: float) -> Tensor:
        """Return how steep the output is."""
        return _rise(self.pair(step), step)

    def is_repeated(self, y: Tensor, pair: tuple[Tensor, Tensor], step: float) -> bool:
        """Tell whether calls of this place give their outputs again, if recorded.

        Raises:
            NotRepeatableError: The very same calls give others.
        """
        if not is_repeated(self.caller, y, self.root, self.aside, graph=True):
            return False
        return all(
            is_repeated(self.caller, it, self.root, self.aside, (at, self.along))
            for it, at in zip(pair, (step, -step), strict=True)
        )


def _verdict(
    there: _There,
    base: Called,
    unclear: Tensor,
    pair: tuple[Tensor, Tensor],
    step: float,
) -> _Verdict:
    """Hold a VJP against slopes.

    Args:
        there: Where.
        base: The call there.
        unclear: Which entries of the output count.
        pair: The output a step ahead, and behind.
        step: How far that is.
    """
    caller, along = there.caller, there.along
    y = tensors_of(base)[there.root]
    left_out, rows = ~unclear.view(y.shape).to(y.device), unclear.any(1)
    rises = [_rise(pair, step)]
    verdict = _Verdict.AGREE
    for _ in range(SUMS):
        v = caller.chance.vector(y)
        v[left_out] = 0
        known, size = _slope_by_vjp(caller.arguments, base, y, v, along, rows)
        slope = _slope(v, rises[0])
        noise = ROUNDING * torch.finfo(y.dtype).eps * _size(_at(v, v * y)) / step
        apart, size = abs(slope - known), max(size, abs(slope))
        if not math.isfinite(apart):
            return _Verdict.UNSETTLED
        if apart > caller.how.surer * size + noise:
            if len(rises) == 1:
                rises += [there.rise(times * step) for times in TIMES]
            # Where the differences themselves do not settle they say nothing.
            others = [_slope(v, it) for it in rises[1:]]
            known_to = max(map(abs, (slope, *others))) + noise / SETTLED
            if max(abs(slope - it) for it in others) > SETTLED * min(apart, known_to):
                return _Verdict.UNSETTLED
            if slope == 0 and _is_swallowed(caller, along, step, known * step):
                return _Verdict.UNSETTLED
            flat = slope == 0 and verdict is not _Verdict.APART
            verdict = _Verdict.FLAT if flat else _Verdict.APART
        elif noise > HIDING * size and step < caller.how.coarse and slope != known:
            return _Verdict.UNSETTLED  # rounding could hide a path
    return verdict


def _rise(pair: tuple[Tensor, Tensor], step: float) -> Tensor:
    """Return how steep an output is between two calls."""
    ahead, behind = pair
    return (ahead - behind) / (2 * step)


def _slope(v: Tensor, rise: Tensor) -> float:
    return _at(v, v * rise).sum().item()


def _size(values: Tensor) -> float:
    return values.detach().square().sum().sqrt().item()


def _at(v: Tensor, values: Tensor) -> Tensor:
    """Return values where v is not zero: elsewhere they may be anything."""
    return values[v != 0]


def _tracked(caller: Caller, base: Called) -> list[int]:
    """Return the places of the inputs of each sample that have gradients."""
    return [it for it in caller.arguments.batched() if it in base.leaves]


def _slope_by_vjp(
    arguments: Arguments,
    base: Called,
    y: Tensor,
    v: Tensor,
    along: Moves,
    rows: Tensor,
) -> tuple[float, float]:
    """Return the slope of ``v · y`` along a direction, and how large it may be."""
    keys = [key(it) for it in arguments.asked]
    if not y.requires_grad:
        return 0.0, 0.0
    grads = torch.autograd.grad(
        [y], [base.leaves[it] for it in keys], [v], retain_graph=True, allow_unused=True
    )
    slope = square = 0.0
    given = cast(Sequence[Tensor | None], grads)
    for it, name, grad in zip(arguments.asked, keys, given, strict=True):
        if grad is not None:
            change = grad.to_dense() * along[name].to(grad)
            if not it.shared:  # 0 times NaN, in samples that are not asked for
                others = ~rows.to(change.device)
                change[others] = change[others].nan_to_num(0)
            slope += change.sum().item()
            square += change.square().sum().item()
    return slope, math.sqrt(square)
