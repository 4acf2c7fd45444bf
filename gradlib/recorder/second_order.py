"""Gradients that reach a call through the graph that an earlier backward pass made.

A pass with ``create_graph=True`` makes nodes of its own. Those that it makes as it goes
through a call lead to the inputs and parameters of the call. What a later pass brings
that way is a part of the call's share, as it would be of an alias that only it had.
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
from gradlib.recorder.ends import End, end_of
from gradlib.recorder.views import Region
from gradlib.recording.flow import Flow, Grads

Part: TypeAlias = Callable[[Tensor], Tensor | None]
"""Returns the part of a gradient to keep; ``None`` to keep nothing of it."""

Receiver: TypeAlias = tuple[int, Grads, Part | None, Flow]
"""The index of a gradient that a node computes, where that is gathered, which part of
it (all without `Part`), and the flow of the call that gets it."""


@dataclass(frozen=True, slots=True)
class OfView:
    """Returns the part of a base's gradient that belongs to an overwritten view.

    Attributes:
        region: The part.
        end: Where the view's own gradient went before. In a later pass it still goes
            there, from the saved copy of the view's old value.
    """

    region: Region
    end: End

    def __call__(self, grad: Tensor) -> Tensor:
        """Return the part."""
        return self.region.of(grad)


FEW = 1000
"""More nodes than the backward of one node makes."""


def made_by(
    node: Node,
    receivers: Sequence[Receiver],
    grads_in: Sequence[Tensor | None],
    grads_out: Sequence[Tensor | None],
    known: int | None,
) -> Iterator[tuple[Node, Receiver]]:
    """Yield the new nodes of a node's backward that lead where the node itself does.

    They lead to the gradients that the backward was given, and to what the node has
    saved: its inputs and its outputs. From the old value of an overwritten view they
    lead on through the nodes that made the view.

    Args:
        node: The node.
        receivers: What receives the gradients that it computes.
        grads_in: These gradients.
        grads_out: The gradients they were computed from.
        known: autograd's sequence number up to which this was asked before; ``None``
            where another thread may have numbered the node.

    Yields:
        Each new node, with what receives one of its gradients.
    """
    edges, inputs = _inputs_of(node)
    wanted: dict[End, dict[tuple[int, int], Receiver]] = {}
    views: set[End] = set()
    for receiver in receivers:
        entry, grads, part, flow = receiver
        if isinstance(part, OfView):
            end, receiver = part.end, (entry, grads, None, flow)
            views.add(end)
        else:
            end = _end_of(edges[entry], inputs)
        # A tensor that goes in at two places has one share.
        wanted.setdefault(end, {})[id(grads), id(flow)] = receiver
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
    """Yield the new edges of a node's backward that lead where one of its own does.

    Args:
        node: The node.
        entry: The index of its own edge.
        grads_in: The gradients that its backward computed.
        grads_out: The gradients they were computed from.
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
    """Yield the new edges of a node's backward that lead to the ends in `wanted`.

    Args:
        node: The node.
        wanted: The ends.
        views: The ends in `wanted` from which the new nodes may lead on.
        grads_in: The gradients that the backward computed.
        grads_out: The gradients they were computed from.
        known: See `made_by`.
    """
    _, inputs = _inputs_of(node)
    given = [it.grad_fn for it in grads_out if it is not None]
    ends = {node, *given, *inputs}
    seen: set[Node | None] = {None, *ends}
    newer = _newer_than(node) if known is None else max(sequence_number(node), known)
    if type(node) is CopySlices:
        # Only it knows the nodes of what was overwritten and of the operation.
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
    """Tell whether a node's backward has returned an input of the node.

    The backward of a Function may return what it has saved. A later pass goes on from
    there, past the call.

    Args:
        node: The node.
        grads_in: What its backward has returned.
        grads_out: What its backward was given, which may itself be an input.
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
    """Return a sequence number that all new nodes of a node's backward exceed.

    It is -1 if this thread has not counted more than `FEW` past the node's own.
    """
    number = sequence_number(node)
    return number if number + FEW < next_sequence_number() else -1


def _end_of(edge: tuple[Node | None, int], ends: Collection[Node | None]) -> End:
    """Return where an edge leads.

    An operation that overwrites a tensor it needs has saved a clone: from there the
    edge leads on to the tensor.

    Args:
        edge: The edge.
        ends: Nodes that are no such clones.
    """
    node, number = edge
    while node is not None and type(node) is CloneNode and node not in ends:
        ((node, number),) = node.next_functions
    leaf = None if node is None else leaf_of(node)
    return cast(End, (node, number)) if leaf is None else id(leaf)
