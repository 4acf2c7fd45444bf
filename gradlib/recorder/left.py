"""The tensors that calls leave in their modules, as a state for later calls.

What comes back to a call through such a tensor is a part of its shares, and no gradient
of its output. So that the call can be replayed, it is kept too.
"""

from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import Any, TypeAlias, cast

from torch import nn
from torch.autograd.graph import Node

from gradlib.private.nodes import sequence_number
from gradlib.recorder.forward_values import Value, Values
from gradlib.recorder.frame import Frame
from gradlib.recorder.node_hooks import NodeHooks
from gradlib.recording.flow import ARGUMENT, Grads, Key, Left
from gradlib.recording.left_behind import left_in, left_in_arguments

LeftValues: TypeAlias = dict[Frame, dict[Left, Value]]
"""By call, what it and the calls inside it have left; in each place, what came last."""


def take_left(
    found: LeftValues,
    calls: Sequence[Frame],
    modules: Iterable[nn.Module],
    given: Iterable[Any],
    values: Values,
) -> list[Value]:
    """Add what a call has left, for itself and for the calls around it.

    Args:
        found: What the calls of the forward have left so far.
        calls: The calls that run, the outermost first. The last one returns.
        modules: The modules to look into.
        given: The arguments of that call.
        values: The tensors met in the forward.

    Returns:
        What was added.
    """
    own = calls[-1]
    every = [(it, *left) for it in modules for left in left_in(it)]
    every += [(own.module, ARGUMENT, *left) for left in left_in_arguments(given)]
    added: list[Value] = []
    for module, name, place, tensor in every:
        with suppress(Exception):  # a class of tensors may refuse to be kept
            number = sequence_number(cast(Node, tensor.grad_fn))
            if number < calls[0].since:
                continue
            value = values.of(tensor)
            added.append(value)
            for it in calls:
                if it.since <= number and (name != ARGUMENT or it is own):
                    found.setdefault(it, {})[module, name, place] = value
    return added


def hook_left(
    found: LeftValues, frames: Iterable[Frame], values: Values, nodes: NodeHooks
) -> None:
    """Have calls keep what comes to them from outside, now that their graph is walked.

    Args:
        found: What the calls of the forward have left.
        frames: The calls, which have returned.
        values: The tensors met in the forward.
        nodes: Hooks nodes.
    """
    by_kept = {id(it.kept): it for it in values}
    for frame in frames:
        left, flow = found.pop(frame), frame.flow
        returned: dict[Key | Left, Value] = {
            place: by_kept[id(leaf)]
            for place, leaf in enumerate(frame.call.output_leaves())
            if place in flow.outputs and id(leaf) in by_kept
        }
        ends = {it.end for it in returned.values()}
        others = {key: it for key, it in left.items() if it.end not in ends}
        every = {**returned, **others}
        is_known = len(returned) == len(flow.outputs) and not frame.has_threads
        # What the call computes itself was not seen in passes inside of it.
        has_gone_back = any(it.grads for it in every.values())
        if others and is_known and not has_gone_back:
            flow.alone = {
                key: (it.grads, _computed_by(frame, it, nodes))
                for key, it in every.items()
            }


def _computed_by(frame: Frame, value: Value, nodes: NodeHooks) -> Grads:
    """Return where the gradients of a tensor are gathered that a call computes."""
    own: Grads = {}
    made = frame.graph.leading_to(value.end, frame.since, frame.until)
    for _, node, entry, _ in made:
        nodes.hook(node, [(entry, own, None, frame.flow)], frame.within)
    return own
