"""A call that has begun and not yet returned, and what it was given."""

import sys
from functools import partial
from types import FrameType
from typing import cast

from torch import Tensor
from torch.autograd.graph import Node

from gradlib.private import ToCopy, next_sequence_number, sequence_number
from gradlib.recorder.forward_values import End, Value
from gradlib.recorder.graph import GraphEdge
from gradlib.recorder.hooked import Hooked, Parameters
from gradlib.recorder.passes import Part, Receiver
from gradlib.recording.trace import CallTrace, Flow, Grads


class Frame:
    """A call that has begun and not yet returned."""

    __slots__ = (
        "bases",
        "call",
        "ends",
        "flow",
        "gathers",
        "handled",
        "has_views",
        "hooked",
        "in_backward",
        "inputs",
        "lazy",
        "leaves",
        "leaving",
        "module",
        "outer",
        "overwritten",
        "parameters",
        "python",
        "roots",
        "seen",
        "since",
        "within",
    )

    def __init__(
        self,
        call: CallTrace,
        hooked: Hooked,
        python: FrameType | None,
        outer: "Frame | None",
    ) -> None:
        """Begin a call.

        Args:
            call: What is written down of it.
            hooked: The module called.
            python: The frame in which torch runs the call.
            outer: The call around it.
        """
        self.call = call
        self.hooked = hooked
        self.module = hooked.module
        self.python = python
        self.outer = outer
        # What an ``except`` around the call is handling.
        self.handled = sys.exception()
        self.since = next_sequence_number()  # autograd's, when it began
        self.within: int | None = None  # the pass in which a checkpoint computes again
        self.in_backward = False  # whether one was running when it began
        self.lazy = False  # whether a parameter was not initialised yet
        self.gathers = False  # whether gradients are: they are enabled, and asked for
        self.flow = Flow()
        # What gradients are asked of: its own parameters, and its inputs by place.
        self.parameters: Parameters | None = None
        self.inputs: dict[int, Value] = {}
        self.has_views = False  # among them
        self.overwritten: list[Value] | None = None  # of these, by the call
        # Where the gradients of both are gathered: one sum for what stands in two
        # places.
        self.ends: dict[End, Grads] = {}
        self.bases: dict[End, tuple[Grads, Part]] | None = None  # of those overwritten
        # The nodes walked in this forward.
        self.seen: set[Node] = set() if outer is None else outer.seen
        self.roots: list[Node] = []  # where to begin to walk
        # Once a call inside asks: the ends that this call or one around it waits for,
        # and the edges from the calls inside that lead out of this one too.
        self.leaves: set[End] | None = None
        self.leaving: list[GraphEdge] | None = None

    def gather(self) -> None:
        """Make room for the gradients of its inputs and own parameters."""
        ends, shares, totals = self.ends, self.flow.shares, self.flow.totals
        for place, value in self.inputs.items():
            shares[place] = ends.setdefault(value.end, {})
            totals[place] = cast(Grads, value.grads)
        for place in self.call.returned_inputs:
            if place in totals:
                shares[place] = totals[place]
        if self.parameters is not None:
            for name, (_, end, total) in self.parameters.items():
                shares[name] = ends.setdefault(end, {})
                totals[name] = total
        # The gradients of views that the call has overwritten go to their bases.
        if self.overwritten is not None:
            self.bases = {
                end_of_base: (ends[value.end], region.of)
                for value in self.overwritten
                if value.base is not None
                for _, end_of_base, region in [value.base]
            }

    def find_overwritten(self) -> None:
        """Find the views among its inputs that the call has overwritten."""
        self.overwritten = [
            value
            for value in self.inputs.values()
            if value.base is not None and value.overwritten()
        ]

    def receivers(self, edges: list[GraphEdge]) -> dict[Node, list[Receiver]]:
        """Tell which gradients of which nodes flow into inputs and parameters."""
        ends, bases = self.ends, self.bases
        found: dict[Node, list[Receiver]] = {}
        for node, entry, edge, leaf in edges:
            part: Part | None = None
            grads = ends.get(edge)
            if grads is None and leaf is not None:
                grads = ends.get(id(leaf))
                if edge[0].__class__ is ToCopy:
                    part = partial(Tensor.to, dtype=leaf.dtype)
            if grads is None:
                if bases is None or edge not in bases:
                    continue
                grads, part = bases[edge]
            if node in found:
                found[node].append((entry, grads, part))
            else:
                found[node] = [(entry, grads, part)]
        return found


def hand_on(edges: list[GraphEdge], outer: Frame) -> None:
    """Give the edges that lead out of a call to the one around it, where they matter.

    They lead out of that one too, or end in a node of its own.
    """
    if outer.leaves is None or outer.leaving is None:
        outer.leaves, outer.leaving = _all_ends(outer), []
    since, leaves = outer.since, outer.leaves
    for edge in edges:
        _, _, target, leaf = edge
        if leaf is not None:
            if id(leaf) in leaves or target in leaves:
                outer.leaving.append(edge)
        elif sequence_number(target[0]) < since or target in outer.ends:
            outer.leaving.append(edge)
        elif target[0] not in outer.seen:
            outer.roots.append(target[0])


def _all_ends(frame: Frame) -> set[End]:
    """Return the ends that a call waits for, and those around it."""
    found: set[End] = set()
    around: Frame | None = frame
    while around is not None:
        if not around.ends:
            around.gather()
        found.update(around.ends)
        around = around.outer
    return found
