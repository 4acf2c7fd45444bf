"""The backward passes that reach calls of a block, numbered in that order."""

import itertools
from collections.abc import Callable
from functools import partial

from gradlib.module_hook import nothing
from gradlib.private.modes import grad_is_enabled
from gradlib.private.passes import (
    gradients_are_batched,
    gradients_have_values,
    when_pass_ends,
)
from gradlib.recorder.attached import Attached
from gradlib.recorder.checkpoints import goes_on_with_pass


class PassNumbers:
    """The backward passes of a block."""

    def __init__(self, attached: Attached, *, has_to_end: bool) -> None:
        """Begin with none seen.

        Args:
            attached: The hooks of the block.
            has_to_end: Whether what a pass gives is complete only when it has ended.
        """
        # torch's number of each pass that reached a call -> ours, in order from 0.
        self.numbers: dict[int, int] = {}
        self.with_graph: set[int] = set()  # our numbers of those with create_graph=True
        # torch's numbers of the passes that are not kept: batched ones, and those in a
        # CUDA graph.
        self.batched: set[int] = set()
        self.captured: set[int] = set()
        # Called when a pass without a number meets a hook; when it first reaches a
        # call; and then with its number. The second tells whether the pass goes through
        # what a call put elsewhere.
        self.when_met: Callable[[], None] = nothing
        self.when_reached: Callable[[], bool | None] = nothing
        self.when_numbered: Callable[[int], None] = nothing
        self.has_to_end = has_to_end
        self._attached = attached
        self._count = itertools.count()  # it gives no two threads the same number
        self._running: set[int] = set()  # torch's numbers of passes that may still run
        self._searched: set[int] = set()  # and of those that had met no call's hook

    def admits(
        self, running: int, within: int | None, *, reaches_call: bool = True
    ) -> bool:
        """Number a pass when it first reaches a call; tell whether it can be kept.

        The tensors of a batched pass are stand-ins: they have no values once
        ``is_grads_batched`` or torch.func has computed. Those of a pass in a CUDA graph
        have none yet, and a copy would be captured too.

        Args:
            running: torch's number of the pass.
            within: torch's number of the pass in which a checkpoint made the tensor or
                node that is reached, if one did.
            reaches_call: Whether that tensor or node belongs to a call.
        """
        self.when_met()
        if not gradients_have_values():
            if reaches_call:
                kind = self.batched if gradients_are_batched() else self.captured
                kind.add(running)
            return False
        if reaches_call or self._goes_through_call(running):
            self._reached(running, within)
        return True

    def _goes_through_call(self, running: int) -> bool:
        """Tell whether a pass that met only an input or a parameter reaches a call."""
        if running in self._searched:
            return False
        self._searched.add(running)
        return bool(self.when_reached())

    def _reached(self, running: int, within: int | None) -> None:
        """Number a pass when it first reaches a call.

        A reentrant checkpoint runs a pass of its own inside `within`, the pass in which
        it recomputes: the two have one number. Any other pass inside that, as one for
        forces, has a number of its own.
        """
        self.when_reached()
        with self._attached.alone() as is_alone:
            if is_alone:
                self._attached.let_go()
        self._attached.be_last()
        if within is None or within == running or not goes_on_with_pass():
            number = self.numbers[running] = next(self._count)
            self.when_numbered(number)
            if self.has_to_end:
                self._running.add(running)
                when_pass_ends(partial(self._running.discard, running))
            if grad_is_enabled():
                self.with_graph.add(number)
        else:
            if within not in self.numbers:
                self._reached(within, None)
            self.numbers[running] = self.numbers[within]

    def going_on(self) -> set[int]:
        """Return our numbers of the passes that have to end and may still run."""
        return {self.numbers[running] for running in self._running.copy()}

    def end(self) -> None:
        """Let go of the callbacks: the block has ended."""
        # Reference cycles would keep everything alive until they are collected.
        self.when_met = self.when_reached = self.when_numbered = nothing
        self._running.clear()  # a pass that raised never says that it ends
