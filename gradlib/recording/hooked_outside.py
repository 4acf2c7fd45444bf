"""Whether a call has set a hook on a node of the graph that a call inside it made.

Such a hook, of ``tensor.grad_fn.register_hook()``, changes the gradients of the inner
call, and a replay of that call alone does not set it.
"""

from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from typing import cast

from torch import Tensor, nn
from torch.autograd.graph import Node

from gradlib.edges import nodes_behind
from gradlib.errors import CannotReplayError
from gradlib.private.hooks import count_node_hooks
from gradlib.private.nodes import (
    AccumulateGrad,
    next_sequence_number,
    sequence_number,
)
from gradlib.recording.replay import replay
from gradlib.recording.trace import CallTrace
from gradlib.tree import Tree


def who_hooked(
    trace: CallTrace, number: int, traces: Sequence[CallTrace]
) -> CallTrace | None:
    """Return the innermost call around a call that has set a hook on its graph.

    Args:
        trace: The call.
        number: Our number of the backward pass.
        traces: The calls of the recording.
    """
    by_moment = {it.moment: it for it in traces}
    outer = by_moment.get(trace.caller)
    while outer is not None:
        # A replay of it sets its hooks again.
        if outer.hooks_inside and _sets_hooks(outer, trace, number, traces):
            return outer
        outer = by_moment.get(outer.caller)
    return None


def _sets_hooks(
    outer: CallTrace, trace: CallTrace, number: int, traces: Sequence[CallTrace]
) -> bool:
    """Tell whether a replay of a call sets hooks on nodes that a call inside made."""
    watched = _Watched(cast(nn.Module, trace.module), _place(outer, trace, traces))
    with suppress(CannotReplayError):
        replay(outer, number, begin=watched.begin, turn=watched.compare)
    return watched.has_more


def _place(outer: CallTrace, trace: CallTrace, traces: Sequence[CallTrace]) -> int:
    """Return how many calls of the same module were begun before a call in `outer`."""
    inside = (it for it in traces if outer.moment < it.moment < trace.moment)
    return Counter(it.module for it in inside)[trace.module]


class _Watched:
    """The nodes of one call in a replay of another, and how many hooks they have."""

    def __init__(self, module: nn.Module, place: int) -> None:
        self._module = module
        self._place = place  # of the call, among those of the module
        self._begun: list[tuple[int, int]] = []  # the calls that have not returned yet
        self._count = 0
        self._hooks: dict[Node, int] = {}
        self.has_more = False

    def begin(self) -> None:
        """Wait for the call."""
        self._module.register_forward_pre_hook(self._before, prepend=True)
        self._module.register_forward_hook(self._after)

    def _before(self, *_: object) -> None:
        self._begun.append((self._count, next_sequence_number()))
        self._count += 1

    def _after(self, _module: nn.Module, _args: object, output: object) -> None:
        place, since = self._begun.pop()
        if place == self._place:
            made = _made_since(since, output)
            self._hooks = {it: count_node_hooks(it) for it in made}

    def compare(self) -> None:
        """See whether nodes have more hooks than when the call returned."""
        hooks = self._hooks.items()
        self.has_more = any(count_node_hooks(it) > count for it, count in hooks)


def _made_since(since: int, output: object) -> list[Node]:
    """Return the nodes behind an output that were made from a number on."""
    tensors = [it for it in Tree.of(output).leaves if isinstance(it, Tensor)]
    behind = nodes_behind(it for it in tensors if it.grad_fn is not None)
    # Hooks on the node of a leaf are hooks on the leaf.
    made = (it for it in behind if type(it) is not AccumulateGrad)
    return [it for it in made if sequence_number(it) >= since]
