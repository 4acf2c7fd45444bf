"""Whether samples influence each other, and through which module."""

from collections.abc import Mapping, Sequence

from torch import Tensor

from gradlib.errors import CoupledSamplesError, NoSuchWayError
from gradlib.jacobian.argnums import input_path
from gradlib.jacobian.cannot_go_back import refuse
from gradlib.jacobian.chance import Chance
from gradlib.jacobian.differences import Caller
from gradlib.jacobian.graph import Graph
from gradlib.jacobian.look import Look, every_pair, first_coupled
from gradlib.jacobian.memory import is_out_of_memory
from gradlib.jacobian.mixing_module import are_same, beside, coupled
from gradlib.jacobian.repeatable import REPEATS, alike, close_for, not_repeatable

FEW_SAMPLES = 4
"""With at most this many samples, each pair of them is checked."""


def require_own_samples(
    caller: Caller, graph: Graph, points: Mapping[int, Tensor]
) -> Look:
    """Raise where the output of a sample depends on an input of another one.

    One VJP from a random half of the samples must be zero in the other half. For inputs
    that the Jacobian is with respect to that is enough: other coupling shows in its
    slopes. Where there are few samples, those that influence each other may all be in
    one half, as two views each of two things, so each pair is checked. Where torch
    cannot go back to an input that is not asked for, calls with other samples tell.

    Returns:
        The VJP, with a gradient for each of the graph's points.

    Raises:
        CoupledSamplesError: Samples are coupled.
        NoSuchWayError: torch cannot go back to an input that is asked for.
    """
    half = caller.chance.half(graph.batch)
    shared = caller.arguments.shared
    own = {place: point for place, point in points.items() if not shared[place]}
    asked = {id(point) for point in graph.points}
    may_go_back = True
    try:
        look = _look(caller, graph, own, half)
    except NoSuchWayError:  # that is no error for an input that is not asked for
        may_go_back = False
        own = {place: point for place, point in own.items() if id(point) in asked}
        look = _look(caller, graph, own, half)
    number = look.coupled(half, len(own))
    if number is not None:
        place = list(own)[number]
        raise coupled(caller, half, input_path(caller.arguments.inputs, place))
    others = [
        point
        for point in own.values()
        if id(point) not in asked or graph.batch <= FEW_SAMPLES
    ]
    require_no_pair(caller, graph.roots, others)
    if graph.batch > 1 and not (own and may_go_back):
        _require_same_beside_others(caller)
    return Look(look.vectors, look.grads[len(own) :])


def _look(
    caller: Caller, graph: Graph, own: Mapping[int, Tensor], half: Tensor
) -> Look:
    """Return the VJP from a half of the samples, to some inputs and the graph's points.

    Raises:
        NoSuchWayError: torch cannot go back to one of them.
    """
    ends = [*own.values(), *graph.points]
    try:
        return Look.at(caller.chance, graph.roots, ends, half)
    except RuntimeError as error:
        refuse(error)


def require_no_pair(
    caller: Caller, roots: Sequence[Tensor], points: Sequence[Tensor]
) -> None:
    """Raise where the output of any sample depends on an input of any other.

    Raises:
        CoupledSamplesError: Samples are coupled.
    """
    try:
        pair = first_coupled(caller.chance, roots, points)
    except RuntimeError as error:  # torch cannot go back to one of them
        if is_out_of_memory(error):
            raise
        _require_same_beside_others(caller)
        return
    if pair:
        raise coupled(caller, pair[1], "the input")


def require_own_rows(graph: Graph) -> None:
    """Raise where a sample's output leads to an input of another sample.

    There is no function to call again, so the error names no module.

    Raises:
        CoupledSamplesError: Samples are coupled.
    """
    pair = first_coupled(Chance(), graph.roots, graph.points)
    if pair:
        raise CoupledSamplesError(
            f"The samples are not independent: the output of one depends on "
            f"{graph.names[pair[0]]} of another, so there is no dY/dX of each sample. "
            "per_sample_jacobian(fn, x), which can call fn again, says where; "
            "check=False gives for each sample the sum over all samples' outputs."
        )


def _require_same_beside_others(caller: Caller) -> None:
    """Raise where outputs change with other samples, by calls alone.

    That is for inputs that are integers, or that torch cannot go back to. Each sample
    stays in its place, which may decide what is drawn for it.
    """
    try:
        alone = beside(caller, None)
    except Exception:  # it cannot run in float64
        caller = caller.in_float()
        alone = beside(caller, None)
    for part in every_pair(caller.arguments.batch):
        among = beside(caller, part)
        if not are_same(alone, among, part, close_for(caller)):
            _require_again(caller, None, alone)
            _require_again(caller, part, among)
            raise coupled(caller, part, "the input")


def _require_again(caller: Caller, half: Tensor | None, outputs: list[Tensor]) -> None:
    """Raise where the very same call gives other outputs."""
    close = close_for(caller)
    if not all(alike(beside(caller, half), outputs, close) for _ in range(REPEATS)):
        raise not_repeatable()
