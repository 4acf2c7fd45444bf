"""A call that has begun and not yet returned, and what it was given."""

from functools import partial
from types import FrameType
from typing import Any

from torch import Tensor
from torch.autograd.graph import Node

from gradlib.private import ToCopy, next_sequence_number, sequence_number
from gradlib.recorder.forward_values import End, Value
from gradlib.recorder.graph import GraphEdge
from gradlib.recorder.hooked import Hooked
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
        handled: BaseException | None,
        within: int | None,
        outer: "Frame | None",
    ) -> None:
        """Begin a call.

        Args:
            call: What is written down of it.
            hooked: The module called.
            python: The frame in which torch runs the call.
            handled: What an ``except`` around the call is handling.
            within: The backward pass in which a checkpoint computes the call again.
            outer: The call around it.
        """
        self.call = call
        self.hooked = hooked
        self.module = hooked.module
        self.python = python
        self.handled = handled
        self.within = within
        self.outer = outer
        # The nodes walked in this forward.
        self.seen: set[Node] = set() if outer is None else outer.seen
        self.in_backward = False  # whether one was running when it began
        self.lazy = False  # whether a parameter was not initialised yet
        self.since = next_sequence_number()  # autograd's, when it began
        self.gathers = False  # whether gradients are: they are enabled, and asked for
        self.flow = Flow()
        self.inputs: list[Value] = []
        self.has_views = False  # among them
        self.bases: dict[Any, tuple[Grads, Part]] = {}
        # Where the gradients of its inputs and own parameters are gathered: one sum for
        # what stands in two places.
        self.ends: dict[End, Grads] = {}
        # The ends that this call or one around it waits for, once a call inside asks.
        self.leaves: set[End] | None = None
        # From the calls inside: edges that lead out of this one too, and its own nodes.
        self.leaving: list[GraphEdge] = []
        self.roots: list[Node] = []

    def receivers(self, edges: list[GraphEdge]) -> dict[Node, list[Receiver]]:
        """Tell which gradients of which nodes flow into inputs and parameters."""
        ends = self.ends
        bases = self.bases
        found: dict[Node, list[Receiver]] = {}
        for node, entry, edge, leaf in edges:
            part: Part | None = None
            grads = ends.get(edge)
            if grads is None and leaf is not None:
                grads = ends.get(id(leaf))
                if type(edge[0]) is ToCopy:
                    part = partial(Tensor.to, dtype=leaf.dtype)
            if grads is None:
                if edge not in bases:
                    continue
                grads, part = bases[edge]
            if node in found:
                found[node].append((entry, grads, part))
            else:
                found[node] = [(entry, grads, part)]
        return found

    def find_bases(self) -> None:
        """Find where the gradients of views go that the call has overwritten."""
        self.bases = {
            end_of_base: (self.ends[value.end], region.of)
            for value in self.inputs
            if value.base is not None and value.overwritten()
            for _, end_of_base, region in [value.base]
        }


def hand_on(edges: list[GraphEdge], outer: Frame) -> None:
    """Give the edges that lead out of a call to the one around it, where they matter.

    They lead out of that one too, or end in a node of its own.
    """
    if outer.leaves is None:
        outer.leaves = _all_ends(outer)
    for edge in edges:
        _, _, target, leaf = edge
        if leaf is not None:
            if id(leaf) in outer.leaves or target in outer.leaves:
                outer.leaving.append(edge)
        elif sequence_number(target[0]) < outer.since or target in outer.ends:
            outer.leaving.append(edge)
        elif target[0] not in outer.seen:
            outer.roots.append(target[0])


def _all_ends(frame: Frame) -> set[End]:
    """Return the ends that a call waits for, and those around it."""
    found: set[End] = set()
    around: Frame | None = frame
    while around is not None:
        found.update(around.ends)
        around = around.outer
    return found
