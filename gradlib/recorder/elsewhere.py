"""The operations of a call that lead to nothing it returned or left in its module.

A model may put a loss into a global list, or into an object of its own. Only a backward
pass through it shows that the call made it: when a pass first reaches a call, its graph
is searched from where it began.
"""

import sys
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable
from operator import attrgetter
from typing import Any

from torch import Tensor
from torch.autograd.graph import Node

from gradlib.edges import edge_of
from gradlib.private.nodes import ToCopy, leaf_of, sequence_number
from gradlib.private.passes import (
    are_passed_in_order,
    backward_pass_id,
    current_node,
    has_accelerator,
    pass_is_compiled,
    pass_outputs,
)
from gradlib.recorder.ends import End, NumberedEnd, leaf_behind
from gradlib.recorder.forward import Forward
from gradlib.recorder.frame import Frame
from gradlib.recorder.node_hooks import NodeHooks
from gradlib.recorder.second_order import Receiver
from gradlib.recording.flow import Grads


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
        forwards = self._forwards[forward.thread]
        if not forwards or forwards[-1] is not forward:
            forwards.append(forward)
        forward.until = max(forward.until, frame.until)
        by_number: dict[NumberedEnd, Grads] = {
            it if isinstance(it, int) else (sequence_number(it[0]), it[1]): grads
            for it, grads in ends.items()
        }
        forward.calls.append((frame.since, frame.until, by_number, frame.flow))

    def hook(self) -> bool:
        """Hook the operations of the running pass that no call led to; tell if any are.

        What a pass with create_graph=True has made leads to copies that the forward has
        saved too. `second_order` sees to these, so a later pass is not searched.
        """
        current = current_node()
        if not self._forwards or current is None or pass_is_compiled():
            return False
        if self._nodes.numbered.with_graph:
            return False
        are_any = False
        for thread, outputs in pass_outputs():
            if forwards := self._forwards.get(thread):
                made, ran = _search(forwards, outputs, current)
                for node, number, forward in made:
                    are_any |= self._take(node, number, forward, ran)
        return are_any

    def _take(self, node: Any, number: int, forward: Forward, ran: int | None) -> bool:
        """Add what a node computes to the shares of the calls that made it, if any.

        Args:
            node: The node.
            number: Its sequence number.
            forward: The forward that made it.
            ran: The number from which on nodes have run; ``None`` if unknown.
        """
        receivers: list[Receiver] = []
        # Whether it leads to a leaf by a cast, which others may use, or may have run.
        is_left = ran is None
        for since, until, ends, flow in forward.calls:
            if not since <= number < until:
                continue
            flow.left_elsewhere = True
            for entry, (target, index) in enumerate(node.next_functions):
                if target is None:
                    continue
                if (leaf := _leaf_at(target)) is None:
                    grads = ends.get((sequence_number(target), index))
                else:
                    grads = ends.get(id(leaf))
                    is_left |= target.__class__ is ToCopy and grads is not None
                if grads is not None:
                    receivers.append((entry, grads, None, flow))
        for *_, flow in receivers:
            if is_left or (ran is not None and number >= ran):
                flow.missed |= {backward_pass_id()}
        if receivers and not is_left:
            forward.hooked.add(number)  # for later passes too
            self._nodes.hook(node, receivers, None, forward.thread)
        return bool(receivers)


def _search(
    forwards: list[Forward], outputs: Iterable[Any], current: Node
) -> tuple[list[tuple[Node, int, Forward]], int | None]:
    """Search the graph of the running pass for operations that no call led to.

    Args:
        forwards: Those of the thread that began the pass.
        outputs: The tensors, or edges of the graph, where the pass began.
        current: The node that the pass has reached.

    Returns:
        The nodes, each with its sequence number and its forward; and the number from
        which on the pass has gone through all of them. It goes by falling numbers, but
        a leaf, which has none, comes right after the last node that leads to it. With
        nodes on several devices that number is ``None``: their threads work at once.
    """
    found: list[tuple[Node, int, Forward]] = []
    first, ran = forwards[0].since, sequence_number(current) + 1
    stack: list[Any] = [edge_of(it)[0] for it in outputs]
    seen: set[Node] = set()
    while stack:
        node = stack.pop()
        if node is None or node in seen or _leaf_at(node) is not None:
            continue
        seen.add(node)
        number = sequence_number(node)
        targets = [target for target, _ in node.next_functions]
        if current in targets:
            ran = min(ran, number)
        if number < first:
            continue
        forward = forwards[bisect_right(forwards, number, key=_SINCE) - 1]
        if number in forward.numbers:
            continue  # some call led to it
        if number < forward.until and number not in forward.hooked:
            found.append((node, number, forward))
        stack += targets
    if found and has_accelerator() and not are_passed_in_order(seen):
        return found, None
    return found, ran


_SINCE = attrgetter("since")


def _leaf_at(node: Node) -> Tensor | None:
    """Return the leaf at a node, or the one that the node casts, or ``None``."""
    return leaf_behind(node) if node.__class__ is ToCopy else leaf_of(node)
