"""What a later pass brings to a call through what an earlier one has computed for it.

A pass with ``create_graph=True`` makes nodes of its own. Those that it makes as it goes
through a call lead to what the call was given, and used: what comes back that way is a
part of its share, as it would be of an alias that the call alone had.
"""

import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import NamedTuple, TypeAlias

from torch import Tensor
from torch.autograd.graph import Node

from gradlib.recorder.graph import End, ForwardGraph
from gradlib.recording.trace import Grads

Part: TypeAlias = Callable[[Tensor], Tensor | None]
"""What is meant of a gradient; ``None`` for nothing of it."""


class Ways(NamedTuple):
    """Where gradients leave a call.

    Attributes:
        ends: Its inputs and own parameters, each with where its gradient is gathered.
        parts: What it has made of these before it used them, as a weight transposed,
            and which part of the gradient of that is meant.
        latest: The highest number of a node that its forward made.
    """

    ends: dict[End, Grads]
    parts: dict[End, tuple[Grads, Part]]
    latest: int


NO_WAYS = Ways({}, {}, 0)
"""Those of what is a part of a call only."""


def edges_to(
    ways: Ways,
    node: Node,
    grads_in: Sequence[Tensor | None],
    grads_out: Sequence[Tensor | None],
    began: int,
) -> Iterator[tuple[Node, int, Grads, Part | None]]:
    """Return what a node's backward has made that leads out of a call.

    It leads to what the backward was given, and to what the node has saved: that is
    what once went into it, and came out.

    Args:
        ways: Where it is to lead.
        node: The node.
        grads_in: What it has computed.
        grads_out: From what.
        began: autograd's sequence number as the pass began.
    """
    graph = ForwardGraph()
    # Where another thread has counted the nodes of the forward, their numbers say
    # nothing of which were there before.
    graph.since = began if ways.latest < began else 0
    given = [it.grad_fn for it in grads_out if it is not None]
    saved = [node, *(before for before, _ in node.next_functions)]
    before = {it for it in (*given, *saved) if it is not None}
    graph.leave_out((it, 0) for it in before)
    graph.leave_out(ways.ends)
    made = [it.grad_fn for it in grads_in if it is not None]
    graph.roots = [it for it in made if it is not None]
    graph.walk()
    for end, grads in ways.ends.items():
        for _, maker, entry, cast in graph.leading_to(end, 0, sys.maxsize):
            if cast is None:
                yield maker, entry, grads, None
            elif cast[0] not in ways.parts and cast[0][0] not in before:
                yield maker, entry, grads, partial(Tensor.to, dtype=cast[1])
    for end, (grads, part) in ways.parts.items():
        for _, maker, entry, _ in graph.leading_to(end, 0, sys.maxsize):
            yield maker, entry, grads, part
