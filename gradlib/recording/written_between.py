"""Which weights and buffers were written to between a call and its backward pass.

Autograd sees no write through ``.data``, nor those of BatchNorm to its statistics. The
backward then computes with other values than the forward did.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, TypeAlias, cast

from torch import Tensor, nn

from gradlib.private.modules import own_buffers, own_parameters
from gradlib.recording.difference import Tolerance
from gradlib.recording.flow import Key
from gradlib.recording.gaps import gaps_of_shares
from gradlib.recording.kept import UNKNOWN, Kept, version_of
from gradlib.recording.replay import replay
from gradlib.recording.replayable import require_replayable
from gradlib.recording.trace import CallTrace
from gradlib.subclasses import is_of_other_class
from gradlib.values import same_values


class Later(NamedTuple):
    """A tensor that was written to after a call began."""

    path: str  # its name in the called module
    value: Tensor  # that it has later
    is_unseen: bool  # whether autograd saw none of the writes


Laters: TypeAlias = dict[tuple[nn.Module, str], Later]
"""Several, by module and name in that."""

FEW = 16
"""For at most this many tensors, a replay each tells which of them matter."""


def written_between(
    trace: CallTrace, number: int, traces: Sequence[CallTrace], tolerance: Tolerance
) -> list[str]:
    """Return the weights and buffers whose later values give the recorded gradients.

    The value in the pass is known if nothing was written after the pass and before the
    next call, or since if there is none.

    Returns:
        Their names in the called module; empty where later values explain nothing.
    """
    recorded = trace.gradients("shares", number)
    explain = partial(gives, trace, number, recorded, tolerance)
    found = _later(trace, number, traces)
    if not (found and explain(found)):
        return []
    for key in [*found] if len(found) <= FEW else ():
        others = {it: found[it] for it in found if it != key}
        if others and explain(others):
            found = others
    return [it.path for it in found.values()]


def perhaps_written(
    trace: CallTrace,
    number: int,
    replayed: Mapping[Key, Any],
    traces: Sequence[CallTrace],
    tolerance: Tolerance,
) -> list[str]:
    """Return the weights and buffers that may have had other values in the pass.

    They have other values later, autograd saw no write, and with these values the
    gradients are others than `replayed`, those with the values of the forward. If they
    were written to again after the pass, what they were in it is not known.
    """
    later = _later(trace, number, traces).items()
    found = {key: it for key, it in later if it.is_unseen}
    if len(found) > FEW:
        return []
    as_before = partial(gives, trace, number, replayed, tolerance)
    return [it.path for key, it in found.items() if not as_before({key: it})]


def gives(
    trace: CallTrace,
    number: int,
    shares: Mapping[Key, Any],
    tolerance: Tolerance,
    values: Laters,
) -> bool:
    """Tell whether a pass, run again with some later values, gives these shares."""
    again = replay(trace, number, turn=partial(_put, values)).shares
    if again is None:
        return False
    return all(tolerance.allows(it) for _, it in gaps_of_shares(shares, again))


def _later(trace: CallTrace, number: int, traces: Sequence[CallTrace]) -> Laters:
    """Return the tensors that changed after the call began, with their later values.

    Later is when the first call after the pass began, or now if there is none.
    """
    history, called = require_replayable(trace.block), cast(nn.Module, trace.module)
    ended = trace.block.ended(number)
    following = min((it.moment for it in traces if it.moment > ended), default=None)
    found: Laters = {}
    for module, path in history.inside(called, trace.moment).items():
        then = history.at(module, trace.moment)
        after = then if following is None else history.at(module, following)
        for name, kept in then.items():
            last = after.get(name)
            if last is None or last.tensor is not kept.tensor:
                continue  # another tensor stands there; the graph has the first one
            value = kept.tensor if following is None else last.value
            version = version_of(kept.tensor) if following is None else last.version
            if _is_other(value, kept):
                is_unseen = version == kept.version != UNKNOWN
                found[module, name] = Later(path + name, value, is_unseen)
    return found


def _is_other(value: Tensor, kept: Kept) -> bool:
    """Tell whether a value differs from the kept one, and could replace it."""
    before = kept.value
    return (
        not is_of_other_class(value)
        and (value.is_floating_point() or value.is_complex())  # no count of batches
        and value.layout == before.layout
        and (value.shape, value.dtype, value.device)
        == (before.shape, before.dtype, before.device)
        and not same_values(value, before)
    )


def _put(values: Laters) -> None:
    """Write values into the replayed model, unseen by autograd."""
    for (module, name), it in values.items():
        tensor = own_parameters(module).get(name, own_buffers(module).get(name))
        if tensor is not None:
            tensor.data.copy_(it.value.detach())
