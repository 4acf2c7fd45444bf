"""A call that has begun and not yet returned, with its inputs and its module."""

import sys
from collections import defaultdict
from collections.abc import Collection, Sequence
from functools import partial
from types import FrameType
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node

from gradlib.module_hook import nothing
from gradlib.private.modes import unseen
from gradlib.private.modules import is_of_torch
from gradlib.private.nodes import LAID_OUT, dtype_at, sequence_number
from gradlib.recorder.ends import End
from gradlib.recorder.forward_graph import Cast, ForwardGraph, Made
from gradlib.recorder.forward_values import Value
from gradlib.recorder.hooked import Hooked, Parameters
from gradlib.recorder.second_order import OfView, Part, Receiver
from gradlib.recording.flow import Flow, Grads
from gradlib.recording.trace import CallTrace

Receivers: TypeAlias = defaultdict[Node, list[Receiver]]
"""For each node, what receives the gradients that it computes."""


class Frame:
    """A call that has begun and not yet returned."""

    # Most calls change few of these, so their defaults are attributes of the class.
    within: int | None = None  # torch's number of the pass that recomputes the call
    in_backward = False  # whether a backward pass was running when it began
    lazy = False  # whether a parameter was uninitialized
    gathers = False  # whether to gather gradients: they are enabled, and asked for
    # The parameters of its module whose gradients are gathered.
    parameters: Parameters | None = None
    has_views = False  # whether some of `inputs` are views
    unasked: Sequence[Value] = ()  # inputs whose gradients are not kept
    has_threads = False  # whether other threads compute a part of it, or of its graph
    # Nodes older than the call, though their sequence numbers may not show it.
    older: Sequence[Node] = ()
    roots: Sequence[Node] = ()  # the nodes of tensors that it returned or left behind
    has_no_values = ""  # why its tensors have no values: then it is only counted
    overwritten: Sequence[Value] = ()  # the views among `inputs` that it overwrote
    hooks_of_others = 0  # how many hooks had been set, other than ours, when it began
    # Whether the casts that it makes are its own: autocast, which caches casts for
    # later calls, was off when it returned.
    owns_casts = False
    # autograd's sequence numbers: its first, and the first after it.
    since = until = sys.maxsize

    def __init__(
        self,
        call: CallTrace,
        hooked: Hooked,
        module: nn.Module,
        python: FrameType | None,
        graph: ForwardGraph,
    ) -> None:
        """Begin a call.

        Args:
            call: The trace of the call.
            hooked: The recorded module.
            module: The module called: that one, or a copy, as nn.DataParallel makes.
            python: The Python frame in which torch runs the call.
            graph: The graph of the forward that the call belongs to.
        """
        self.call = call
        self.hooked = hooked
        self.module = module
        self.python: FrameType | None = python
        self.graph = graph
        # The exception that an ``except`` around the call is handling.
        self.handled = sys.exception()
        self.flow = Flow()
        self.inputs: dict[int, Value] = {}  # by place: those with gathered gradients
        self.idle: dict[int, Tensor] = {}  # inputs that did not require grad

    def stand_alone(self) -> None:
        """Give the call a graph of its own: all nodes between its inputs and outputs.

        The sequence numbers of nodes that other threads have made say nothing here.
        """
        graph = ForwardGraph()
        graph.since, graph.is_mixed = 0, self.graph.is_mixed
        graph.roots, graph.returned = [*self.roots], self.graph.returned
        graph.leave_out(it.end for it in (*self.inputs.values(), *self.unasked))
        graph.leave_out((node, 0) for node in (*self.older, *self.graph.left_out))
        self.graph, self.since, self.until = graph, 0, sys.maxsize

    def find_overwritten(self) -> None:
        """Find the views among the inputs that the call has overwritten."""
        self.overwritten = [
            value
            for value in self.inputs.values()
            if value.base is not None and value.overwritten()
        ]

    def find_receivers(self, found: Receivers) -> dict[End, Grads]:
        """Add the receivers of the gradients that flow into inputs and parameters.

        Returns:
            Where each of these gradients is gathered.
        """
        ends = self._ends()
        graph, since, until = self.graph, self.since, self.until
        made_to, flow = graph.leading_to, self.flow
        of_torch = is_of_torch(type(self.module))
        odd: list[tuple[Made, Grads, bool]] = []
        for end, grads in ends.items():
            every = made_to(end, since, until)
            for made in every:
                _, node, entry, cast = made
                if cast is None and not (of_torch and node.__class__ in LAID_OUT):
                    found[node].append((entry, grads, None, flow))
                else:
                    odd.append((made, grads, len(every) > 1))
        if odd:
            self._find_odd_receivers(found, odd, ends)
        # After create_graph=True a later pass may go through the nodes that compute
        # these gradients, and so through the call.
        for value in self.unasked:
            for _, node, entry, _ in made_to(value.end, since, until):
                found[node].append((entry, NOWHERE, nothing, flow))
        # The gradients of views that the call has overwritten go to their bases.
        for value in self.overwritten:
            if value.base is not None:
                base, grads = value.base, ends[value.end]
                if base.end not in ends:
                    part = OfView(base.region, value.end)
                    for _, node, entry, _ in made_to(base.end, since, until):
                        found[node].append((entry, grads, part, flow))
        return ends

    def _find_odd_receivers(
        self,
        found: Receivers,
        odd: Sequence[tuple[Made, Grads, bool]],
        ends: Collection[End],
    ) -> None:
        """Add the receivers of what flows through casts and layouts of parameters.

        Args:
            found: The receivers, to which these are added.
            odd: The edges to a parameter that is cast, and those of nodes that lay out
                a tensor anew; each with where the gradient is gathered, and whether the
                call made several edges to the same end.
            ends: Where the gradients of inputs and parameters go.
        """
        graph, since, until, flow = self.graph, self.since, self.until, self.flow
        of_torch = is_of_torch(type(self.module))
        own_casts: set[Node] = set()
        for (_, node, entry, cast), grads, is_one_of in odd:
            part: Part | None = None
            if cast is not None:
                if cast[0] in ends or graph.has_walked(cast[0][0]):
                    continue
                if self.owns_casts:
                    node, entry = cast[0][0], 0
                    if node in own_casts:  # used twice: summed in the cast's dtype
                        self.call.summed_in |= {dtype_at(cast[0])}
                    if node in own_casts or not self._made(node):
                        continue
                    own_casts.add(node)
                else:
                    part = self._pass_over(cast, is_one_of=is_one_of)
            # Only torch holds this tensor, so no user has hooked it.
            is_laid_out = of_torch and node.__class__ in LAID_OUT
            if is_laid_out and (inside := graph.computed_from(node, since, until)):
                part = partial(_laid_out_again, node, part)
                for _, node, entry, _ in inside:
                    found[node].append((entry, grads, part, flow))
            else:
                found[node].append((entry, grads, part, flow))

    def _made(self, node: Node) -> bool:
        """Tell whether the call made a node."""
        return self.since <= sequence_number(node) < self.until

    def _pass_over(self, cast: Cast, *, is_one_of: bool) -> Part:
        """Return the function from a cast's gradient to its leaf's, and note its use.

        Args:
            cast: The cast, which other calls may use too.
            is_one_of: Whether the call uses it several times, so that autograd sums.
        """
        end, dtype = cast
        self.call.passes_over_casts = True
        if is_one_of:
            self.call.summed_in |= {dtype_at(end)}
        return partial(_cast_back, dtype)

    def _ends(self) -> dict[End, Grads]:
        """Make room for the gradients of the inputs and of the module's own parameters.

        Returns:
            Where each gradient is gathered: a tensor in two places has one sum.
        """
        ends: dict[End, Grads] = {}
        shares, totals = self.flow.shares, self.flow.totals
        first = self.call.flows[0]  # without shares, if a checkpoint computed it
        known = {} if first is self.flow or first.shares else first.totals
        # Of a tensor that stood in several places, a checkpoint makes one for each.
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
"""Stands where a gradient is not kept: nothing is ever put in it."""


def _cast_back(dtype: torch.dtype, grad: Tensor) -> Tensor:
    """Return the gradient of a leaf from that of its cast."""
    is_part = grad.is_complex() and not dtype.is_complex
    return (grad.real if is_part else grad).to(dtype)


def _laid_out_again(node: Any, part: Part | None, grad: Tensor) -> Tensor | None:
    """Return a tensor's gradient from that of its other layout, which `node` made."""
    with unseen():
        given = node(grad)  # None where the pass does not go on to the leaf
    return given if part is None or given is None else part(given)
