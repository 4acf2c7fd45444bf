"""Whether a call's gradients in its own dtype agree with those in float64.

Finite differences need float64. They do not see what a backward does in float32 alone,
as a kernel may, nor what it does with a ``grad_output`` whose layout a copy loses: all
entries of an expanded one are one place in memory.
"""

from collections.abc import Callable, Iterable
from typing import cast

import torch
from torch import Tensor

from gradlib.double import doubled, wider
from gradlib.recording.attributes import Change
from gradlib.recording.difference import rtol_of
from gradlib.recording.flow import Key
from gradlib.recording.gaps import gaps, gaps_of_shares
from gradlib.recording.replay import Replayed, in_float64, inputs_of, replay
from gradlib.recording.trace import CallTrace
from gradlib.recording.world import World
from gradlib.stats import root_mean_square
from gradlib.values import in_memory

LIMIT = 0.1
"""An error above this is not rounding, unless the dtype is too coarse to say so."""

# The two may differ by so many times the known rounding of that dtype: its tolerance,
# and what changes when the recorded values are moved a little.
ROOM = 4
REPLAYS, MOVED = 4, 4  # how often they are moved, and by how many eps

OFF_ZERO = 1e-6
"""How far a zero is moved, as a part of the root mean square of its tensor.

That is less than the square root of float32's eps and more than that of float64's: what
``nn.RMSNorm``, which takes eps from the dtype, gives for such rows is another then.
"""

SEED = 5_120_617


def wrong_in_own_dtype(
    trace: CallTrace,
    number: int,
    replayed: Replayed,
    inside: Iterable[torch.dtype],
    rtol: float,
) -> dict[Key, float]:
    """Return each input and own parameter whose gradient differs, with the error.

    There is none where the call returns something else in float64, or would if it had
    been given small numbers for zeros: then there is nothing to compare. A norm whose
    eps depends on the dtype gives 0 for a row of zeros in each, and another gradient.
    Nor is there one where it draws random numbers, which are others in float64:
    its output may hardly show that, as of a block whose branch is scaled by 1e-6.

    Args:
        trace: The call.
        number: Our number of the backward pass.
        replayed: The call and its gradients, in its own dtype.
        inside: The dtypes in which it may compute, as under autocast.
        rtol: The error to allow, where it is more than `LIMIT`.

    Raises:
        CannotReplayError: Too little is known of the call, or it raises in float64 or
            where its inputs are moved a little.
    """
    grads = trace.arrived(number).values()
    dtypes = {it.dtype for it in (*inputs_of(trace).values(), *grads)}
    coarse = {it for it in (*dtypes, *inside) if it != wider(it)}
    if not coarse:
        return {}
    with in_float64():
        exact = replay(trace, number, doubled)
    limit = max(LIMIT, ROOM * rtol_of(coarse), rtol)
    # Where a tanh is flat, its output is rounded to 1, and its backward computes the
    # slope from that: what it gives is rounding of ``grad_output``.
    came = max(map(root_mean_square, grads))
    infos = [torch.finfo(it) for it in coarse]
    least = max(max(it.tiny, ROOM * it.eps * came) for it in infos)
    errors = _errors(replayed, exact, least)
    if max(errors.values(), default=0.0) <= limit:
        return {}
    eps = max(it.eps for it in infos)
    others = _replays_beside(trace, number, MOVED * eps)
    if not others:
        return {}
    noise_of_output = max(_output_error(replayed, it) for it in others)
    # Strict: a mean over other random numbers nearly agrees, and its gradient does not.
    allowed = ROOM * max(ROOM * eps, noise_of_output)
    if _output_error(replayed, exact) > allowed:
        return {}
    noise = [_errors(replayed, it) for it in others]
    wrong = {
        key: error
        for key, error in errors.items()
        if error > max(limit, *(ROOM * it.get(key, 0.0) for it in noise))
    }
    return {} if wrong and _error_off_zero(trace, number) > allowed else wrong


def _replays_beside(trace: CallTrace, number: int, by: float) -> list[Replayed]:
    """Return replays from values moved by up to a part; none if the call has drawn."""
    world, move = cast(World, trace.world), _mover(by)
    drawn: list[bool] = []
    found = [
        replay(trace, number, move, turn=lambda: drawn.append(world.has_drawn()))
        for _ in range(REPLAYS)
    ]
    return [] if any(drawn) else found


def _error_off_zero(trace: CallTrace, number: int) -> float:
    """Return how far the outputs in the two dtypes are apart, without any zeros."""
    beside = replay(trace, number, _off_zero())
    with in_float64():
        move = _off_zero()
        exact = replay(trace, number, lambda kept: doubled(move(kept)))
    return _output_error(beside, exact)


def _errors(one: Replayed, other: Replayed, least: float = 0.0) -> dict[Key, float]:
    """Return how far the finite gradients of two replays are apart.

    Gradients smaller than `least` are left out: the dtype does not hold them well.
    """
    if one.shares is None or other.shares is None:
        return {}
    found = gaps_of_shares(one.shares, other.shares)
    return {key: it.error for key, it in found if not it.reason and it.size > least}


def _output_error(one: Replayed, other: Replayed) -> float:
    found = gaps(one.output.build(), other.output.build())
    return max((it.error for _, it in found), default=0.0)


def _mover(by: float) -> Change:
    """Return a function that moves recorded values by up to a part of themselves.

    It moves them towards zero, so that values which must not exceed 1 do not.
    """
    return _moved(lambda value, drawn: value * (1 - by * drawn))


def _off_zero() -> Change:
    """Return a function that puts small numbers, the same each time, for zeros."""
    return _moved(
        lambda value, drawn: torch.where(
            value == 0, OFF_ZERO * (root_mean_square(value) or 1.0) * drawn, value
        )
    )


def _moved(change: Callable[[Tensor, Tensor], Tensor]) -> Change:
    """Return a function that changes recorded values.

    Entries that share memory still do.

    Args:
        change: Is given values, and random numbers from 0 to 1.
    """
    generator = torch.Generator("cpu").manual_seed(SEED)

    def move(kept: Tensor) -> Tensor:
        is_plain = kept.layout == torch.strided and not kept.is_nested
        if not (is_plain and kept.dtype.is_floating_point and kept.numel()):
            return kept
        part = in_memory(kept)
        drawn = torch.rand(
            part.shape, generator=generator, dtype=torch.float64, device="cpu"
        )
        moved = change(part, drawn.to(kept.device))
        return moved.to(kept.dtype).expand(kept.shape)

    return move
