"""Telling a kink, a tie or rounding from a path that autograd does not see."""

import math
from collections.abc import Callable, Sequence
from enum import Enum
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from gradlib.errors import DetachedPathError, NotRepeatableError, listed
from gradlib.jacobian.again import Called
from gradlib.jacobian.arguments import Arguments
from gradlib.jacobian.coupling import ALIKE, ALIKE_IN_FLOAT, require_no_pair
from gradlib.jacobian.differences import HIDING, ROUNDING, Caller, tensors_of
from gradlib.jacobian.directions import Meant, Moves, key
from gradlib.jacobian.graph import Graph, output_path
from gradlib.jacobian.look import TIMES
from gradlib.jacobian.nodes import differs_from_slopes
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
    _require_repeatable(caller)
    rows = unclear.any(1).cpu()
    verdicts: list[_Verdict] = []
    for away, step in caller.how.looks:
        verdict, base = _look(caller, root, unclear, away, step)
        if verdict is _Verdict.AGREE:
            # They agree over all samples, but not for each.
            y = tensors_of(base)[root]
            if y.requires_grad:
                own = [base.leaves[it] for it in _tracked(caller, base)]
                require_no_pair(caller, [y], own)
            return
        verdicts.append(verdict)
    if _is_cut(verdicts) or _is_cut_for_few(caller, root, unclear):
        raise _cut_path(caller, graph, root, rows)
    name = output_path(graph.outputs, graph.places[root])
    warn(
        f"check=True cannot tell whether {name} changes as the Jacobian says "
        f"({_samples(rows)}): finite differences do not settle there. It is not "
        "finite, too steep, or rounding hides it."
    )


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
) -> tuple[_Verdict, Called]:
    """Look once, beside the point, from several sums of the outputs."""
    aside, along = (away, caller.direction()), caller.direction()
    if thin:
        along = _thinned(caller, along)
    base = caller.at(aside, graph=True)
    y = tensors_of(base)[root]
    left_out, rows = ~unclear.view(y.shape).to(y.device), unclear.any(1)
    rise = partial(_rise, caller, aside, along, root)
    rises = [rise(step)]
    verdict = _Verdict.AGREE
    for _ in range(SUMS):
        v = caller.chance.vector(y)
        v[left_out] = 0
        known, size = _slope_by_vjp(caller.arguments, base, y, v, along, rows)
        slope = _slope(v, rises[0])
        noise = ROUNDING * torch.finfo(y.dtype).eps * _size(_at(v, v * y)) / step
        apart, size = abs(slope - known), max(size, abs(slope))
        if not math.isfinite(apart):
            return _Verdict.UNSETTLED, base
        if apart > caller.how.surer * size + noise:
            if len(rises) == 1:
                rises += [rise(times * step) for times in TIMES]
            # Where the differences themselves do not settle they say nothing.
            others = [_slope(v, it) for it in rises[1:]]
            known_to = max(map(abs, (slope, *others))) + noise / SETTLED
            if max(abs(slope - it) for it in others) > SETTLED * min(apart, known_to):
                return _Verdict.UNSETTLED, base
            if slope == 0 and _is_swallowed(caller, along, step, known * step):
                return _Verdict.UNSETTLED, base
            flat = slope == 0 and verdict is not _Verdict.APART
            verdict = _Verdict.FLAT if flat else _Verdict.APART
        elif noise > HIDING * size and step < caller.how.coarse and slope != known:
            return _Verdict.UNSETTLED, base  # rounding could hide a path
    return verdict, base


def _rise(
    caller: Caller, aside: tuple[float, Moves], along: Moves, root: int, step: float
) -> Tensor:
    """Return how steep an output is along a direction."""
    ahead, behind = (
        tensors_of(caller.at(aside, (it, along)))[root].detach() for it in (step, -step)
    )
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


def _require_repeatable(caller: Caller) -> None:
    """Raise where two calls with the same numbers differ."""
    one, two = (tensors_of(caller.at()) for _ in range(2))
    close = ALIKE if caller.how.double else ALIKE_IN_FLOAT
    if all(
        a.shape == b.shape and torch.allclose(a, b, close, close, equal_nan=True)
        for a, b in zip(one, two, strict=True)
    ):
        return
    raise NotRepeatableError(
        "fn gives another output each time it is called with the same inputs, though "
        "torch's own random state was replayed. See what it draws from Python's "
        "random or NumPy, and what it reads or changes outside of modules; or pass "
        "check=False."
    )


def _cut_path(
    caller: Caller, graph: Graph, root: int, rows: Tensor
) -> DetachedPathError:
    name = output_path(graph.outputs, graph.places[root])
    apart = (
        f"{name} changes with the input in a way that autograd does not see "
        f"({_samples(rows)}): its slope by finite differences is another than by the "
        "Jacobian. "
    )
    if why := differs_from_slopes(graph):
        return DetachedPathError(apart + why)
    seen = list(caller.at().lifted.left)
    hint = "such as .detach(), torch.no_grad(), NumPy or .item()"
    if seen:
        hint = f"and fn uses {', '.join(seen[:3])}"
    return DetachedPathError(
        f"{apart}Something cuts a path, {hint}; a backward of your own may be wrong; "
        f"or {_half_read(caller.meant)}. If it is meant, as with a straight-through "
        "estimator, pass check=False."
    )


def _half_read(meant: Meant) -> str:
    """Return what may take a matrix for another than it is."""
    if meant.symmetric is None and meant.triangular is not None:
        return f"{meant.triangular} takes a matrix A for triangular, and wants A.tril()"
    taken = "an operation may take"
    if meant.symmetric is not None:
        taken = f"{meant.symmetric} takes"
    return f"{taken} a matrix A for symmetric, and wants (A + A.mT) / 2"


def _samples(rows: Tensor) -> str:
    samples = [sample for sample, is_one in enumerate(rows) if is_one]
    return f"sample{'s' * (len(samples) > 1)} {listed(samples)}"
