"""What happens at every call of a recorded module: before it, and after it.

A call's arguments and result are left as they are, so the model computes what it would
compute without recording.
"""

import itertools
import sys
import threading
from collections.abc import Callable, Sequence
from functools import partial
from types import FrameType
from typing import Any, Final

from optree import PyTreeSpec
from torch import nn

from gradlib.module_hook import nothing
from gradlib.private.hooks import forward_hooks, forward_pre_hooks, put_after_others
from gradlib.private.modes import (
    any_autocast,
    call_past_classes,
    call_unseen,
    function_modes,
    grad_is_enabled,
    graph_is_captured,
    values_are_fake,
    values_are_stand_ins,
)
from gradlib.private.modules import is_replica, parameters_at_call
from gradlib.private.nodes import next_sequence_number
from gradlib.private.passes import backward_pass_id, running_frame
from gradlib.recorder.arguments_and_outputs import ArgumentsAndOutputs
from gradlib.recorder.attached import kept_from_compile
from gradlib.recorder.broken_off import drop_broken_off, note_no_end
from gradlib.recorder.checkpoints import (
    Checkpoints,
    around_forward,
    checkpoint_around,
    is_reentrant,
)
from gradlib.recorder.forward_graph import ForwardGraph
from gradlib.recorder.frame import Frame
from gradlib.recorder.gathering import Gathering
from gradlib.recorder.hooked import Hooked
from gradlib.recorder.parameter_hooks import ParameterHooks
from gradlib.recorder.pass_moments import note_when
from gradlib.recorder.passes import Passes
from gradlib.recorder.threads import Running, Threads, nodes_in
from gradlib.recording import notes
from gradlib.recording.past_attributes import held_among
from gradlib.recording.trace import GRADIENTS, NO_INPUTS, Block, CallTrace
from gradlib.recording.world import NO_AUTOCAST, autocast_now
from gradlib.tree import Tree, flatten_call
from gradlib.values import Keep

_NOT_GIVEN: Final = object()


class ModuleCalls:
    """Writes down the calls of a block as they begin and return."""

    def __init__(
        self, block: Block, passes: Passes, keep: Keep, *, refuses: bool
    ) -> None:
        """Begin with no call.

        Args:
            block: What all calls have in common.
            passes: The backward passes of the block.
            keep: Returns what to keep of arguments and outputs.
            refuses: Whether the model holds a tensor whose class refuses to be kept.
                Then no class of tensors sees what is done here.
        """
        self._may_be_seen = _always if refuses else function_modes
        self._call_unseen = call_past_classes if refuses else call_unseen
        self.traces: list[CallTrace] = []
        self._block = block
        self._passes = passes
        self._forwards = itertools.count()
        self._moments = itertools.count()
        # No other thread takes a later moment before a call's state has been looked at.
        self._looking = threading.RLock()
        self._threads = Threads(keep)
        self._now = self._threads.now
        self._checkpoints = Checkpoints(self.traces)
        self._gathering = Gathering(block, passes, self._threads)
        self.when_forward_begins: Callable[[], None] = nothing
        self._attached = passes.attached
        passes.numbered.when_numbered = partial(
            note_when, block, self._threads, self._moments, passes.attached
        )
        self._gathers = not block.fields.isdisjoint(GRADIENTS)
        self._values = ArgumentsAndOutputs(block, self._gathering, self._looking)
        self.parameters = ParameterHooks(block, passes)

    @kept_from_compile
    def before(
        self,
        hooked: Hooked,
        module: nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any] | None = None,
    ) -> None:
        """Write down that a call begins, and hook what flows into it."""
        python = running_frame(1)
        if self._may_be_seen():  # by a mode of the user's, which may change what we do
            self._call_unseen(self._before, python, hooked, module, args, kwargs)
        else:
            self._before(python, hooked, module, args, kwargs)

    def _before(
        self,
        python: FrameType,
        hooked: Hooked,
        module: nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any] | None,
    ) -> None:
        if kwargs is None or hooked.before_id not in forward_pre_hooks(module):
            return  # others set it on another module, which has a hook of its own
        if module is not hooked.module and not is_replica(module):
            return  # a copy, which shares the hooks of the original
        now = self._now
        stack = now.stack
        for frame in stack:
            if frame.module is module:
                drop_broken_off(now, python)
                break
        if len(forward_hooks(module)) > 1:  # the user may have set one in this forward
            put_after_others(module, hooked.after_id)
        running = backward_pass_id()
        around = None if running == -1 else checkpoint_around(python)
        if why := _has_no_values(stack):
            if around is None:  # else its first computation was written down already
                call = self._begin(now, hooked, -1)
                frame = _frame_of(call, hooked, module, python, stack)
                call.no_pass_because = frame.has_no_values = why
                stack.append(frame)
            return
        leaves, spec = flatten_call(args, kwargs)
        call, within = None, None
        if around is not None:
            if not is_reentrant(around):  # its first computation is hooked
                self._checkpoints.original(hooked.name, Tree(leaves, spec), running)
                return
            call = self._checkpoints.again(around, hooked.name, running)
            within = self._checkpoints.pass_around(python, running)
        if call is None:
            with self._looking:
                call = self._begin(now, hooked, running)
                self._remember_state(call, hooked, leaves, outermost=not stack)
        else:
            call.idle, call.no_pass_because = (), ""
        frame = _frame_of(call, hooked, module, python, stack)
        if running != -1:
            frame.in_backward, frame.within = True, within
        self._enter(now, frame, leaves, spec)

    def _enter(
        self, now: Running, frame: Frame, leaves: list[Any], spec: PyTreeSpec
    ) -> None:
        """Take what a call is given, and write down that it runs."""
        call, stack = frame.call, now.stack
        is_enabled = grad_is_enabled()
        # Inside a checkpoint gradients may be enabled again, as for forces.
        if not is_enabled or (stack and stack[-1].call.checkpoints):
            self._checkpoints.meet(call, around_forward(frame.python))
        if not self._gathers:
            call.no_pass_because = notes.NOT_ASKED
        elif is_enabled:
            frame.gathers = True
            call.flows = [*call.flows, frame.flow]
        else:
            call.no_pass_because = notes.DISABLED
        self._values.take_inputs(now, frame, leaves)
        if call.inputs is NO_INPUTS:  # else it is the recomputation of an earlier call
            call.inputs = Tree(leaves, spec)
        call.idle = [*frame.idle]  # after `inputs`: an interrupt may come in between
        if own := parameters_at_call(frame.module):
            self.parameters.take(frame, own)
        if not stack:
            self._leave_out_older(now, frame)
        elif frame.graph.is_mixed:
            frame.has_threads, frame.older = True, nodes_in(frame.module)
        frame.since = next_sequence_number()  # after a look at views, which makes nodes
        frame.hooks_of_others = self._attached.set_by_others()
        stack.append(frame)

    def end(self) -> None:
        """Note at the end of the block which calls were broken off.

        Calls in other threads are left out: they may still run.
        """
        if self._now.stack:
            drop_broken_off(self._now, running_frame(1))

    def _begin(self, now: Running, hooked: Hooked, running: int) -> CallTrace:
        """Write down that a call begins, in a backward pass that may be running."""
        outer = (
            now.stack[-1].call if now.stack else self._threads.call_elsewhere(hooked)
        )
        if outer is None and running == -1:
            self._passes.finish()
            self.when_forward_begins()  # which may give the module another name
        index, kind = next(hooked.calls), type(hooked.module).__name__
        call = CallTrace(self._block, hooked.name, index, kind, next(self._moments))
        hooked.was_called = True
        if outer is not None:
            outer.calls_others = True
            call.caller, call.forward = outer.moment, outer.forward
        else:
            call.forward = next(self._forwards)
        if not hooked.is_left_out:
            self.traces.append(call)
        return call

    def _remember_state(
        self, call: CallTrace, hooked: Hooked, given: Sequence[Any], *, outermost: bool
    ) -> None:
        """Keep what it takes to compute the call again."""
        history, autocast = self._block.history, NO_AUTOCAST
        if any_autocast():
            autocast = autocast_now()
            self._block.cast_to.update(autocast.values())
        if history is not None:
            if outermost and call.caller == -1:
                history.look(call.moment)
            call.module = hooked.module
            call.world = history.world(hooked.module, call.moment, autocast)
            if history.in_attributes:
                call.held_inputs = held_among(given, history.in_attributes)
        else:
            call.holds_state = hooked.holds_state

    def _leave_out_older(self, now: Running, frame: Frame) -> None:
        """Keep walks of the graph away from nodes older than the new forward."""
        frame.graph.leave_out(value.end for value in frame.inputs.values())
        if now.number or self._threads.are_several():
            # Each thread counts for itself: numbers do not tell which nodes are older.
            frame.graph.leave_out((node, 0) for node in nodes_in(frame.module))

    @kept_from_compile
    def swapped(
        self, views: list[str] | None, module: nn.Module, _args: object
    ) -> None:
        """Take the parameters that FSDP has put into a module whose call began.

        Args:
            views: Their names, if they are plain tensors there.
            module: The module.
        """
        stack = self._now.stack
        if stack and stack[-1].module is module:
            own = parameters_at_call(module)
            if views is not None:
                own = {name: vars(module)[name] for name in views}
            self.parameters.take_anew(stack[-1], own)

    @kept_from_compile
    def after(
        self,
        hooked: Hooked,
        module: nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        output: object = _NOT_GIVEN,
    ) -> None:
        """Write down that a call returns, and hook what flows back to it."""
        python = running_frame(1)
        if self._may_be_seen():
            self._call_unseen(self._after, python, hooked, module, args, kwargs, output)
        else:
            self._after(python, hooked, module, args, kwargs, output)

    def _after(
        self,
        python: FrameType,
        hooked: Hooked,
        module: nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        output: object,
    ) -> None:
        if output is _NOT_GIVEN or hooked.after_id not in forward_hooks(module):
            return  # others set it on another module
        if module is not hooked.module and not is_replica(module):
            return
        if _only_restores_values(python):
            return  # and the first computation of the call may not have returned yet
        now = self._now
        stack = now.stack
        if stack and stack[-1].module is module:
            frame = stack.pop()
        elif any(frame.module is module for frame in stack):
            while (frame := stack.pop()).module is not module:
                note_no_end(frame)
        else:
            return  # its beginning was not seen
        raised = sys.exception()
        has_raised = raised is not None and raised is not frame.handled
        if has_raised:  # with an output it was a hook, as one that ends a model early
            said = notes.RAISED if output is None else notes.HOOK_RAISED
            frame.call.no_pass_because = said.format(type(raised).__name__)
        if not (frame.has_no_values or (has_raised and output is None)):
            if frame.lazy:
                self._take_made(frame)
            if frame.idle and frame.gathers:
                self._values.take_wakened(now, frame)
            if self._attached.set_by_others() > frame.hooks_of_others:
                frame.call.hooks_inside = True
            self._values.take_outputs(now, frame, output, args, kwargs)
        frame.python = None
        if not (stack or frame.has_no_values):
            self._end_forward(now, frame.call.forward)

    def _take_made(self, frame: Frame) -> None:
        """Take the parameters that a lazy module has made in its call."""
        self.parameters.take_anew(frame, parameters_at_call(frame.module))
        if self._block.history is not None:
            with self._looking:
                self._block.history.meet(frame.module, frame.call.moment)

    def _end_forward(self, now: Running, forward: int) -> None:
        self._gathering.end_forward(now)
        now.end_forward()
        self._block.hooks_at_end[forward] = self._attached.set_by_others()
        if self._block.history is not None:
            with self._looking:
                self._block.history.forward_ends(next(self._moments))


def _always() -> bool:
    return True


def _frame_of(
    call: CallTrace,
    hooked: Hooked,
    module: nn.Module,
    python: FrameType | None,
    stack: list[Frame],
) -> Frame:
    """Return the frame of a call that begins inside the calls in `stack`."""
    if hooked.is_left_out:
        call.moment = -1  # the model itself, which only counts the forwards
    graph = stack[-1].graph if stack else ForwardGraph()
    return Frame(call, hooked, module, python, graph)


def _has_no_values(stack: list[Frame]) -> str:
    """Return why the tensors of a call that begins have no values, or ``""``."""
    if stack and stack[-1].has_no_values:
        return stack[-1].has_no_values
    if values_are_stand_ins() or values_are_fake():
        return notes.STAND_INS
    return notes.CAPTURED if not stack and graph_is_captured() else ""


def _only_restores_values(python: FrameType) -> bool:
    """Tell whether a checkpoint computes again a call whose first graph is hooked."""
    around = None if backward_pass_id() == -1 else checkpoint_around(python)
    return around is not None and not is_reentrant(around)
