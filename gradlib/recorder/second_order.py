"""What a later pass brings to a call through what an earlier one has computed for it.

A pass with ``create_graph=True`` makes nodes of its own. Those that it makes as it goes
through a call lead to what the call was given, and used: what comes back that way is a
part of its share, as it would be of an alias that the call alone had.
"""

import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TypeAlias

from torch import Tensor
from torch.autograd.graph import Node

from gradlib.private import leaf_of, sequence_number
from gradlib.recorder.graph import End, ForwardGraph
from gradlib.recording.trace import Flow, Grads

Part: TypeAlias = Callable[[Tensor], Tensor | None]
"""What is meant of a gradient; ``None`` for nothing of it."""

Receiver: TypeAlias = tuple[int, Grads, Part | None, Flow]
"""Which of the gradients a node computes goes where; without `Part` all of it."""


def made_by(
    node: Node,
    receivers: Sequence[Receiver],
    grads_in: Sequence[Tensor | None],
    grads_out: Sequence[Tensor | None],
    began: int,
) -> Iterator[tuple[Node, Receiver]]:
    """Return what a node's backward has made that leads where the node itself does.

    It leads to what the backward was given, and to what the node has saved: that is
    what once went into it, and what came out.

    Args:
        node: The node.
        receivers: Where what it computes goes.
        grads_in: That.
        grads_out: From what.
        began: autograd's sequence number as the pass began.
    """
    edges: Sequence[tuple[Node | None, int]] = node.next_functions
    given = [it.grad_fn for it in grads_out if it is not None]
    before = {it for it in (node, *given, *(to for to, _ in edges)) if it is not None}
    graph = ForwardGraph()
    # Where another thread has counted the nodes of the forward, numbers do not tell
    # which were there before.
    graph.since = began if sequence_number(node) < began else 0
    graph.leave_out((it, 0) for it in before)
    made = [it.grad_fn for it in grads_in if it is not None]
    graph.roots = [it for it in made if it is not None]
    graph.walk()
    for entry, grads, part, flow in receivers:
        for _, maker, number, cast in graph.leading_to(
            _end_of(edges[entry]), 0, sys.maxsize
        ):
            if cast is None:
                yield maker, (number, grads, part, flow)
            elif cast[0][0] not in before:
                cast_back = partial(Tensor.to, dtype=cast[1])
                yield maker, (number, grads, cast_back, flow)


def _end_of(edge: tuple[Node | None, int]) -> End:
    node, number = edge
    assert node is not None, "a gradient goes there"
    leaf = leaf_of(node)
    return (node, number) if leaf is None else id(leaf)
