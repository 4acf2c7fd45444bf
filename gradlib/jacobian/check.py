"""Whether a Jacobian says how the output changes: coupled samples, cut paths, chance.

The first look takes one backward pass, with a vector that is zero for half the samples:
then so is their gradient. And it holds the Jacobian against the slope of the function
along a random direction, by a pair of calls. Only where these are apart there is a
second look, which tells a kink from a path that autograd does not see.
"""

import math
import warnings
from collections.abc import Mapping, Sequence
from typing import cast

import torch
from torch import Tensor

from gradlib.errors import (
    DetachedPathError,
    GradlibError,
    NoSuchWayError,
    NotRepeatableError,
)
from gradlib.jacobian.again import Called, RandomState, cuda_devices
from gradlib.jacobian.arguments import Arguments
from gradlib.jacobian.coupling import (
    ALIKE,
    require_no_pair,
    require_own_samples,
)
from gradlib.jacobian.graph import Graph, output_path
from gradlib.jacobian.look import closeness, require_rows
from gradlib.jacobian.pieces import Block
from gradlib.jacobian.slopes import (
    IN_DOUBLE,
    IN_FLOAT,
    Caller,
    Moves,
    by_sample,
    key,
    slopes,
    tensors_of,
)
from gradlib.recording.state import random_state_kept


def check(
    arguments: Arguments,
    graph: Graph,
    points: Sequence[Tensor | None],
    random: RandomState,
    blocks: Mapping[Block, Tensor],
) -> None:
    """Raise where a Jacobian is not how the output changes.

    Args:
        arguments: The call.
        graph: What it left.
        points: For each leaf of the inputs what stands for it in the graph.
        random: Where torch's generators stood before.
        blocks: The Jacobian.

    Raises:
        CoupledSamplesError: A sample's output depends on another sample.
        DetachedPathError: An output depends on an input in a way that autograd does
            not see.
        NotRepeatableError: Two calls with the same numbers differ.
    """
    if not any(it.numel() for it in graph.roots):
        return
    caller = Caller(arguments, random, IN_DOUBLE)
    with random_state_kept(cuda_devices()):
        look = require_own_samples(caller, graph, points)
        try:
            require_rows(graph, blocks, look)
        except NoSuchWayError:
            shared = arguments.shared
            own = [
                it for i, it in enumerate(points) if it is not None and not shared[i]
            ]
            require_no_pair(caller, graph.roots, own)
            raise
        try:
            _require_slopes(caller, graph, blocks)
        except GradlibError:
            raise
        except Exception as error:
            if any(it.dtype.itemsize < 4 for it in graph.points):
                warnings.warn(
                    "check=True did not look for cut paths and randomness: in float64, "
                    f"which that takes, fn raised {type(error).__name__}: {error}",
                    stacklevel=3,
                )
                return
            _require_slopes(Caller(arguments, random, IN_FLOAT), graph, blocks)


def _require_slopes(
    caller: Caller, graph: Graph, blocks: Mapping[Block, Tensor]
) -> None:
    along, step = caller.direction(), caller.how.step
    ahead, behind = caller.at((step, along)), caller.at((-step, along))
    _require_no_cast(ahead, behind)
    for root, slope in enumerate(slopes(ahead, behind, step)):
        known = _known_slope(caller.arguments, graph, blocks, root, along)
        noise = _noise(by_sample(tensors_of(ahead)[root]), step)
        unclear = _apart(known, slope.to(known), noise, _closeness(caller, graph))
        if unclear.any():
            _look_again(caller, graph, root, unclear)


def _closeness(caller: Caller, graph: Graph) -> float:
    if not caller.how.double:
        return caller.how.sure
    return max(closeness(it.dtype) for it in (*graph.points, *graph.roots))


def _known_slope(
    arguments: Arguments,
    graph: Graph,
    blocks: Mapping[Block, Tensor],
    root: int,
    along: Moves,
) -> Tensor:
    """Return the slope of an output by the Jacobian, ``(batch, out)``, in float64."""
    total = torch.zeros(1, dtype=torch.float64, device=graph.points[0].device)
    for point, it in enumerate(arguments.asked):
        block = blocks[root, point].detach()
        u = along[key(it)].to(block)
        flat = block.reshape(graph.batch, graph.rows(root), graph.columns(point))
        u = u.flatten() if it.shared else u.reshape(graph.batch, -1, 1)
        total = total + (flat @ u).reshape(graph.batch, -1).to(total)
    return total


def _noise(values: Tensor, step: float) -> Tensor:
    """Return what rounding may make of each sample's slope, ``(batch,)``."""
    return 100 * torch.finfo(values.dtype).eps * _length(values) / step


def _apart(known: Tensor, slope: Tensor, noise: Tensor, close: float) -> Tensor:
    """Return for which samples two slopes are apart, or one of them is no number."""
    size = torch.maximum(_length(known), _length(slope))
    apart = _length(known - slope)
    return apart.isfinite() & (apart > close * size + noise.to(size))


def _length(rows: Tensor) -> Tensor:
    return rows.square().sum(1).sqrt()


def _look_again(caller: Caller, graph: Graph, root: int, unclear: Tensor) -> None:
    """Tell a kink or a tie from a path that autograd does not see.

    All of it is computed anew, in float64: a VJP at the point or right beside it, and
    the slope there.
    """
    _require_repeatable(caller)
    rows = unclear.cpu()
    for away, step in caller.how.looks:
        aside = (away, caller.direction())
        base, along = caller.at(aside, graph=True), caller.direction()
        ahead, behind = (caller.at(aside, (it, along)) for it in (step, -step))
        y = tensors_of(base)[root]
        v = caller.chance.vector(y)
        v[~rows.to(v.device)] = 0
        known, size = _slope_by_vjp(caller.arguments, base, y, v, along)
        rise = tensors_of(ahead)[root].detach() - tensors_of(behind)[root].detach()
        slope = (v * rise).sum().item() / (2 * step)
        eps = torch.finfo(y.dtype).eps
        noise = 100 * eps * (v * y.detach()).abs().sum().item() / step
        if not math.isfinite(slope) or not math.isfinite(known):
            continue
        if abs(slope - known) <= caller.how.sure * max(size, abs(slope)) + noise:
            # They agree over all samples, but not for each.
            own = [base.leaves[it] for it in _tracked(caller, base)]
            if y.requires_grad:
                require_no_pair(caller, [y], own)
            return
    raise _cut_path(graph, root, rows, caller.at())


def _tracked(caller: Caller, base: Called) -> list[int]:
    """Return the places of the inputs of each sample that have gradients."""
    return [it for it in caller.arguments.batched() if it in base.leaves]


def _slope_by_vjp(
    arguments: Arguments, base: Called, y: Tensor, v: Tensor, along: Moves
) -> tuple[float, float]:
    """Return the slope of ``v · y`` along a direction, and how large it may be."""
    keys = [key(it) for it in arguments.asked]
    if not y.requires_grad:
        return 0.0, 0.0
    grads = torch.autograd.grad(
        [y], [base.leaves[it] for it in keys], [v], retain_graph=True, allow_unused=True
    )
    slope = square = 0.0
    for name, grad in zip(keys, cast(Sequence[Tensor | None], grads), strict=True):
        if grad is not None:
            change = grad * along[name].to(grad)
            slope += change.sum().item()
            square += change.square().sum().item()
    return slope, math.sqrt(square)


def _require_repeatable(caller: Caller) -> None:
    """Raise where two calls with the same numbers differ."""
    one, two = (tensors_of(caller.at()) for _ in range(2))
    close = ALIKE if caller.how.double else 1e-5
    if all(
        a.shape == b.shape and torch.allclose(a, b, close, close, equal_nan=True)
        for a, b in zip(one, two, strict=True)
    ):
        return
    raise NotRepeatableError(
        "fn gives another output each time it is called with the same inputs, and not "
        "by torch's random numbers, which were replayed. See what it draws from "
        "Python's random or NumPy, reads from outside, or changes in itself; or pass "
        "check=False."
    )


def _require_no_cast(ahead: Called, behind: Called) -> None:
    """Raise where numbers that depend on the input become integers, and numbers."""
    for a, b in zip(ahead.lifted.casts, behind.lifted.casts, strict=False):
        if a.used and b.used and not torch.equal(a.sums, b.sums):
            raise DetachedPathError(
                f"A value that depends on the input is cast to integers in {a.where}, "
                "and they are used as numbers: no derivative goes through that, and "
                "the Jacobian knows nothing of it. Leave the cast out; or, if it is "
                "meant to be constant, pass check=False."
            )


def _cut_path(graph: Graph, root: int, rows: Tensor, base: Called) -> DetachedPathError:
    samples = [sample for sample, is_one in enumerate(rows) if is_one]
    listed = ", ".join(map(str, samples[:3]))
    if len(samples) > 3:
        listed += f" and {len(samples) - 3} more"
    name = output_path(graph.outputs, graph.places[root])
    seen = list(base.lifted.left)
    hint = "such as .detach(), torch.no_grad(), NumPy or .item()"
    if seen:
        hint = f"and fn uses {', '.join(seen[:3])}"
    return DetachedPathError(
        f"{name} changes with the input in a way that autograd does not see (samples "
        f"{listed}): its slope by finite differences is another than by the Jacobian. "
        f"Something cuts a path, {hint}; a backward of your own may also be wrong. If "
        "it is meant, as with a straight-through estimator, pass check=False."
    )
