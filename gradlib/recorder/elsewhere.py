"""The operations of a call that lead to nothing it returned or left in its module.

A model may put a loss into a global list, or into an object of its own. Only a backward
pass through it shows that the call made it: when a pass first reaches a call, its graph
is searched from where it began.
"""

import sys
import threading
from bisect import bisect_right
from collections import defaultdict
from operator import attrgetter
from typing import Any

from torch import Tensor
from torch.autograd.graph import Node

from gradlib.edges import edge_of
from gradlib.private.nodes import ToCopy, leaf_of, sequence_number
from gradlib.private.passes import (
    backward_pass_id,
    current_node,
    pass_is_compiled,
    pass_outputs,
)
from gradlib.recorder.frame import Frame
from gradlib.recorder.graph import End, Forward, Key, leaf_behind
from gradlib.recorder.node_hooks import NodeHooks
from gradlib.recorder.second_order import Receiver
from gradlib.recording.trace import Grads


class Elsewhere:
    """Finds what calls put elsewhere, and has its gradients added to their shares."""

    def __init__(self, nodes: NodeHooks) -> None:
        """Begin with no forward.

        Args:
            nodes: Hooks nodes.
        """
        self._nodes = nodes
        # Of each thread, which numbers its nodes by itself, in the order they began.
        self._forwards = defaultdict[int, list[Forward]](list)

    def add(self, frame: Frame, ends: dict[End, Grads]) -> None:
        """Remember which nodes a call made, and where its gradients go.

        Args:
            frame: The call, which has returned.
            ends: Where the gradients of its inputs and parameters are gathered.
        """
        if frame.until == sys.maxsize or frame.in_backward:
            return  # its nodes' numbers do not tell, or a checkpoint made them anew
        forward = frame.graph.forward
        forwards = self._forwards[threading.get_ident()]
        if not forwards or forwards[-1] is not forward:
            forwards.append(forward)
        forward.until = max(forward.until, frame.until)
        by_number: dict[Key, Grads] = {
            it if isinstance(it, int) else (sequence_number(it[0]), it[1]): grads
            for it, grads in ends.items()
        }
        forward.calls.append((frame.since, frame.until, by_number, frame.flow))

    def hook(self) -> None:
        """Hook the operations of the running pass that no call led to.

        What a pass with create_graph=True has made leads to copies that the forward has
        saved too. `second_order` sees to these, so a later pass is not searched.
        """
        forwards = self._forwards.get(threading.get_ident())
        node = current_node()
        if not forwards or node is None or pass_is_compiled():
            return
        if self._nodes.numbered.with_graph:
            return
        reached, first = sequence_number(node), forwards[0].since
        stack: list[Any] = [edge_of(it)[0] for it in pass_outputs()]
        seen: set[Node] = set()
        while stack:
            node = stack.pop()
            if node is None or node in seen or _leaf_at(node) is not None:
                continue
            seen.add(node)
            number = sequence_number(node)
            if number < first:
                continue
            forward = forwards[bisect_right(forwards, number, key=_SINCE) - 1]
            if number in forward.numbers:
                continue  # some call led to it
            if number < forward.until and number not in forward.hooked:
                self._take(node, number, forward, has_run=number > reached)
            stack += [target for target, _ in node.next_functions]

    def _take(self, node: Any, number: int, forward: Forward, *, has_run: bool) -> None:
        """Add what a node computes to the shares of the calls that made it."""
        receivers: list[Receiver] = []
        is_shared = False  # whether it leads to a leaf by a cast, which others may use
        for since, until, ends, flow in forward.calls:
            if not since <= number < until:
                continue
            for entry, (target, index) in enumerate(node.next_functions):
                if target is None:
                    continue
                if (leaf := _leaf_at(target)) is None:
                    grads = ends.get((sequence_number(target), index))
                else:
                    grads = ends.get(id(leaf))
                    is_shared |= target.__class__ is ToCopy and grads is not None
                if grads is not None:
                    receivers.append((entry, grads, None, flow))
        for *_, flow in receivers:
            flow.left_elsewhere = True
            if has_run or is_shared:
                flow.missed |= {backward_pass_id()}
        if receivers and not is_shared:
            forward.hooked.add(number)  # for later passes too
            self._nodes.hook(node, receivers, None, threading.get_ident())


_SINCE = attrgetter("since")


def _leaf_at(node: Node) -> Tensor | None:
    """Return the leaf at a node, or the one that the node casts, or ``None``."""
    return leaf_behind(node) if node.__class__ is ToCopy else leaf_of(node)
