"""What a later pass brings to a call through what an earlier one has computed for it.

A pass with ``create_graph=True`` makes nodes of its own. Those that it makes as it goes
through a call lead to what the call was given, and used: what comes back that way is a
part of its share, as it would be of an alias that the call alone had.
"""

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeAlias, cast

from torch import Tensor
from torch.autograd.graph import Node

from gradlib.private.nodes import (
    CloneNode,
    CopySlices,
    leaf_of,
    next_sequence_number,
    sequence_number,
)
from gradlib.recorder.graph import End, end_of
from gradlib.recorder.views import Region
from gradlib.recording.trace import Flow, Grads

Part: TypeAlias = Callable[[Tensor], Tensor | None]
"""What is meant of a gradient; ``None`` for nothing of it."""

Receiver: TypeAlias = tuple[int, Grads, Part | None, Flow]
"""Which of the gradients a node computes goes where; without `Part` all of it."""


@dataclass(frozen=True, slots=True)
class OfView:
    """What is meant of a base's gradient: a view's part, as the view was overwritten.

    Attributes:
        region: The part.
        end: Where the view's own gradient went before. It still goes there in a later
            pass, from the copy that is saved of what the view was.
    """

    region: Region
    end: End

    def __call__(self, grad: Tensor) -> Tensor:
        """Return the part."""
        return self.region.of(grad)


FEW = 1000
"""More nodes than the backward of one makes."""


def made_by(
    node: Node,
    receivers: Sequence[Receiver],
    grads_in: Sequence[Tensor | None],
    grads_out: Sequence[Tensor | None],
    known: int | None,
) -> Iterator[tuple[Node, Receiver]]:
    """Return what a node's backward has made that leads where the node itself does.

    It leads to what the backward was given, and to what the node has saved: that is
    what once went into it, and what came out. What a view was before it was overwritten
    leads on through what made the view.

    Args:
        node: The node.
        receivers: Where what it computes goes.
        grads_in: That.
        grads_out: From what.
        known: autograd's sequence number up to which it is known what the node leads
            to; ``None`` where another thread may have counted its own.
    """
    edges, inputs = _inputs_of(node)
    wanted: dict[End, dict[tuple[int, int], Receiver]] = {}
    views: set[End] = set()
    for it in receivers:
        entry, grads, part, flow = it
        if isinstance(part, OfView):
            end, it = part.end, (entry, grads, None, flow)
            views.add(end)
        else:
            end = _end_of(edges[entry], inputs)
        # What goes in at two places is one tensor, and has one share.
        wanted.setdefault(end, {})[id(grads), id(flow)] = it
    for maker, number, end in _edges_made(
        node, wanted, views, grads_in, grads_out, known
    ):
        for _, grads, part, flow in wanted[end].values():
            yield maker, (number, grads, part, flow)


def made_to(
    node: Node,
    entry: int,
    grads_in: Sequence[Tensor | None],
    grads_out: Sequence[Tensor | None],
) -> Iterator[tuple[Node, int]]:
    """Return what a node's backward has made that leads where one of its edges does.

    Args:
        node: The node.
        entry: Which of its edges.
        grads_in: What its backward has computed.
        grads_out: From what.
    """
    edges, inputs = _inputs_of(node)
    wanted = {_end_of(edges[entry], inputs)}
    for maker, number, _ in _edges_made(
        node, wanted, (), grads_in, grads_out, known=None
    ):
        yield maker, number


def _inputs_of(
    node: Node,
) -> tuple[Sequence[tuple[Node | None, int]], set[Node | None]]:
    """Return the edges of a node, and where they lead."""
    edges: Sequence[tuple[Node | None, int]] = node.next_functions
    return edges, {to for to, _ in edges}


def _edges_made(
    node: Node,
    wanted: Collection[End],
    views: Collection[End],
    grads_in: Sequence[Tensor | None],
    grads_out: Sequence[Tensor | None],
    known: int | None,
) -> Iterator[tuple[Node, int, End]]:
    """Return the edges that a node's backward has made to where some lead.

    Args:
        node: The node.
        wanted: Where.
        views: Those of `wanted` from which what was made may lead on.
        grads_in: What the backward has computed.
        grads_out: From what.
        known: See `made_by`.
    """
    _, inputs = _inputs_of(node)
    given = [it.grad_fn for it in grads_out if it is not None]
    ends = {node, *given, *inputs}
    seen: set[Node | None] = {None, *ends}
    newer = _newer_than(node) if known is None else max(sequence_number(node), known)
    if type(node) is CopySlices:
        # What it has overwritten, and the operation, have nodes that nobody else knows.
        newer = -1
    stack = [it.grad_fn for it in grads_in if it is not None]
    while stack:
        maker = stack.pop()
        if maker is None or maker in seen or sequence_number(maker) <= newer:
            continue
        seen.add(maker)
        for number, edge in enumerate(maker.next_functions):
            end = _end_of(edge, ends)
            if end in wanted:
                yield maker, number, end
            if isinstance(end, tuple) and (end not in wanted or end in views):
                stack.append(end[0])


def gives_back(
    node: Node, grads_in: Sequence[Tensor | None], grads_out: Sequence[Tensor | None]
) -> bool:
    """Tell whether a node's backward has returned a tensor that went into the node.

    That of a Function may return what it has saved. A later pass goes from there past
    the call.

    Args:
        node: The node.
        grads_in: What its backward has returned.
        grads_out: What it was given. Who gave that may have given what went in.
    """
    edges, ends = _inputs_of(node)
    inputs = {_end_of(edge, ends) for edge in edges}
    return any(
        it is not None
        and it.requires_grad
        and end_of(it) in inputs
        and not any(it is given for given in grads_out)
        for it in grads_in
    )


def _newer_than(node: Node) -> int:
    """Return a number above which what a node's backward has made has its own.

    There is none if this thread has not counted as far as the node's own.
    """
    number = sequence_number(node)
    return number if number + FEW < next_sequence_number() else -1


def _end_of(edge: tuple[Node | None, int], ends: Collection[Node | None]) -> End:
    """Return where an edge leads.

    What overwrites a tensor that it needs has saved a copy, and that leads on to it.

    Args:
        edge: The edge.
        ends: Nodes that are no such copies.
    """
    node, number = edge
    while node is not None and type(node) is CloneNode and node not in ends:
        ((node, number),) = node.next_functions
    leaf = None if node is None else leaf_of(node)
    return cast(End, (node, number)) if leaf is None else id(leaf)
