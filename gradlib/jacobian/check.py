"""Checks a Jacobian for coupled samples, cut paths and randomness.

The first look takes one backward pass, with a vector that is zero for half the samples:
their gradients must be zero too. It also compares the Jacobian with the slope of the
function along a random direction, by a pair of calls. Where the two differ, a shorter
step may avoid the kink that was met. Only where it does not, a second look tells a kink
from a path that autograd does not see.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from gradlib.errors import GradlibError, NoSuchWayError
from gradlib.jacobian.agreement import require_rows
from gradlib.jacobian.arguments import Arguments
from gradlib.jacobian.coupling import require_no_pair, require_own_samples
from gradlib.jacobian.differences import (
    IN_DOUBLE,
    Caller,
    OtherOutputsError,
)
from gradlib.jacobian.directions import meant
from gradlib.jacobian.first_look import Slopes, first_slopes
from gradlib.jacobian.forward import BY_COLUMNS
from gradlib.jacobian.generators import RandomState
from gradlib.jacobian.graph import Graph
from gradlib.jacobian.known_modules import modules_known_to
from gradlib.jacobian.look import Look
from gradlib.jacobian.own_backward import require_derivatives
from gradlib.jacobian.pass_memory import bytes_of_pass
from gradlib.jacobian.pieces import Block
from gradlib.jacobian.repeatable import REPEATS, require_as_first
from gradlib.jacobian.second_look import look_again
from gradlib.jacobian.unclear import unclear_entries
from gradlib.jacobian.warned import warn
from gradlib.opaque import is_module, is_tensor
from gradlib.selection import modules_of
from gradlib.sharded import is_distributed, is_sharded

Result = TypeVar("Result")


@dataclass(frozen=True)
class Seen:
    """What was measured of a function, to compare its Jacobian with.

    Attributes:
        caller: Calls the function again.
        graph: The graph of its forward pass.
        points: By place, the tensors that stand for inputs in the graph.
        mode: How its Jacobian is computed.
        look: One VJP, where the Jacobian comes by columns; else ``None``.
        slopes: Its slopes along a direction; ``None`` where they cannot be computed.
    """

    caller: Caller
    graph: Graph
    points: Mapping[int, Tensor]
    mode: str
    look: Look | None
    slopes: Slopes | None


def may_look(values: Iterable[object]) -> bool:
    """Tell whether the check can run, and warn where sharding keeps it from that.

    Args:
        values: The inputs of the function, and the modules that it may call.
    """
    if not any(
        is_sharded(it) if is_module(it) else is_distributed(it) for it in values
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
    points: Mapping[int, Tensor],
    random: RandomState,
    *,
    mode: str,
) -> Seen | None:
    """Go back once, and call the function again, before or after the Jacobian is there.

    Args:
        arguments: The call.
        graph: The graph of its forward pass.
        points: By place, the tensors that stand for inputs in the graph.
        random: The states of torch's generators before the call.
        mode: How the Jacobian is computed; ``"auto"`` where `compute` proves columns.

    Returns:
        What to compare the Jacobian with; ``None`` where there is nothing to check.

    Raises:
        CoupledSamplesError: A sample's output depends on another sample.
        DetachedPathError: Numbers that depend on an input become integers.
        NoSuchWayError: torch cannot go back to an input that is asked for.
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
        slopes = _in_float64_or_less(caller, graph, first_slopes)
        return Seen(caller, graph, points, mode, kept, slopes)


def require_truth(seen: Seen, blocks: Mapping[Block, Tensor]) -> None:
    """Raise where a Jacobian does not say how the output changes.

    Raises:
        CoupledSamplesError: A sample's output depends on another sample.
        DetachedPathError: An output depends on an input in a way that autograd does
            not see.
        NotRepeatableError: Two calls with the same numbers differ.
        NoSuchWayError: The Jacobian is not what a backward pass gives.
    """
    graph, slopes = seen.graph, seen.slopes

    def ask(caller: Caller) -> None:
        assert slopes is not None, "it was there"
        is_first = caller is slopes.caller
        doubted = slopes if is_first else first_slopes(caller)
        known = unclear if is_first else None
        # A loop, as a function inside that calls itself would keep the graph alive.
        while doubted is not None:
            entries = known or unclear_entries(doubted, graph, blocks)
            doubted, known = _still_doubted(seen, doubted, entries, blocks), None

    if seen.look is not None:
        _require_rows(seen, seen.look, blocks)
    if slopes is None:
        return
    unclear = unclear_entries(slopes, graph, blocks)
    if unclear:
        with slopes.caller.random.kept():
            _in_float64_or_less(slopes.caller, graph, ask)


def _still_doubted(
    seen: Seen,
    measured: Slopes,
    unclear: dict[int, Tensor],
    blocks: Mapping[Block, Tensor],
) -> Slopes | None:
    """Raise where slopes show that the Jacobian is wrong.

    Args:
        seen: What was measured of the function.
        measured: The slopes.
        unclear: The entries of each output where they are not the Jacobian's.
        blocks: The Jacobian.

    Returns:
        Other slopes to look at in their place; ``None`` where the Jacobian is right.
    """
    graph = seen.graph
    if not unclear:
        return None
    repeats = 1
    if measured.caller.how.double:
        closer = measured.closer()
        unclear = _in_both(unclear, unclear_entries(closer, graph, blocks))
        if measured.leaps(closer):
            repeats = REPEATS
        elif not unclear:
            return None
    again = measured.repeated(repeats)
    if again is not measured:
        return again
    require_as_first(measured.caller, graph)
    for root, entries in unclear.items():
        look_again(measured.caller, graph, root, entries)
        # Now autograd is right. Does the Jacobian agree with autograd?
        if seen.mode != "loop":  # a loop has asked autograd for each row
            entries = entries.expand(-1, graph.rows(root))
            look = Look.at_entries(graph, root, entries)
            _require_rows(seen, look, blocks)
    return None


def require_loss(seen: Seen) -> None:
    """Raise where gradients of a loss of the Jacobian would be wrong.

    Raises:
        NoSuchWayError: A custom backward leaves a wrong graph.
    """
    with seen.caller.random.kept():
        require_derivatives(seen.caller, seen.graph)


def bytes_of_check(arguments: Arguments, graph: Graph) -> int:
    """Return how many bytes a call in float64 takes, by an estimate."""
    given = [it for it in arguments.inputs.leaves if is_tensor(it)]
    for module in modules_known_to(arguments.fn):
        given += [*module.parameters(), *module.buffers()]
    wide = torch.float64.itemsize
    copies = sum(wide * it.numel() for it in {id(it): it for it in given}.values())
    # A direction, the random numbers it is made of, and a gradient.
    moves = 3 * sum(it.numel() * it.element_size() for it in graph.points)
    outputs = 2 * wide * sum(it.numel() for it in graph.roots)
    inside = (
        bytes_of_pass(graph.drawing) * wide // graph.drawing.narrowest_dtype.itemsize
    )
    return copies + moves + outputs + inside


def _in_float64_or_less(
    caller: Caller, graph: Graph, ask: Callable[[Caller], Result]
) -> Result | None:
    """Call `ask` in float64 or, where the function fails there, in its own dtypes."""
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
    """Return what a function did in float64 that prevents the check, in words."""
    if isinstance(error, OtherOutputsError):
        return str(error)
    return f"raised {type(error).__name__}: {error}"


def _require_rows(seen: Seen, look: Look, blocks: Mapping[Block, Tensor]) -> None:
    """Raise where the Jacobian disagrees with a VJP; name coupled samples as cause."""
    try:
        require_rows(seen.graph, blocks, look, mode=seen.mode)
    except NoSuchWayError:
        caller, shared = seen.caller, seen.caller.arguments.shared
        own = [point for place, point in seen.points.items() if not shared[place]]
        with caller.random.kept():
            require_no_pair(caller, seen.graph.roots, own)
        raise


def _has_script(fn: object) -> bool:
    """Tell whether a module holds a ScriptModule."""
    return isinstance(fn, torch.nn.Module) and any(
        isinstance(it, torch.jit.ScriptModule) for it in modules_of(fn).values()
    )


def _in_both(one: dict[int, Tensor], other: dict[int, Tensor]) -> dict[int, Tensor]:
    """Return the entries that are unclear in both, for outputs that have some."""
    both = {root: it & other[root] for root, it in one.items() if root in other}
    return {root: it for root, it in both.items() if it.any()}
