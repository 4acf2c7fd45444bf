"""Whether two calls with the same numbers give the same."""

import math
from collections.abc import Sequence

from torch import Tensor

from gradlib.errors import NotRepeatableError
from gradlib.jacobian.differences import ROUNDING, Caller, tensors_of
from gradlib.jacobian.directions import Moves
from gradlib.jacobian.graph import Graph
from gradlib.jacobian.look import closeness

ALIKE, ALIKE_IN_FLOAT = 1e-9, 1e-4
"""By which part the same numbers may differ, in float64 and below."""

REPEATS = 3
"""How often a call is made again before something else is said: of two ways that chance
takes one may be rare, and the other be met twice."""


def alike(one: Sequence[Tensor], other: Sequence[Tensor], close: float) -> bool:
    """Tell whether the outputs of two calls are the same, beside the largest of each.

    Args:
        one: Those of the one.
        other: Those of the other.
        close: By which part of the largest they may be apart.
    """
    return _apart(one, other) <= close


def _apart(one: Sequence[Tensor], other: Sequence[Tensor]) -> float:
    """Return by which part of the largest entry two calls are apart, at the most."""
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
    """Tell whether a call gives an output again, also where autograd records it.

    Where that alone makes it another, all further calls are recorded.

    Args:
        caller: Calls the function.
        y: What the output was.
        root: Which output it is.
        moves: Where the function was called.
        graph: Whether that call was recorded.

    Raises:
        NotRepeatableError: The very same call gives another one.
    """
    close = close_for(caller)

    def is_same(*, graph: bool) -> bool:
        return alike([tensors_of(caller.at(*moves, graph=graph))[root]], [y], close)

    if is_same(graph=True):
        return True
    is_other = graph or caller.needs_graph
    if is_other or not all(is_same(graph=False) for _ in range(REPEATS)):
        raise not_repeatable()
    caller.needs_graph = True
    return False


def require_as_first(caller: Caller, graph: Graph) -> None:
    """Raise where the very first call gave other outputs than the same one does now.

    It is made as that was: in its dtypes, and autograd records it. What a call leaves
    in modules may make the next another; then nobody can tell.

    Args:
        caller: Calls the function.
        graph: What its first call left.

    Raises:
        NotRepeatableError: It did, or two calls now differ.
    """
    close = closeness(graph)
    try:
        again = _as_first(caller)
        if alike(graph.roots, again, close):
            return
        rounding = _apart(again, _as_first(caller))
        follows = rounding <= close and _follows_state(caller, again, rounding)
    except Exception:  # no room for it, as for a large graph
        return
    if not follows:
        raise not_repeatable()


def _as_first(caller: Caller, times: int = 1) -> list[Tensor]:
    return [it.detach() for it in tensors_of(caller.as_first(times))]


def _follows_state(caller: Caller, again: list[Tensor], rounding: float) -> bool:
    """Tell whether outputs follow what the calls before have left.

    It may be little, as with the power iteration of a spectral norm that is nearly
    done: so by more than rounding is enough.

    Args:
        caller: Calls the function.
        again: Its outputs.
        rounding: By which part of the largest these are others in the very same call.
    """
    if caller.random.own.has_met:  # a generator, which the first call has moved
        return True
    left = _as_first(caller, times=2)
    is_other = _apart(again, left) > ROUNDING * rounding
    return is_other and _apart(left, _as_first(caller, times=2)) <= ROUNDING * rounding


def close_for(caller: Caller) -> float:
    """Return by which part two calls of the same numbers may differ."""
    return ALIKE if caller.how.double else ALIKE_IN_FLOAT


def not_repeatable() -> NotRepeatableError:
    """Return the error that says so."""
    return NotRepeatableError(
        "fn gives another output each time it is called with the same inputs, though "
        "torch's own random state was replayed. See what it draws from Python's "
        "random or NumPy, and what it reads or changes outside of modules. A lazy "
        "module draws its weights in its first call: call fn once before. What "
        "torch.compile has made may draw other numbers than what it was made of: pass "
        "that, as model._orig_mod. Or pass check=False."
    )
