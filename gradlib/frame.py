"""A call that has begun and not yet returned, and what it was given."""

import sys
from functools import partial
from types import FrameType
from typing import Any

from torch import Tensor, nn
from torch.autograd.graph import Node

from gradlib.forward_values import End, Value
from gradlib.graph import GraphEdge
from gradlib.passes import Part, Receiver
from gradlib.private import ToCopy, Transpose, sequence_number
from gradlib.trace import CallTrace, Flow, Grads, Key


class Frame:
    """A call that has begun and not yet returned."""

    __slots__ = (
        "call",
        "ends",
        "flow",
        "gathers",
        "handled",
        "inputs",
        "lazy",
        "leaves",
        "leaving",
        "module",
        "python",
        "roots",
        "since",
    )

    def __init__(
        self,
        call: CallTrace,
        module: nn.Module,
        python: FrameType | None,
        handled: BaseException | None,
    ) -> None:
        """Begin a call.

        Args:
            call: What is written down of it.
            module: The module called.
            python: The frame in which torch runs the call.
            handled: What an ``except`` around the call is handling.
        """
        self.call = call
        self.module = module
        self.python = python
        self.handled = handled
        self.lazy = False  # whether a parameter was not initialised yet
        # autograd's sequence number when it began; no node is younger than the default
        self.since = sys.maxsize
        self.gathers = False  # whether gradients are: they are enabled, and asked for
        self.flow = Flow()
        self.inputs: list[Value] = []
        # Where the gradients of its inputs and own parameters are gathered.
        self.ends: dict[End, Grads] = {}
        # The ends that this call or one around it waits for, once a call inside asks.
        self.leaves: set[End] | None = None
        # From the calls inside: edges that lead out of this one too, and its own nodes.
        self.leaving: list[GraphEdge] = []
        self.roots: list[Node] = []

    def expect(self, key: Key, end: End) -> None:
        """Gather the gradient that flows from this call into `end`.

        What stands in two places has one sum for both.
        """
        known = self.ends.get(end)
        if known is None:
            known = self.ends[end] = {}
        self.flow.shares[key] = known

    def receivers(self, edges: list[GraphEdge]) -> dict[Node, list[Receiver]]:
        """Tell which gradients of which nodes flow into inputs and parameters."""
        ends = self.ends
        bases = self._bases()
        found: dict[Node, list[Receiver]] = {}
        for node, entry, edge, leaf in edges:
            part: Part | None = None
            grads = ends.get(edge)
            if grads is None and leaf is not None:
                grads = ends.get(id(leaf))
                kind = type(edge[0])
                if kind is Transpose:
                    part = Tensor.t
                elif kind is ToCopy:
                    part = partial(Tensor.to, dtype=leaf.dtype)
            if grads is None and edge in bases:
                grads, part = bases[edge]
            if grads is None:
                continue
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
