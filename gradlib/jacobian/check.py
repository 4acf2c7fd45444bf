"""Whether a Jacobian says how the output changes: coupled samples, cut paths, chance.

The first look takes one backward pass, with a vector that is zero for half the samples:
then so is their gradient. And it holds the Jacobian against the slope of the function
along a random direction, by a pair of calls. Only where these are apart there is a
second look, which tells a kink from a path that autograd does not see.
"""

import warnings
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from gradlib.errors import (
    DetachedPathError,
    GradlibError,
    NoSuchWayError,
)
from gradlib.jacobian.again import Called, RandomState, cuda_devices
from gradlib.jacobian.arguments import Arguments
from gradlib.jacobian.coupling import (
    require_no_pair,
    require_own_samples,
)
from gradlib.jacobian.graph import Graph
from gradlib.jacobian.look import Look, closeness, require_rows
from gradlib.jacobian.pieces import Block
from gradlib.jacobian.second_look import look_again
from gradlib.jacobian.slopes import (
    HIDING,
    IN_DOUBLE,
    ROUNDING,
    Caller,
    Moves,
    by_sample,
    key,
    slopes,
    tensors_of,
)
from gradlib.recording.state import random_state_kept
from gradlib.selection import modules_of


def check(
    arguments: Arguments,
    graph: Graph,
    points: Sequence[Tensor | None],
    random: RandomState,
    blocks: Mapping[Block, Tensor],
    *,
    columns: bool,
) -> None:
    """Raise where a Jacobian is not how the output changes.

    Args:
        arguments: The call.
        graph: What it left.
        points: For each leaf of the inputs what stands for it in the graph.
        random: Where torch's generators stood before.
        blocks: The Jacobian.
        columns: Whether it came from columns.

    Raises:
        CoupledSamplesError: A sample's output depends on another sample.
        DetachedPathError: An output depends on an input in a way that autograd does
            not see.
        NotRepeatableError: Two calls with the same numbers differ.
    """
    if not any(it.numel() for it in graph.roots):
        return
    if arguments.of_parameters and _has_script(arguments.fn):
        warnings.warn(
            "check=True did not look for anything: fn holds a ScriptModule, whose "
            "parameters cannot be moved. Pass the module that it was made of.",
            stacklevel=3,
        )
        return
    caller = Caller(arguments, random, IN_DOUBLE)
    with random_state_kept(cuda_devices()):
        look = require_own_samples(caller, graph, points)
        if columns:
            _require_rows(caller, graph, points, blocks, look)
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
            _require_slopes(caller.in_float(), graph, blocks)


def _require_rows(
    caller: Caller,
    graph: Graph,
    points: Sequence[Tensor | None],
    blocks: Mapping[Block, Tensor],
    look: Look,
) -> None:
    """Raise where columns are no Jacobian; where samples are coupled, that is why."""
    try:
        require_rows(graph, blocks, look)
    except NoSuchWayError:
        pairs = zip(points, caller.arguments.shared, strict=True)
        own = [it for it, shared in pairs if it is not None and not shared]
        require_no_pair(caller, graph.roots, own)
        raise


def _has_script(fn: object) -> bool:
    """Tell whether a module holds one that torch.jit made."""
    return isinstance(fn, torch.nn.Module) and any(
        isinstance(it, torch.jit.ScriptModule) for it in modules_of(fn).values()
    )


def _require_slopes(
    caller: Caller, graph: Graph, blocks: Mapping[Block, Tensor]
) -> None:
    along, step = caller.direction(), caller.how.step
    ahead, behind = caller.at((step, along)), caller.at((-step, along))
    _require_no_cast(ahead, behind)
    for root, slope in enumerate(slopes(ahead, behind, step)):
        known = _known_slope(caller.arguments, graph, blocks, root, along)
        noise = _noise(by_sample(tensors_of(ahead)[root]), step)
        close = _closeness(caller, graph)
        unclear = _unclear(known, slope.to(known), noise.to(known), close)
        if unclear.any():
            look_again(caller, graph, root, unclear)


def _closeness(caller: Caller, graph: Graph) -> float:
    if not caller.how.double:
        return caller.how.sure
    return closeness(graph)


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
    return ROUNDING * torch.finfo(values.dtype).eps * _length(values) / step


def _unclear(known: Tensor, slope: Tensor, noise: Tensor, close: float) -> Tensor:
    """Return for which samples two slopes are apart, or rounding hides whether."""
    size = torch.maximum(_length(known), _length(slope))
    apart = _length(known - slope)
    hidden = (noise > HIDING * size) & (size > 0)
    return apart.isfinite() & ((apart > close * size + noise) | hidden)


def _length(rows: Tensor) -> Tensor:
    return rows.square().sum(1).sqrt()


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
