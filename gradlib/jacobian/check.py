"""Whether a Jacobian says how the output changes: coupled samples, cut paths, chance.

The first look takes one backward pass, with a vector that is zero for half the samples:
then so is their gradient. And it holds the Jacobian against the slope of the function
along a random direction, by a pair of calls. Where these are apart a shorter step may
leave out the kink that was met. Only where it does not there is a second look, which
tells a kink from a path that autograd does not see.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor, nn

from gradlib.errors import GradlibError, NoSuchWayError
from gradlib.jacobian.arguments import Arguments
from gradlib.jacobian.coupling import (
    require_no_pair,
    require_own_samples,
)
from gradlib.jacobian.differences import (
    HIDING,
    IN_DOUBLE,
    ROUNDING,
    Caller,
    OtherOutputsError,
)
from gradlib.jacobian.directions import key, meant
from gradlib.jacobian.first_look import Slopes, first_slopes, length
from gradlib.jacobian.forward import BY_COLUMNS
from gradlib.jacobian.generators import RandomState
from gradlib.jacobian.graph import Graph
from gradlib.jacobian.known_modules import modules_known_to
from gradlib.jacobian.look import Look, closeness, require_rows
from gradlib.jacobian.memory import bytes_of_pass
from gradlib.jacobian.nodes import narrowest_dtype
from gradlib.jacobian.own_backward import require_derivatives
from gradlib.jacobian.pieces import Block
from gradlib.jacobian.repeatable import REPEATS, require_as_first
from gradlib.jacobian.second_look import look_again
from gradlib.jacobian.warned import warn
from gradlib.selection import modules_of
from gradlib.sharded import is_distributed, is_sharded

Result = TypeVar("Result")

MANY = 16
"""Which part of the samples, at the most, is in doubt as their slopes happen to cancel.

Of thousands a few do, along a random direction.
"""

SMALL = 100
"""By how many units in the last place of a sample's slopes one of them may be apart."""


@dataclass(frozen=True)
class Seen:
    """What was seen of a function, to hold its Jacobian against.

    Attributes:
        caller: Calls it again.
        mode: How its Jacobian is computed.
        look: One backward pass, where columns are to be held against it.
        slopes: How steep it is along a direction; ``None`` where nobody can tell.
    """

    caller: Caller
    mode: str
    look: Look | None
    slopes: Slopes | None


def may_look(values: Iterable[object]) -> bool:
    """Tell whether there is something to look at, and warn if there is not.

    Args:
        values: What a function is given, and the modules that it may call.
    """
    if not any(
        is_sharded(it) if isinstance(it, nn.Module) else is_distributed(it)
        for it in values
    ):
        return True
    warn(
        "check=True did not look for anything: each process holds a part of the weights"
        " or inputs only (FSDP, DTensor), and a test takes other numbers. Check the "
        "module before it is sharded."
    )
    return False


def see(
    arguments: Arguments,
    graph: Graph,
    points: Sequence[Tensor | None],
    random: RandomState,
    *,
    mode: str,
) -> Seen | None:
    """Go back once, and call the function again. The Jacobian need not be there yet.

    Args:
        arguments: The call.
        graph: What it left.
        points: For each leaf of the inputs what stands for it in the graph.
        random: Where torch's generators stood before.
        mode: How the Jacobian will be computed, if nobody else proves it.

    Returns:
        ``None`` where there is nothing to look at.

    Raises:
        CoupledSamplesError: A sample's output depends on another sample.
        DetachedPathError: Numbers that depend on an input become integers.
    """
    if not any(it.numel() for it in graph.roots):
        return None
    if arguments.of_parameters and _has_script(arguments.fn):
        warn(
            "check=True did not look for anything: fn holds a ScriptModule, whose "
            "parameters cannot be moved. Pass the module that it was made of."
        )
        return None
    caller = Caller(arguments, random, meant(arguments, graph), IN_DOUBLE, graph.roots)
    with random.kept():
        look = require_own_samples(caller, graph, points)
        kept = look if mode in BY_COLUMNS else None
        del look
        return Seen(
            caller, mode, kept, _in_float64_or_less(caller, graph, first_slopes)
        )


def require_truth(
    seen: Seen,
    graph: Graph,
    points: Sequence[Tensor | None],
    blocks: Mapping[Block, Tensor],
) -> None:
    """Raise where a Jacobian is not how the output changes.

    Args:
        seen: What was seen of the function.
        graph: What its call left.
        points: For each leaf of the inputs what stands for it in the graph.
        blocks: The Jacobian.

    Raises:
        CoupledSamplesError: A sample's output depends on another sample.
        DetachedPathError: An output depends on an input in a way that autograd does
            not see.
        NotRepeatableError: Two calls with the same numbers differ.
        NoSuchWayError: It is not what a backward pass gives.
    """
    slopes = seen.slopes

    def require(found: Slopes) -> None:
        unclear = _unclear_entries(found, graph, blocks)
        if not unclear:
            return
        repeats = 1
        if found.caller.how.double:
            closer = found.closer()
            unclear = _in_both(unclear, _unclear_entries(closer, graph, blocks))
            if found.leaps(closer):
                repeats = REPEATS
            elif not unclear:
                return
        again = found.repeated(repeats)
        if again is not found:
            require(again)
            return
        require_as_first(found.caller, graph)
        for root, entries in unclear.items():
            look_again(found.caller, graph, root, entries)
            # It says that autograd is right. Is what was computed what autograd gives?
            if seen.mode != "loop":  # which asked it for each row
                entries = entries.expand(-1, graph.rows(root))
                look = Look.at_entries(graph, root, entries)
                _require_rows(seen, look, graph, points, blocks)

    def ask(caller: Caller) -> None:
        assert slopes is not None, "it was there"
        require(slopes if caller is slopes.caller else first_slopes(caller))

    if seen.look is not None:
        _require_rows(seen, seen.look, graph, points, blocks)
    if slopes is not None and _unclear_entries(slopes, graph, blocks):
        with slopes.caller.random.kept():
            _in_float64_or_less(slopes.caller, graph, ask)


def require_loss(seen: Seen, graph: Graph) -> None:
    """Raise where gradients of a loss of the Jacobian would be wrong.

    Args:
        seen: What was seen of the function.
        graph: What its call left.

    Raises:
        NoSuchWayError: They would.
    """
    with seen.caller.random.kept():
        require_derivatives(seen.caller, graph)


def bytes_of_check(arguments: Arguments, graph: Graph) -> int:
    """Return how many bytes a call in float64 takes, by our count."""
    given = [it for it in arguments.inputs.leaves if isinstance(it, Tensor)]
    for module in modules_known_to(arguments.fn):
        given += [*module.parameters(), *module.buffers()]
    wide = torch.float64.itemsize
    copies = sum(wide * it.numel() for it in {id(it): it for it in given}.values())
    # A direction, what it is drawn from, and a gradient.
    moves = 3 * sum(it.numel() * it.element_size() for it in graph.points)
    outputs = 2 * wide * sum(it.numel() for it in graph.roots)
    inside = bytes_of_pass(graph.drawing) * wide // narrowest_dtype(graph).itemsize
    return copies + moves + outputs + inside


def _in_float64_or_less(
    caller: Caller, graph: Graph, ask: Callable[[Caller], Result]
) -> Result | None:
    """Ask something of a function that may not be able to run in float64."""
    try:
        return ask(caller)
    except GradlibError:
        raise
    except Exception as error:
        if any(it.dtype.itemsize < 4 for it in graph.points):
            warn(
                "check=True did not look for cut paths and randomness: in float64, "
                f"which that takes, fn {_done(error)}"
            )
            return None
        return ask(caller.in_float())


def _done(error: Exception) -> str:
    """Return what a function did in float64 that kept us from looking."""
    if isinstance(error, OtherOutputsError):
        return str(error)
    return f"raised {type(error).__name__}: {error}"


def _require_rows(
    seen: Seen,
    look: Look,
    graph: Graph,
    points: Sequence[Tensor | None],
    blocks: Mapping[Block, Tensor],
) -> None:
    """Raise where columns are no Jacobian; where samples are coupled, that is why."""
    try:
        require_rows(graph, blocks, look, mode=seen.mode)
    except NoSuchWayError:
        caller = seen.caller
        pairs = zip(points, caller.arguments.shared, strict=True)
        own = [it for it, shared in pairs if it is not None and not shared]
        with caller.random.kept():
            require_no_pair(caller, graph.roots, own)
        raise


def _has_script(fn: object) -> bool:
    """Tell whether a module holds one that torch.jit made."""
    return isinstance(fn, torch.nn.Module) and any(
        isinstance(it, torch.jit.ScriptModule) for it in modules_of(fn).values()
    )


def _in_both(one: dict[int, Tensor], other: dict[int, Tensor]) -> dict[int, Tensor]:
    """Return the entries that are in both, of the outputs that have some."""
    both = {root: it & other[root] for root, it in one.items() if root in other}
    return {root: it for root, it in both.items() if it.any()}


def _unclear_entries(
    found: Slopes, graph: Graph, blocks: Mapping[Block, Tensor]
) -> dict[int, Tensor]:
    """Return the outputs whose slope is not the Jacobian's, and in which entries."""
    every: dict[int, Tensor] = {}
    close = found.caller.how.sure or closeness(graph)
    eps = torch.finfo(narrowest_dtype(graph)).eps
    for root, slope in enumerate(found.steep):
        known = _known_slope(found, graph, blocks, root)
        slope, noise = slope.to(known), found.noise(root).to(known)
        unclear = _unclear(known, slope, noise, close, eps)
        samples = unclear.any(1)
        if 0 < MANY * samples.sum() <= graph.batch:
            rounding = _rounding(found, graph, blocks, root, samples)
            noise = noise.index_put((samples,), rounding, accumulate=True)
            unclear = _unclear(known, slope, noise, close, eps)
        if unclear.any():
            every[root] = unclear
    return every


def _known_slope(
    found: Slopes, graph: Graph, blocks: Mapping[Block, Tensor], root: int
) -> Tensor:
    """Return the slope of an output by the Jacobian, ``(batch, out)``, in float64."""
    total = torch.zeros(1, dtype=torch.float64, device=graph.points[0].device)
    for block, u in _factors(found, graph, blocks, root):
        total = total + (block @ u).reshape(graph.batch, -1).to(total)
    return total


def _rounding(
    found: Slopes,
    graph: Graph,
    blocks: Mapping[Block, Tensor],
    root: int,
    samples: Tensor,
) -> Tensor:
    """Return what rounding of the Jacobian may make of some samples' slopes.

    It goes with the terms whose sum a slope is, and these may cancel.
    """
    total = torch.zeros(1, dtype=torch.float64, device=graph.points[0].device)
    for block, u in _factors(found, graph, blocks, root):
        if block.dtype.itemsize < 4:  # for these much less is asked
            continue
        here = samples.to(block.device)
        terms = block[here] * (u if u.dim() == 1 else u[here].mT)
        eps = torch.finfo(block.dtype).eps
        total = total + (eps * terms.double()).square().sum((1, 2)).to(total)
    return ROUNDING * total.sqrt()


def _factors(
    found: Slopes, graph: Graph, blocks: Mapping[Block, Tensor], root: int
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield each block of an output, ``(batch, out, in)``, and the direction.

    That is ``(in,)`` for what samples share, and ``(batch, in, 1)`` otherwise.
    """
    for point, it in enumerate(found.caller.arguments.asked):
        block = blocks[root, point].detach()
        u = found.along[key(it)].to(block)
        yield (
            block.reshape(graph.batch, graph.rows(root), graph.columns(point)),
            u.flatten() if it.shared else u.reshape(graph.batch, -1, 1),
        )


def _unclear(
    known: Tensor, slope: Tensor, noise: Tensor, close: float, eps: float
) -> Tensor:
    """Return where two slopes are apart, or rounding hides whether, ``(batch, out)``.

    Samples are judged as a whole, and then entries that are small beside others, which
    may be wrong and not show: ``(batch, 1)`` is enough to say that there are none. Of a
    sample that is apart only the entries are meant that are, by their mean square: so
    there is one at least.

    Args:
        known: The slopes by the Jacobian.
        slope: Those by differences.
        noise: What rounding may make of the latter, ``(batch,)``.
        close: By which part they may be apart.
        eps: That of the Jacobian.
    """
    size = torch.maximum(length(known), length(slope))
    off = known - slope
    apart = length(off)
    hidden = (noise > HIDING * size) & (size > 0)
    samples = apart.isfinite() & ((apart > close * size + noise) | hidden)
    samples, hidden = samples[:, None], hidden[:, None]
    larger = torch.maximum(known.abs(), slope.abs())
    allowed = close * larger + (noise + SMALL * eps * size)[:, None]
    small = off.isfinite() & (off.abs() > allowed)
    if not (samples.any() or small.any()):
        return samples
    own = off.square() > close**2 * (known.square() + slope.square()) / 2
    return (samples & (own | hidden)) | small
