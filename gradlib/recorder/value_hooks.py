"""The hooks of the values that calls are given and return."""

from collections.abc import Callable
from functools import partial
from typing import TypeAlias, cast

import torch
from torch import Tensor

from gradlib.private.modes import unseen
from gradlib.private.passes import backward_pass_id
from gradlib.recorder.forward_values import Base, Value
from gradlib.recorder.frame import Frame
from gradlib.recorder.inner import Inner, inner_edges
from gradlib.recorder.passes import Passes
from gradlib.recorder.second_order import Part, Receiver
from gradlib.recorder.tap import Tap
from gradlib.recorder.views import Region, overwriting, watch
from gradlib.recording.flow import Grads

Views: TypeAlias = list[tuple[Value, Tap, Tap]]
"""Hooked views, each with its hook and that of its base. A view may have several."""


class ValueHooks:
    """Hooks the values that the forwards of a block meet, each once."""

    def __init__(self, passes: Passes) -> None:
        """Begin with none; `passes` are the backward passes of the block."""
        self._passes = passes
        # The hooks of leaves that are no parameters, by the id of the leaf, and above
        # how many the hooks of leaves that are gone are dropped.
        self._leaves: dict[int, Tap] = {}
        self._many_leaves = 16

    def hook(
        self,
        value: Value,
        within: int | None,
        views: Views,
        *,
        is_output: bool,
    ) -> None:
        """Hook the value a tensor has now, whatever overwrites it later.

        Args:
            value: The value.
            within: The pass in which a checkpoint made the tensor, if one did.
            views: The views that the running forward has hooked; it may be added.
            is_output: Whether a call returned it.
        """
        if value.node is None and self._takes_known(value, within, is_output=is_output):
            return
        grads: Grads = {}
        value.grads = grads
        passes = self._passes
        tap = passes.tap(value.tensor, grads, within, is_output=is_output)
        value.tap = tap
        if value.node is None:
            self._remember_leaf(id(value.tensor), tap)
        if value.base is not None:
            part = partial(_if_overwritten, watch(value.tensor), value.base.region)
            of_base = passes.tap(
                value.base.tensor, grads, within, part=part, is_output=is_output
            )
            views.append((value, tap, of_base))

    def _takes_known(self, leaf: Value, within: int | None, *, is_output: bool) -> bool:
        """Use the hook that an earlier forward set on a leaf; tell whether it did."""
        tap = self._leaves.get(id(leaf.tensor))
        if tap is None or tap.within != within or not tap.is_on(leaf.tensor):
            return False
        tap.reaches_call = tap.reaches_call or is_output
        leaf.tap, leaf.grads = tap, tap.grads
        return True

    def _remember_leaf(self, number: int, tap: Tap) -> None:
        self._leaves[number] = tap
        if len(self._leaves) > self._many_leaves:
            self._leaves = {key: it for key, it in self._leaves.items() if it.hooks()}
            self._many_leaves = 2 * len(self._leaves) + 16

    def settle(self, views: Views, handed_on: list[tuple[Frame, Value]]) -> None:
        """Hook the nodes that overwrote views in the forward that ends.

        Until then, and for views overwritten later, the hook of the base has to do,
        which also counts other uses of the base.

        Args:
            views: The views that were hooked.
            handed_on: The views that calls returned, each with its call.
        """
        for value, tap, of_base in views:
            if value.base is not None and value.overwritten():
                base, end, region = value.base
                of_base.remove()
                if not isinstance(end, int):
                    self._passes.hook_overwriting(
                        overwriting(base, end), tap, region.of
                    )
        for frame, value in handed_on:
            if value.overwritten():
                self._hook_handed_on(frame, value)

    def _hook_handed_on(self, frame: Frame, view: Value) -> None:
        """Add to a call's shares what flows past it to the base of its output.

        The call returned a view of an input, or of an input's base, and the view was
        overwritten. A part of what flows to the base is then the view's own gradient.
        """
        base, end, region = cast(Base, view.base)
        receivers: dict[int, Receiver] = {}
        for place, value in frame.inputs.items():
            part: Part | None = None
            if value.end == end:
                part = region.alone
            elif value.base is not None and value.base.end == end:
                part = partial(_seen_through, value.base.region, region)
            if part is not None:
                share = frame.flow.shares[place]
                receivers[id(share)] = 0, share, part, frame.flow
        if receivers and not isinstance(end, int):
            for node in overwriting(base, end):
                self._passes.nodes.hook(node, [*receivers.values()], frame.within)

    def take_off_inner(self, frame: Frame, outputs: dict[int, Value]) -> None:
        """Subtract what a call itself adds to one output's gradient through another.

        Args:
            frame: The call.
            outputs: What it returned, by place.
        """
        ends = {value.end for value in outputs.values()}
        nodes = [end[0] for end in ends if not isinstance(end, int)]
        edges = inner_edges(nodes, frame.since, ends)
        for place, value in outputs.items():
            inner = [(node, entry) for node, entry, end in edges if end == value.end]
            if inner:
                sums = self._passes.sum_inner(inner, frame.flow)
                less = partial(_without, sums)
                grads = frame.flow.outputs[place] = Grads()
                self._passes.tap(
                    value.tensor, grads, frame.within, part=less, is_output=True
                )


def _if_overwritten(
    overwritten: Callable[[], bool], region: Region, grad: Tensor
) -> Tensor | None:
    """Return a view's part of its base's gradient, if the view was overwritten."""
    return region.of(grad) if overwritten() else None


def _seen_through(shown: Region, region: Region, grad: Tensor) -> Tensor:
    """Return what one view of a base shows of the gradient of another view of it."""
    return shown.of(region.alone(grad))


def _without(inner: dict[int, Inner], grad: Tensor) -> Tensor | None:
    """Return a gradient minus what the running pass has added up in `inner`."""
    part, only = inner.get(backward_pass_id(), (None, None))
    if part is None:
        return grad
    with unseen():
        # If nothing else was added, autograd hands on that very tensor, or the sum.
        if grad is only or (only is None and torch.equal(grad, part)):
            return None
        return grad.detach() - part
