"""Which weights and buffers were written to between a call and its backward pass.

Autograd sees no write through ``.data``, nor that of BatchNorm to its statistics. The
backward then computes with other values than the forward did.
"""

from collections.abc import Sequence
from functools import partial
from typing import TypeAlias, cast

from torch import Tensor, nn

from gradlib.private.modules import own_buffers, own_parameters
from gradlib.recording.difference import Tolerance, gaps_of_shares
from gradlib.recording.kept import Kept
from gradlib.recording.replay import replay
from gradlib.recording.replayable import require_replayable
from gradlib.recording.trace import CallTrace
from gradlib.stats import is_of_other_class
from gradlib.values import same_values

Later: TypeAlias = dict[tuple[nn.Module, str], tuple[str, Tensor]]
"""By module and name: how the called module names it, and what it held later."""

FEW = 16
"""Of how many tensors it is found out which of them matter: a replay for each."""


def written_between(
    trace: CallTrace, number: int, traces: Sequence[CallTrace], tolerance: Tolerance
) -> list[str]:
    """Return the weights and buffers with whose later values a pass is as recorded.

    What one held in the pass is known where nobody wrote to it again before the next
    call, or since.

    Args:
        trace: The call.
        number: Our number of the backward pass.
        traces: The calls of the recording.
        tolerance: How far two gradients may be apart.

    Returns:
        How the called module names them; nothing where these values explain nothing.
    """
    recorded = trace.gradients("shares", number)

    def explain(values: Later) -> bool:
        again = replay(trace, number, turn=partial(_put, values)).shares
        gaps = gaps_of_shares(recorded, {} if again is None else again)
        return again is not None and all(tolerance.allows(it) for _, it in gaps)

    found = _later(trace, number, traces)
    if not (found and explain(found)):
        return []
    for key in [*found] if len(found) <= FEW else ():
        others = {it: found[it] for it in found if it != key}
        if others and explain(others):
            found = others
    return [path for path, _ in found.values()]


def _later(trace: CallTrace, number: int, traces: Sequence[CallTrace]) -> Later:
    """Return what tensors held that held something else as the call began.

    That is as the first call after the pass began, or now, where there was none.
    """
    history, called = require_replayable(trace.block), cast(nn.Module, trace.module)
    ended = trace.block.ended(number)
    following = min((it.moment for it in traces if it.moment > ended), default=None)
    found: Later = {}
    for module, path in history.inside(called, trace.moment).items():
        then = history.at(module, trace.moment)
        after = then if following is None else history.at(module, following)
        for name, kept in then.items():
            last = after.get(name)
            if last is None or last.tensor is not kept.tensor:
                continue  # another stands there, and the graph goes on with this one
            value = kept.tensor if following is None else last.value
            if _is_other(value, kept):
                found[module, name] = path + name, value
    return found


def _is_other(value: Tensor, kept: Kept) -> bool:
    """Tell whether something else could stand in the place of what was kept."""
    before = kept.value
    return (
        not is_of_other_class(value)
        and (value.is_floating_point() or value.is_complex())  # no count of batches
        and value.layout == before.layout
        and (value.shape, value.dtype, value.device)
        == (before.shape, before.dtype, before.device)
        and not same_values(value, before)
    )


def _put(values: Later) -> None:
    """Write values into the model that is computed again, as autograd does not see."""
    for (module, name), (_, value) in values.items():
        tensor = own_parameters(module).get(name, own_buffers(module).get(name))
        if tensor is not None:
            tensor.data.copy_(value.detach())
