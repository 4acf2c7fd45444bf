"""The hooks that gather the gradients of a block's backward passes.

They only keep what they are given, and never change it.
"""

from collections.abc import Iterable
from functools import partial

from torch import Tensor, nn
from torch.autograd.graph import Node

from gradlib.recorder.attached import Attached
from gradlib.recorder.inner import Inner, hook_inner
from gradlib.recorder.node_hooks import NodeHooks
from gradlib.recorder.pass_numbers import PassNumbers
from gradlib.recorder.second_order import Part
from gradlib.recorder.sums import Sums
from gradlib.recorder.tap import Tap
from gradlib.recording.flow import Flow, Grads
from gradlib.values import Keep


class Passes:
    """The backward passes of a block, and the hooks that gather their gradients."""

    def __init__(self, keep: Keep, keep_total: Keep, *, cannot_add: bool) -> None:
        """Begin with no pass seen.

        Args:
            keep: Returns what to keep of a gradient.
            keep_total: The same for the total gradient of an input or output.
            cannot_add: Whether nothing can be added to what is kept. Then a gradient
                that comes in parts is kept when the last part has come.
        """
        self.attached = Attached()
        self.numbered = PassNumbers(self.attached, has_to_end=cannot_add)
        self._sums = Sums(keep, cannot_add=cannot_add)
        self.nodes = NodeHooks(self.numbered, self.attached, self._sums, keep)
        self._keep = keep
        self._keep_total = keep_total
        self._inner: list[dict[int, Inner]] = []

    def tap(
        self,
        tensor: Tensor,
        grads: Grads,
        within: int | None,
        *,
        part: Part | None = None,
        is_output: bool,
    ) -> Tap:
        """Take the gradient of `tensor` as it is now, all its uses together.

        Args:
            tensor: The tensor.
            grads: Where the gradient is gathered.
            within: The pass in which a checkpoint made the tensor, if one did.
            part: Returns the part of the gradient to keep; without it, all is kept.
            is_output: Whether a call returned it, so that a pass through the tensor has
                reached a call.

        Returns:
            The hook.
        """
        return Tap(
            self.numbered,
            self.attached,
            tensor,
            grads,
            self._keep_total,
            within,
            part,
            is_output,
        )

    def hook_parameter(self, parameter: nn.Parameter, grads: Grads) -> Tap:
        """Take the gradient of a parameter, all its uses together.

        It may come in parts, as a reentrant checkpoint runs passes inside the pass.
        `finish` adds them up.

        Returns:
            The hook.
        """
        keep = self._keep
        if self._sums.cannot_add:
            keep = partial(self._sums.begin, grads)
        return Tap(self.numbered, self.attached, parameter, grads, keep)

    def hook_overwriting(self, nodes: Iterable[Node], tap: Tap, part: Part) -> None:
        """Add what flows through nodes that overwrote a view to the view's gradient.

        Args:
            nodes: The nodes. The first gradient that they compute goes to the base.
            tap: The hook of the view, for its uses before it was overwritten.
            part: Returns the view's part of the base's gradient.
        """
        tap.keep = partial(self._sums.added, self._keep_total, tap.grads)

        def take(
            grads_in: tuple[Tensor | None, ...], _grads_out: tuple[Tensor | None, ...]
        ) -> None:
            grad = None if grads_in[0] is None else part(grads_in[0])
            if grad is not None:
                tap.take(grad)

        for node in nodes:
            self.attached.remember(node.register_hook(take))

    def sum_inner(
        self, edges: Iterable[tuple[Node, int]], flow: Flow
    ) -> dict[int, Inner]:
        """Add up the gradients that nodes compute for one tensor.

        Args:
            edges: The nodes, each with the index of the gradient to add.
            flow: That of the call that made the nodes.

        Returns:
            The sum for each pass, by torch's number.
        """
        sums: dict[int, Inner] = {}
        note_batched = partial(self.nodes.note_batched, [flow])
        hook_inner(edges, sums, self.attached, note_batched)
        self._inner.append(sums)
        self.numbered.has_to_end = True
        return sums

    def remove_hooks(self) -> None:
        """Remove every hook, and reduce the sums that are still open."""
        self.attached.remove()
        self.numbered.end()
        self.finish()

    def finish(self) -> None:
        """Reduce the open sums of passes that have ended, as nothing more will come.

        A pass may still run in another thread.
        """
        with self.attached.alone() as is_alone:
            if not is_alone:
                return
            going_on = self.numbered.going_on()
            self._sums.finish(self.numbered.numbers, going_on)
            if not going_on:
                for sums in self._inner:
                    sums.clear()
            self.attached.let_go()
