"""A call that has begun and not yet returned, and what it was given."""

import sys
from collections import defaultdict
from collections.abc import Sequence
from functools import partial
from types import FrameType
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.autograd.graph import Node

from gradlib.private.modes import unseen
from gradlib.private.modules import is_of_torch
from gradlib.private.nodes import LAID_OUT, dtype_at, sequence_number
from gradlib.recorder.forward_values import Value
from gradlib.recorder.graph import Cast, End, ForwardGraph
from gradlib.recorder.hooked import Hooked, Parameters
from gradlib.recorder.second_order import OfView, Part, Receiver
from gradlib.recording.trace import CallTrace, Flow, Grads

Receivers: TypeAlias = defaultdict[Node, list[Receiver]]
"""Which gradients of which nodes go where."""


class Frame:
    """A call that has begun and not yet returned."""

    # Most calls need few of these, so what they share stands in the class.
    within: int | None = None  # the pass in which a checkpoint computes again
    in_backward = False  # whether one was running when it began
    lazy = False  # whether a parameter was not initialised yet
    gathers = False  # whether gradients are: they are enabled, and asked for
    # What gradients are asked of: its own parameters, and its inputs by place.
    parameters: Parameters | None = None
    has_views = False  # among the inputs
    unasked: Sequence[Value] = ()  # inputs whose gradients nobody keeps
    has_threads = False  # that compute a part of it, or of its graph
    # Nodes that were there before it, though their numbers may not say so.
    older: Sequence[Node] = ()
    roots: Sequence[Node] = ()  # of what it returned
    has_no_values = ""  # why its tensors have none: then it is only counted
    overwritten: Sequence[Value] = ()  # of these, by the call
    hooks_of_others = 0  # how many they had set as it began
    # Whether what it casts is its own: autocast, which keeps casts for later calls, was
    # off when it returned.
    owns_casts = False
    # autograd's sequence numbers: its first, and the first after it.
    since = until = sys.maxsize

    def __init__(
        self,
        call: CallTrace,
        hooked: Hooked,
        python: FrameType | None,
        graph: ForwardGraph,
    ) -> None:
        """Begin a call.

        Args:
            call: What is written down of it.
            hooked: The module called.
            python: The frame in which torch runs the call.
            graph: Of the forward it belongs to.
        """
        self.call = call
        self.hooked = hooked
        self.module = hooked.module
        self.python: FrameType | None = python
        self.graph = graph
        # What an ``except`` around the call is handling.
        self.handled = sys.exception()
        self.flow = Flow()
        self.inputs: dict[int, Value] = {}
        self.idle: dict[int, Tensor] = {}  # inputs that did not require grad

    def stand_alone(self) -> None:
        """Take a graph of its own: all that is made between what it is given and gives.

        What other threads have made of it has numbers that say nothing here.
        """
        graph = ForwardGraph()
        graph.since, graph.is_mixed = 0, self.graph.is_mixed
        graph.roots, graph.returned = [*self.roots], self.graph.returned
        graph.leave_out(it.end for it in (*self.inputs.values(), *self.unasked))
        graph.leave_out((node, 0) for node in (*self.older, *self.graph.left_out))
        self.graph, self.since, self.until = graph, 0, sys.maxsize

    def find_overwritten(self) -> None:
        """Find the views among its inputs that the call has overwritten."""
        self.overwritten = [
            value
            for value in self.inputs.values()
            if value.base is not None and value.overwritten()
        ]

    def find_receivers(self, found: Receivers) -> None:
        """Add which gradients of which nodes flow into inputs and parameters."""
        ends = self._ends()
        graph, since, until = self.graph, self.since, self.until
        made_to, flow = graph.leading_to, self.flow
        of_torch = is_of_torch(type(self.module))
        for end, grads in ends.items():
            every = made_to(end, since, until)
            own_casts: set[Node] = set()
            for made in every:
                _, node, entry, cast = made
                part: Part | None = None
                if cast is not None:
                    if cast[0] in ends or graph.has_walked(cast[0][0]):
                        continue
                    if self.owns_casts:
                        node, entry = cast[0][0], 0
                        if node in own_casts:  # it is summed up in its dtype
                            self.call.summed_in |= {dtype_at(cast[0])}
                        if node in own_casts or not self._made(node):
                            continue
                        own_casts.add(node)
                    else:
                        part = self._pass_over(cast, is_one_of=len(every) > 1)
                # Nobody but torch has the tensor, so nobody has hooked it.
                is_laid_out = of_torch and node.__class__ in LAID_OUT
                if is_laid_out and (inside := graph.computed_from(node, since, until)):
                    part = partial(_laid_out_again, node, part)
                    for _, node, entry, _ in inside:
                        found[node].append((entry, grads, part, flow))
                else:
                    found[node].append((entry, grads, part, flow))
        # With create_graph=True a later pass may go through what they are made by, and
        # then it goes through the call.
        for value in self.unasked:
            for _, node, entry, _ in made_to(value.end, since, until):
                found[node].append((entry, NOWHERE, _nothing_of, flow))
        # The gradients of views that the call has overwritten go to their bases.
        for value in self.overwritten:
            if value.base is not None:
                base, grads = value.base, ends[value.end]
                if base.end not in ends:
                    part = OfView(base.region, value.end)
                    for _, node, entry, _ in made_to(base.end, since, until):
                        found[node].append((entry, grads, part, flow))

    def _made(self, node: Node) -> bool:
        """Tell whether it is the call that made a node."""
        return self.since <= sequence_number(node) < self.until

    def _pass_over(self, cast: Cast, *, is_one_of: bool) -> Part:
        """Return what makes a leaf's gradient of that of its cast, and note it.

        Args:
            cast: Which other calls may use too.
            is_one_of: Whether the call uses several, so that a sum of them is formed.
        """
        end, dtype = cast
        self.call.passes_over_casts = True
        if is_one_of:
            self.call.summed_in |= {dtype_at(end)}
        return partial(_cast_back, dtype)

    def _ends(self) -> dict[End, Grads]:
        """Make room for the gradients of its inputs and own parameters.

        Returns:
            Where each is gathered: one sum for what stands in two places.
        """
        ends: dict[End, Grads] = {}
        shares, totals = self.flow.shares, self.flow.totals
        first = self.call.flows[0]  # of a checkpoint's it has no shares
        known = {} if first is self.flow or first.shares else first.totals
        # A checkpoint makes a tensor for each place of what was one in the forward.
        of_one: dict[int, Grads] = {}
        for place, value in self.inputs.items():
            share: Grads = {}
            if known and (total := known.get(place)) is not None:
                share = of_one.setdefault(id(total), share)
            else:
                totals[place] = value.grads
            shares[place] = ends.setdefault(value.end, share)
        if self.parameters:
            for name, (_, end, total) in self.parameters.items():
                shares[name] = ends.setdefault(end, {})
                totals[name] = total
        for key in self.call.returned:
            if key in totals:
                shares[key] = totals[key]
        return ends


NOWHERE: Grads = {}
"""Where what nobody keeps would go."""


def _nothing_of(_: Tensor) -> None:
    """Leave a gradient alone."""


def _cast_back(dtype: torch.dtype, grad: Tensor) -> Tensor:
    """Return the gradient of a leaf from that of its cast."""
    is_part = grad.is_complex() and not dtype.is_complex
    return (grad.real if is_part else grad).to(dtype)


def _laid_out_again(node: Any, part: Part | None, grad: Tensor) -> Tensor | None:
    """Return the gradient of a tensor, from that of what only laid it out anew."""
    with unseen():
        given = node(grad)  # None where the pass does not go on to the leaf
    return given if part is None or given is None else part(given)
