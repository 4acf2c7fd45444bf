"""The part of the autograd graph that one forward made, and each call in it."""

import sys
from bisect import bisect_left
from collections.abc import Callable, Collection, Iterable, Sequence
from itertools import islice
from operator import itemgetter
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.autograd.graph import Node

from gradlib.edges import Edge, edges_of
from gradlib.private.modes import any_autocast
from gradlib.private.nodes import (
    AccumulateGrad,
    CopySlices,
    ToCopy,
    leaf_of,
    next_sequence_number,
    sequence_number,
)
from gradlib.private.passes import has_accelerator, is_passed_elsewhere

End: TypeAlias = Edge | int
"""Where a gradient goes: an edge of the graph, or the id of a leaf."""

Cast: TypeAlias = tuple[Edge, torch.dtype]
"""An edge into the cast of a leaf, and the dtype of the leaf."""

Made: TypeAlias = tuple[int, Node, int, Cast | None]
"""An edge that a forward made: the sequence number of its node, the node, and which of
the gradients that it computes; if it is known by the leaf that is cast, the cast."""


def end_of(tensor: Tensor) -> End:
    """Return where the gradient of `tensor` goes."""
    node = tensor.grad_fn
    return id(tensor) if node is None else (node, tensor.output_nr)


FAR = 10_000
"""Through how many nodes at most `leads_to_newer` goes."""


class ForwardGraph:
    """What one forward makes of the autograd graph: each edge, by where it leads."""

    # Whether a pass inside of the forward has made nodes in another thread, whose
    # numbers do not say when that was.
    is_mixed = False

    def __init__(self) -> None:
        """Begin with nothing made."""
        # Whoever has a lower number was made by others.
        self.since = next_sequence_number()
        # Only then may autocast have an older cast at hand.
        self.autocasts = any_autocast()
        self.roots: list[Node] = []  # where to begin to walk
        self.returned: set[Node] = set()  # what calls gave to others, who may use it
        self._walked: dict[Node, None] = {}  # in order
        self._in_order = 0  # how many of them were found to be so
        self.left_out: set[Node] = set()  # what was there before
        self._latest = 0  # the highest number met
        self._older: list[Node] = []  # met, and taken for what was there before
        # Most ends have one edge, so of these it stands alone; of others there are all.
        self._edges: dict[End, Made] = {}
        self._several: dict[End, list[Made]] = {}

    def leave_out(self, ends: Iterable[End]) -> None:
        """Never walk `ends`, given from outside, whatever numbers they have."""
        nodes = [end[0] for end in ends if not isinstance(end, int)]
        self._walked.update(dict.fromkeys(nodes))
        self.left_out.update(nodes)

    def walk(self) -> None:
        """Walk what was made since the last time."""
        edges, walked, since = self._edges, self._walked, self.since
        grown: dict[End, list[Made]] = {}
        stack = self.roots  # to which another thread may add
        node: Any
        while stack:
            node = stack.pop()
            if node in walked:
                continue
            number = sequence_number(node)
            if number < since:
                self._older.append(node)
                continue
            if number > self._latest:
                self._latest = number
            walked[node] = None
            for entry, edge in enumerate(node.next_functions):
                target = edge[0]
                if target is None:
                    continue
                kind = target.__class__
                end: End = edge
                cast: Cast | None = None
                if kind is AccumulateGrad:
                    end = id(target.variable)
                elif (
                    kind is ToCopy
                    and (self.autocasts or sequence_number(target) >= since)
                    and (leaf := _leaf_behind(target)) is not None
                ):
                    # autocast shares it between calls, so it belongs to none of them.
                    end = id(leaf)
                    cast = edge, leaf.dtype
                else:
                    stack.append(target)
                made = number, node, entry, cast
                if edges.setdefault(end, made) is not made:
                    grown[end] = self._added(end, made)
                if cast is not None:
                    made = number, node, entry, None
                    if edges.setdefault(edge, made) is not made:
                        grown[edge] = self._added(edge, made)
        for found in grown.values():
            found.sort(key=_number_of)

    def may_be_mixed(self) -> bool:
        """Tell whether there are numbers that another thread may have given."""
        if not has_accelerator():
            return False
        self.walk()
        if any(map(is_passed_elsewhere, self._older)):
            return True
        self._older.clear()
        if self._is_out_of_order():
            return True
        if self._latest < next_sequence_number():
            return False
        made = (it for it in self._walked if sequence_number(it) == self._latest)
        return any(map(is_passed_elsewhere, made))

    def find_mixed(self, given: Collection[Node]) -> bool:
        """Tell whether there are nodes that a pass in another thread has made.

        Args:
            given: Nodes that were there before the forward.
        """
        older = [it for it in self._older if it not in given]
        self.is_mixed = (
            self._latest >= next_sequence_number()
            or self._is_out_of_order()
            or leads_to_newer(older, self.since, {*given, *self.left_out})
        )
        self._older.clear()
        return self.is_mixed

    def _is_out_of_order(self) -> bool:
        """Tell whether a node leads to a later one, as none does that one thread made.

        The numbers of two threads may be about as high.
        """
        new = islice(reversed(self._walked), len(self._walked) - self._in_order)
        if any(map(_leads_to_later, new)):
            return True
        self._in_order = len(self._walked)
        return False

    def _added(self, end: End, made: Made) -> list[Made]:
        """Return all edges to an end that has several, with another."""
        every = self._several.setdefault(end, [self._edges[end]])
        every.append(made)
        return every

    def has_walked(self, node: Node) -> bool:
        """Tell whether a node was walked.

        The cast of a leaf is, if somebody has seen what came of it: then it is no cast
        of autocast's, and the edge from it to the leaf counts, not those to it.
        """
        return node in self._walked

    def leading_to(self, end: End, since: int, until: int) -> Sequence[Made]:
        """Return the edges to `end` of the nodes that a call made.

        Args:
            end: An input, or a parameter.
            since: The sequence number when the call began.
            until: And when it returned.
        """
        if end in self._several:
            every = self._several[end]
            first = bisect_left(every, since, key=_number_of)
            return every[first : bisect_left(every, until, key=_number_of)]
        only = self._edges.get(end)
        return (only,) if only is not None and since <= only[0] < until else ()

    def computed_from(self, node: Node, since: int, until: int) -> Sequence[Made]:
        """Return what a call made of a tensor that it only laid out anew.

        A weight is transposed before it multiplies. A later pass may go through that
        node too, with what the call has nothing to do with.

        Args:
            node: What did so: a node of a class in `LAID_OUT`.
            since: The sequence number when the call began.
            until: And when it returned.

        Returns:
            Nothing where it did more, or where others used it too.
        """
        if node in self.returned:
            return ()
        end = node, 0
        inside = self.leading_to(end, since, until)
        return inside if len(inside) == len(self._several.get(end, (end,))) else ()


_number_of: Callable[[Made], int] = itemgetter(0)


def _leads_to_later(node: Node) -> bool:
    """Tell whether a node leads to one with a number that is no lower."""
    number = sequence_number(node)
    return any(
        sequence_number(it) >= number
        for it, _ in edges_of(node)
        if type(it) is not AccumulateGrad  # which has no such number
    )


def leads_to_newer(
    nodes: Iterable[Node], since: int, known: Collection[Node] = ()
) -> bool:
    """Tell whether nodes with lower numbers lead to one with a higher number.

    None does that was there before. What a pass with ``create_graph=True`` makes of a
    GPU's tensors does: its numbers are counted by a thread of the device.

    Args:
        nodes: The nodes.
        since: autograd's sequence number when something began.
        known: Where not to go on: what was given, and whatever numbers it has.
    """
    seen, stack = {*known}, [*nodes]
    far = len(seen) + FAR
    while stack and len(seen) < far:
        node = stack.pop()
        if node in seen or type(node) is AccumulateGrad:  # which has no such number
            continue
        if sequence_number(node) >= since:
            return True
        seen.add(node)
        stack += [target for target, _ in edges_of(node)]
    return False


def inner_edges(
    roots: list[Node], since: int, ends: Collection[End]
) -> list[tuple[Node, int, End]]:
    """Return the edges between what a call returns, each with its end.

    Args:
        roots: The nodes of its outputs.
        since: autograd's sequence number when the call began.
        ends: Where the gradients of its outputs go.
    """
    graph = ForwardGraph()
    graph.since, graph.roots = since, roots
    graph.walk()
    return [
        (node, entry, end)
        for end in ends
        for _, node, entry, _ in graph.leading_to(end, since, sys.maxsize)
    ]


def overwriting(base: Tensor, end: Edge) -> list[Node]:
    """Return the nodes through which views of a tensor were overwritten.

    Args:
        base: The tensor, as it is now.
        end: Where its gradient went when it was not overwritten yet.
    """
    found: list[Node] = []
    seen: set[Node] = set()
    stack = [base.grad_fn]
    while stack:
        node = stack.pop()
        if (
            node is None
            or node in seen
            or sequence_number(node) < sequence_number(end[0])
        ):
            continue
        seen.add(node)
        edges = node.next_functions
        if type(node) is CopySlices and edges[0] == end:
            found.append(node)
        stack += [target for target, _ in edges]
    return found


def _leaf_behind(node: Node) -> Tensor | None:
    """Return the leaf that `node` casts, or ``None``."""
    target = node.next_functions[0][0]
    return None if target is None else leaf_of(target)
