"""Whether two calls with the same numbers give the same outputs."""

import math
from collections.abc import Callable, Sequence
from functools import partial

from torch import Tensor

from gradlib.errors import NotRepeatableError
from gradlib.jacobian.agreement import closeness
from gradlib.jacobian.differences import ROUNDING, Caller, tensors_of
from gradlib.jacobian.directions import Moves
from gradlib.jacobian.graph import Graph

ALIKE, ALIKE_IN_FLOAT = 1e-9, 1e-4
"""By which part outputs of the same call may differ, in float64 and below."""

REPEATS = 3
"""How often a call is repeated before randomness is ruled out: a rare outcome may not
show in a single repetition."""


def alike(one: Sequence[Tensor], other: Sequence[Tensor], close: float) -> bool:
    """Tell whether the outputs of two calls are the same.

    Args:
        one: The outputs of one call.
        other: The outputs of the other.
        close: By which part of its largest entry an output may differ.
    """
    return _apart(one, other) <= close


def _apart(one: Sequence[Tensor], other: Sequence[Tensor]) -> float:
    """Return by which part of its largest entry an output differs, at the most."""
    if [it.shape for it in one] != [it.shape for it in other]:
        return math.inf
    return max(map(_part_apart, one, other), default=0.0)


def _part_apart(a: Tensor, b: Tensor) -> float:
    a, b = a.detach().double(), b.detach().double()
    differ = (a != b) & ~(a.isnan() & b.isnan())
    if not differ.any():
        return 0.0
    largest = a[a.isfinite()].abs().max().item() if a.isfinite().any() else 0.0
    apart = (a - b)[differ].abs().max().item()
    return apart / largest if largest else math.inf


def is_repeated(
    caller: Caller,
    y: Tensor,
    root: int,
    *moves: tuple[float, Moves],
    graph: bool = False,
) -> bool:
    """Tell whether a call gives an output again when autograd records it.

    Where recording alone changes the output, all further calls are recorded.

    Args:
        caller: Calls the function.
        y: The output of the first of the two calls.
        root: Which output it is.
        moves: Where the function was called.
        graph: Whether the first call was recorded.

    Raises:
        NotRepeatableError: The very same call gives another output.
    """
    close = close_for(caller)

    def is_same(*, graph: bool) -> bool:
        return alike([tensors_of(caller.at(*moves, graph=graph))[root]], [y], close)

    if is_same(graph=True):
        return True
    if graph:
        raise not_repeatable()
    record_from_now_on(caller, partial(is_same, graph=False))
    return False


def record_from_now_on(caller: Caller, is_same: Callable[[], bool]) -> None:
    """Have all further calls recorded by autograd, as recording changes the outputs.

    Args:
        caller: Calls the function.
        is_same: Calls it again, and tells whether the outputs are the same if autograd
            records neither call.

    Raises:
        NotRepeatableError: They are not, or calls were recorded already.
    """
    if caller.needs_graph or not all(is_same() for _ in range(REPEATS)):
        raise not_repeatable()
    caller.needs_graph = True


def require_as_first(caller: Caller, graph: Graph) -> None:
    """Raise where the very first call gave other outputs than the same call does now.

    The call is made as the first was: in its dtypes, and recorded by autograd. Where
    calls change the state of modules, the next may differ for that; then nothing is
    raised.

    Raises:
        NotRepeatableError: The outputs differ, or those of two calls now do.
    """
    close = closeness(graph)
    try:
        again = _as_first(caller)
        if alike(graph.roots, again, close):
            return
        rounding = _apart(again, _as_first(caller))
        follows = rounding <= close and _follows_state(caller, again, rounding)
    except Exception:  # as where a large graph leaves no room for another
        return
    if not follows:
        raise not_repeatable()


def _as_first(caller: Caller, times: int = 1) -> list[Tensor]:
    return [it.detach() for it in tensors_of(caller.as_first(times))]


def _follows_state(caller: Caller, again: list[Tensor], rounding: float) -> bool:
    """Tell whether outputs depend on module state that calls change.

    They may change little, as by the power iteration of a spectral norm that is nearly
    done, so any change beyond rounding counts.

    Args:
        caller: Calls the function.
        again: Its outputs, ``(batch, *out)`` each.
        rounding: By which part of the largest entry the very same call differs.
    """
    # A generator of fn's own, which the first call advanced.
    if caller.random.own.has_met:
        return True
    left = _as_first(caller, times=2)
    is_other = _apart(again, left) > ROUNDING * rounding
    return is_other and _apart(left, _as_first(caller, times=2)) <= ROUNDING * rounding


def close_for(caller: Caller) -> float:
    """Return by which part two calls with the same numbers may differ."""
    return ALIKE if caller.how.double else ALIKE_IN_FLOAT


def not_repeatable() -> NotRepeatableError:
    """Return the error for a function that gives other outputs each time."""
    return NotRepeatableError(
        "fn gives another output each time it is called with the same inputs, though "
        "torch's own random state was replayed. See what it draws from Python's "
        "random or NumPy, and what it reads or changes outside of modules. A lazy "
        "module draws its weights in its first call: call fn once before. What "
        "torch.compile has made may draw other numbers than what it was made of: pass "
        "that, as model._orig_mod. Or pass check=False."
    )
