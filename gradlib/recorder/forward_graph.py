"""The part of the autograd graph that one forward made, and each call in it."""

from bisect import bisect_left
from collections.abc import Callable, Collection, Iterable, Sequence
from itertools import islice
from operator import itemgetter
from typing import Any, TypeAlias

import torch
from torch.autograd.graph import Node

from gradlib.edges import Edge
from gradlib.node_order import leads_to_later, leads_to_newer
from gradlib.private.modes import any_autocast
from gradlib.private.nodes import (
    AccumulateGrad,
    ToCopy,
    next_sequence_number,
    sequence_number,
)
from gradlib.private.passes import has_accelerator, is_passed_elsewhere
from gradlib.recorder.ends import End, leaf_behind
from gradlib.recorder.forward import Forward

Cast: TypeAlias = tuple[Edge, torch.dtype]
"""An edge into the cast of a leaf, and the dtype of the leaf."""

Made: TypeAlias = tuple[int, Node, int, Cast | None]
"""An edge that a forward made: the sequence number of its node, the node, its index in
``next_functions`` and, where it is listed under a leaf that is cast, the cast."""


class ForwardGraph:
    """The edges of the autograd graph that one forward makes, by where they lead."""

    # Whether a backward pass inside the forward has made nodes in another thread, whose
    # sequence numbers do not tell when they were made.
    is_mixed = False

    def __init__(self) -> None:
        """Begin with nothing made."""
        # A node with a lower sequence number is older than the forward.
        self.since = next_sequence_number()
        self.forward = Forward(self.since)
        # Only under autocast may a cast be older: it comes from autocast's cache.
        self.autocasts = any_autocast()
        self.roots: list[Node] = []  # where the next walk begins
        self.returned: set[Node] = set()  # of what calls returned: others may use it
        self._walked: dict[Node, None] = {}  # in order
        self._in_order = 0  # how many of these lead to no node that is newer
        self.left_out: set[Node] = set()  # nodes older than the forward
        self._latest = 0  # the highest sequence number met
        self._older: list[Node] = []  # nodes met that have lower numbers than `since`
        # Most ends have a single edge. Where there are several, `_several` has all.
        self._edges: dict[End, Made] = {}
        self._several: dict[End, list[Made]] = {}

    def leave_out(self, ends: Iterable[End]) -> None:
        """Never walk past `ends`, which come from outside, whatever their numbers."""
        nodes = [end[0] for end in ends if not isinstance(end, int)]
        self._walked.update(dict.fromkeys(nodes))
        self.left_out.update(nodes)

    def walk(self) -> None:
        """Walk the nodes that were made since the last walk."""
        edges, walked, since = self._edges, self._walked, self.since
        numbers = self.forward.numbers
        grown: dict[End, list[Made]] = {}
        stack = self.roots  # another thread may add to it
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
            numbers.add(number)
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
                    and (leaf := leaf_behind(target)) is not None
                ):
                    # Autocast shares the cast between calls: it belongs to none.
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
        """Tell whether another thread may have numbered some of the nodes."""
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
        """Tell whether a backward pass in another thread made some of the nodes.

        Args:
            given: Nodes older than the forward.
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
        """Tell whether a node leads to a later one, as none does within one thread.

        The highest number does not tell: two threads may have counted about as far.
        """
        new = islice(reversed(self._walked), len(self._walked) - self._in_order)
        if any(map(leads_to_later, new)):
            return True
        self._in_order = len(self._walked)
        return False

    def _added(self, end: End, made: Made) -> list[Made]:
        """Add an edge to an end that has one already, and return all of its edges."""
        every = self._several.setdefault(end, [self._edges[end]])
        every.append(made)
        return every

    def has_walked(self, node: Node) -> bool:
        """Tell whether a node was walked.

        The cast of a leaf is walked where a call returned or kept its result: then it
        is not autocast's, and the edge from it to the leaf counts, not those to it.
        """
        return node in self._walked

    def leading_to(self, end: End, since: int, until: int) -> Sequence[Made]:
        """Return the edges to `end` of the nodes that a call made.

        Args:
            end: Where the gradient of an input or a parameter goes.
            since: The sequence number when the call began.
            until: The sequence number when it returned.
        """
        only = self._edges.get(end)
        if only is None:
            return ()
        if end in self._several:
            every = self._several[end]
            first = bisect_left(every, since, key=_number_of)
            return every[first : bisect_left(every, until, key=_number_of)]
        return (only,) if since <= only[0] < until else ()

    def computed_from(self, node: Node, since: int, until: int) -> Sequence[Made]:
        """Return the edges that a call made to a node that only changes a layout.

        A weight, for instance, is transposed before it multiplies. A later pass may go
        through the node too, with gradients that do not concern the call.

        Args:
            node: The node, of a class in `LAID_OUT`.
            since: The sequence number when the call began.
            until: The sequence number when it returned.

        Returns:
            Nothing where a call returned the result, or others used it too.
        """
        if node in self.returned:
            return ()
        end = node, 0
        inside = self.leading_to(end, since, until)
        return inside if len(inside) == len(self._several.get(end, (end,))) else ()


_number_of: Callable[[Made], int] = itemgetter(0)
