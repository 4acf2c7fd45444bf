"""Which backward passes reach the calls of a block, numbered as they do."""

import itertools
from collections.abc import Callable
from functools import partial

from gradlib.module_hook import nothing
from gradlib.private.modes import grad_is_enabled
from gradlib.private.passes import gradients_are_batched, when_pass_ends
from gradlib.recorder.attached import Attached
from gradlib.recorder.checkpoints import goes_on_with_pass


class Numbered:
    """The backward passes of a block."""

    def __init__(self, attached: Attached, *, has_to_end: bool) -> None:
        """Begin with none seen.

        Args:
            attached: The hooks of the block.
            has_to_end: Whether what a pass gives is complete only as it ends.
        """
        # torch's number of each pass that reached a call -> ours, from 0 as they began.
        self.numbers: dict[int, int] = {}
        self.with_graph: set[int] = set()  # our numbers of those with create_graph=True
        self.batched: set[int] = set()  # torch's numbers of those that are not kept
        # Called as a pass meets a hook that does not know it yet, as it first reaches a
        # call, and then with its number.
        self.when_met: Callable[[], None] = nothing
        self.when_reached: Callable[[], None] = nothing
        self.when_numbered: Callable[[int], None] = nothing
        self.has_to_end = has_to_end
        self._attached = attached
        self._count = itertools.count()  # which gives no two threads the same
        self._running: set[int] = set()  # torch's numbers of those that may go on

    def admits(
        self, running: int, within: int | None, *, reaches_call: bool = True
    ) -> bool:
        """Number a pass when it first reaches a call; tell whether it can be kept.

        The tensors of a batched pass stand for others while ``is_grads_batched`` or
        torch.func computes, and are nothing after it.

        Args:
            running: torch's number of the pass.
            within: That of the pass in which a checkpoint made what it has reached.
            reaches_call: Whether that is of a call.
        """
        self.when_met()
        if gradients_are_batched():
            if reaches_call:
                self.batched.add(running)
            return False
        if reaches_call:
            self._reached(running, within)
        return True

    def _reached(self, running: int, within: int | None) -> None:
        """Number a pass when it first reaches a call.

        A checkpoint of the reentrant kind runs a pass of its own inside the pass that
        recomputes, which `within` names: the two are one. Any other inside of it, as
        one for forces, is one of its own.
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
        """Return our numbers of the passes that have to end, and may not have ended."""
        return {self.numbers[running] for running in self._running.copy()}

    def end(self) -> None:
        """Tell nobody anything more: the block has ended."""
        # Circles would keep all until they are collected.
        self.when_met = self.when_reached = self.when_numbered = nothing
        self._running.clear()  # of one that raised nobody hears
