"""What a call is given and what it returns: kept, and its tensors hooked."""

from contextlib import AbstractContextManager
from textwrap import shorten
from typing import Any

from torch import Tensor

from gradlib.opaque import NotSaved, is_module, is_tensor, keep_opaque
from gradlib.recorder.forward_values import Value
from gradlib.recorder.frame import Frame
from gradlib.recorder.gathering import Gathering
from gradlib.recorder.threads import Running
from gradlib.recording.trace import Block, CallTrace
from gradlib.subclasses import is_of_other_class
from gradlib.tree import Tree, flatten


class ArgumentsAndOutputs:
    """Takes the arguments and outputs of the calls of a block."""

    def __init__(
        self,
        block: Block,
        gathering: Gathering,
        looking: AbstractContextManager[object],
    ) -> None:
        """Begin with no call.

        Args:
            block: What all calls have in common.
            gathering: Hooks what gradients will flow through.
            looking: Held while the state of a call is looked at.
        """
        self._block = block
        self._gathering = gathering
        self._looking = looking
        self._keeps_inputs = "args" in block.fields
        self._gathers_inputs = "grad_input" in block.fields

    def take_inputs(self, now: Running, frame: Frame, leaves: list[Any]) -> None:
        """Replace the call's inputs by what is kept of them, and hook the tensors."""
        call, outermost = frame.call, not now.stack
        closed: tuple[int, ...] = ()
        gathers = frame.gathers and self._gathers_inputs
        # A checkpoint gives the call other tensors when it computes it again.
        listens = self._gathers_inputs and call.checkpoints and not frame.in_backward
        for place, leaf in enumerate(leaves):
            if not is_tensor(leaf):
                leaves[place] = keep_opaque(leaf)
                if type(leaves[place]) is NotSaved:
                    closed = *closed, place
                    self._keep_module(call, place, leaf)
                continue
            try:
                value = now.values.of(leaf, outermost, self._keeps_inputs)
            except Exception as error:
                leaves[place] = _refused(leaf, error)
                closed = *closed, place
                continue
            leaves[place] = value.kept if self._keeps_inputs else None
            if not leaf.requires_grad:
                frame.idle[place] = leaf
            elif gathers:
                frame.inputs[place] = value
                if value.base is not None:
                    frame.has_views = True
                self._gathering.hook(now, frame, value)  # for the total
            elif frame.gathers:
                frame.unasked = [*frame.unasked, value]
            elif listens and (value.node is not None or value.base is None):
                # Else it is a view made without gradients: it has no graph, though
                # torch says that it requires grad.
                self._gathering.hook(now, frame, value)
                frame.flow.totals[place] = value.grads
                call.flows = [frame.flow]
        if closed:
            call.closed_inputs = closed

    def _keep_module(self, call: CallTrace, place: int, leaf: Any) -> None:
        """Keep a module of the model that is an argument, for a replay to pass on."""
        history, known = self._block.history, call.given_modules
        if history is None or place in known or not is_module(leaf):
            return  # as for a weak proxy of one, which has no hash
        with self._looking:
            if history.meet_given(leaf, call.moment):
                call.given_modules = {**known, place: leaf}

    def take_wakened(self, now: Running, frame: Frame) -> None:
        """Hook the inputs that the call itself made require grad, as for forces."""
        call = frame.call
        for place, leaf in frame.idle.items() if self._gathers_inputs else ():
            if leaf.requires_grad and leaf.is_leaf:
                value = frame.inputs[place] = now.values.of(leaf, keeps=False)
                self._gathering.hook(now, frame, value)
                call.idle = [key for key in call.idle if key != place]

    def take_outputs(
        self,
        now: Running,
        frame: Frame,
        output: object,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> None:
        """Keep what the call returns, and hook what gradients will flow through."""
        call = frame.call
        asked: dict[int, Value] = {}
        idle: tuple[int, ...] = ()
        closed: dict[int, object] = {}
        leaves, spec = flatten(output)
        for place, leaf in enumerate(leaves):
            if not is_tensor(leaf):
                leaves[place] = keep_opaque(leaf)
                if type(leaves[place]) is NotSaved:
                    closed[place] = leaf
                continue
            try:
                value = now.values.of(leaf)
            except Exception as error:
                leaves[place] = _refused(leaf, error)
                closed[place] = leaf
                continue
            leaves[place] = value.kept
            if leaf.requires_grad:
                asked[place] = value
            else:
                idle = *idle, place
        if call.output is None:  # else a checkpoint computes the call again
            call.output = Tree(leaves, spec)
        if closed:
            call.closed_outputs = tuple(closed)
        if frame.gathers:
            given = *args, *kwargs.values()
            self._gathering.gather(now, frame, given, asked, idle, closed)


def _refused(leaf: Tensor, error: Exception) -> NotSaved:
    """Return what stands for a tensor of another class that could not be kept.

    For a plain tensor the exception comes from the user's ``reduce``, or from us, and
    is raised again.
    """
    if not is_of_other_class(leaf):
        raise
    name = type(leaf).__name__
    if not hasattr(error, "is_of_reduce"):
        return NotSaved(name)
    said = shorten(f"{type(error).__name__}: {error}", 120, placeholder=" ...")
    return NotSaved(f"{name} (reduce raised {said.removesuffix(':')})")
