"""A call that has begun and not yet returned, and what it was given."""

from functools import partial
from types import FrameType
from typing import Any

from torch import Tensor, nn
from torch.autograd.graph import Node

from gradlib.private import ToCopy, sequence_number
from gradlib.recorder.forward_values import End, Value
from gradlib.recorder.graph import GraphEdge
from gradlib.recorder.passes import Part, Receiver
from gradlib.recording.trace import CallTrace, Flow, Grads


class Frame:
    """A call that has begun and not yet returned."""

    __slots__ = (
        "call",
        "ends",
        "flow",
        "gathers",
        "handled",
        "has_views",
        "inputs",
        "lazy",
        "leaves",
        "leaving",
        "module",
        "python",
        "roots",
        "since",
        "within",
    )

    def __init__(
        self,
        call: CallTrace,
        module: nn.Module,
        python: FrameType | None,
        handled: BaseException | None,
        within: int | None,
    ) -> None:
        """Begin a call.

        Args:
            call: What is written down of it.
            module: The module called.
            python: The frame in which torch runs the call.
            handled: What an ``except`` around the call is handling.
            within: The backward pass in which a checkpoint computes the call again.
        """
        self.call = call
        self.module = module
        self.python = python
        self.handled = handled
        self.within = within
        self.lazy = False  # whether a parameter was not initialised yet
        self.since = 0  # autograd's sequence number when it began
        self.gathers = False  # whether gradients are: they are enabled, and asked for
        self.flow = Flow()
        self.inputs: list[Value] = []
        self.has_views = False  # among them
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
        bases = self._bases() if self.has_views else {}
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

    def _bases(self) -> dict[Any, tuple[Grads, Part]]:
        """Tell where the gradients of views go that the call has overwritten."""
        return {
            end_of_base: (self.ends[value.end], region.of)
            for value in self.inputs
            if value.base is not None and value.overwritten()
            for _, end_of_base, region in [value.base]
        }


def hand_on(edges: list[GraphEdge], stack: list[Frame], seen: set[Node]) -> None:
    """Give the edges that lead out of a call to the one around it, where they matter.

    They lead out of that one too, or end in a node of its own.
    """
    outer = stack[-1]
    if outer.leaves is None:
        outer.leaves = {end for frame in stack for end in frame.ends}
    for edge in edges:
        _, _, target, leaf = edge
        if leaf is not None:
            if id(leaf) in outer.leaves or target in outer.leaves:
                outer.leaving.append(edge)
        elif sequence_number(target[0]) < outer.since or target in outer.ends:
            outer.leaving.append(edge)
        elif target[0] not in seen:
            outer.roots.append(target[0])
