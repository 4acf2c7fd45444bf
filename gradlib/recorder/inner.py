"""The gradient that a call itself adds to one output, by making another one of it."""

import sys
from collections.abc import Callable, Collection, Iterable
from typing import Any, TypeAlias

from torch import Tensor
from torch.autograd.graph import Node

from gradlib.private.modes import grad_is_enabled, unseen
from gradlib.private.passes import (
    backward_pass_id,
    current_node,
    gradients_have_values,
)
from gradlib.recorder.attached import Attached, kept_from_compile
from gradlib.recorder.ends import End
from gradlib.recorder.forward_graph import ForwardGraph
from gradlib.recorder.second_order import made_to
from gradlib.values import keep

Inner: TypeAlias = tuple[Tensor, Tensor | None]
"""The sum of such gradients, and the tensor that came, if it was a single one."""


def inner_edges(
    roots: list[Node], since: int, ends: Collection[End]
) -> list[tuple[Node, int, End]]:
    """Return the edges inside a call that lead to one of its outputs, with that end.

    Args:
        roots: The nodes of the call's outputs.
        since: autograd's sequence number when the call began.
        ends: Where the gradients of the outputs go.
    """
    graph = ForwardGraph()
    graph.since, graph.roots = since, roots
    graph.walk()
    return [
        (node, entry, end)
        for end in ends
        for _, node, entry, _ in graph.leading_to(end, since, sys.maxsize)
    ]


class InnerHook:
    """The hook of a node by which a call makes one output of another."""

    __slots__ = ("attached", "entry", "note_batched", "sums")

    def __init__(
        self,
        attached: Attached,
        entry: int,
        sums: dict[int, Inner],
        note_batched: Callable[[], None],
    ) -> None:
        """Say which of the node's gradients is added to which sums.

        Args:
            attached: The hooks of the block.
            entry: The index of the gradient among those that the node computes.
            sums: The sums, by torch's number of the pass.
            note_batched: Called in a pass with is_grads_batched, which is not kept.
        """
        self.attached = attached
        self.note_batched = note_batched
        self.sums = sums
        self.entry = entry

    @kept_from_compile
    def __call__(
        self,
        grads_in: tuple[Tensor | None, ...],
        grads_out: tuple[Tensor | None, ...],
    ) -> None:
        """Add the gradient, and hook the nodes that ``create_graph=True`` makes."""
        if not gradients_have_values():
            self.note_batched()
            return
        grad, running = grads_in[self.entry], backward_pass_id()
        if grad is not None:
            known = self.sums.get(running)
            with unseen():
                both = (known[0] + grad, None) if known else (keep(grad), grad)
            self.sums[running] = both
        node = current_node() if grad_is_enabled() else None
        if node is not None:
            made = made_to(node, self.entry, grads_in, grads_out)
            hook_inner(made, self.sums, self.attached, self.note_batched)

    def is_like(self, other: "InnerHook") -> bool:
        """Tell whether another hook adds the same gradient to the same sums."""
        return other.sums is self.sums and other.entry == self.entry


def hook_inner(
    edges: Iterable[tuple[Node, int]],
    sums: dict[int, Inner],
    attached: Attached,
    note_batched: Callable[[], None],
) -> None:
    """Hook nodes to add up what they compute, unless that is done already.

    Args:
        edges: The nodes, each with the index of the gradient to add.
        sums: The sum for each pass, by torch's number.
        attached: The hooks of the block.
        note_batched: Called in a pass with is_grads_batched, which is not kept.
    """
    for node, entry in edges:
        hook = InnerHook(attached, entry, sums, note_batched)
        handle: Any = node.register_hook(hook)
        known = [*handle.hooks_dict_ref().values()][:-1]
        attached.remember(handle)
        if any(isinstance(it, InnerHook) and it.is_like(hook) for it in known):
            handle.remove()
