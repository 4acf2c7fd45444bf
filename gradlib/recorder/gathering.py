"""Has the gradients of calls gathered: those of values, and those that nodes compute.

- ``grad_output`` and the totals: a hook on the output, the input or the parameter.
- ``grad_input`` and ``param_grads``: the autograd nodes that a forward made are walked
  before a backward pass can begin. A call's share is what the nodes that it made
  compute for its inputs and parameters.
"""

from collections.abc import Iterable
from typing import Any, cast

from torch import Tensor
from torch.autograd.graph import Node

from gradlib.private.modes import any_autocast, tensors_may_be_dual
from gradlib.private.modules import is_of_torch, modules_in
from gradlib.private.nodes import next_sequence_number, sequence_number
from gradlib.private.tensors import tangent_of
from gradlib.recorder.forward_values import Value
from gradlib.recorder.frame import Frame
from gradlib.recorder.hooked import Parameters
from gradlib.recorder.left import hook_left, take_left
from gradlib.recorder.passes import Passes
from gradlib.recorder.returned_calls import ReturnedCalls
from gradlib.recorder.threads import Running, Threads
from gradlib.recorder.unopened import nodes_inside
from gradlib.recorder.value_hooks import ValueHooks
from gradlib.recording import notes
from gradlib.recording.left_behind import nodes_left_in
from gradlib.recording.trace import Block


class Gathering:
    """Hooks what gradients will flow through, as the calls of a block run."""

    def __init__(self, block: Block, passes: Passes, threads: Threads) -> None:
        """Begin with no call.

        Args:
            block: What all calls have in common.
            passes: The backward passes of the block.
            threads: The threads that call modules.
        """
        self._block = block
        self._nodes = passes.nodes
        self._returned = ReturnedCalls(passes.nodes, threads)
        passes.numbered.when_met = self._returned.note_who_makes_nodes
        passes.numbered.when_reached = self._returned.hook_for_pass
        # Whether a call can be, if all that came to it is known.
        self._can_be_replayed = (
            block.history is not None and "grad_output" in block.fields
        )
        self._values = ValueHooks(passes)

    def hook(
        self, now: Running, frame: Frame, value: Value, *, is_output: bool = False
    ) -> None:
        """Take the gradient of a value, unless that is done already."""
        if value.tap is None:
            self._values.hook(value, frame.within, now.views, is_output=is_output)

    def gather(
        self,
        now: Running,
        frame: Frame,
        given: tuple[Any, ...],
        asked: dict[int, Value],
        idle: tuple[int, ...],
        closed: dict[int, object],
    ) -> None:
        """Hook what a call returns, and have the nodes that it made hooked.

        Args:
            now: What runs in this thread.
            frame: The call.
            given: Its arguments.
            asked: What it returns that requires grad, by its place in the output.
            idle: The places of the tensors it returns that do not.
            closed: The objects it returns that are not opened, by their places.
        """
        inputs, outputs = frame.inputs.values(), frame.flow.outputs
        for place, value in asked.items():
            if value.node is not None:
                frame.roots = [*frame.roots, value.node]
                frame.graph.returned.add(value.node)
            elif frame.parameters:
                _mark_returned(frame, value.tensor)
            if value in inputs:
                self._hook_returned(now, frame, value)
            else:
                self.hook(now, frame, value, is_output=True)
                if value.base is not None:
                    now.handed_on.append((frame, value))
            outputs[place] = value.grads
            if value.grads and not frame.in_backward:  # of passes inside, as for forces
                frame.flow.earlier = {*frame.flow.earlier, *value.grads}
        unopened = [*closed.values()]
        if frame.call.closed_inputs and not now.stack:  # it may write into these
            unopened += given
        if unopened:
            frame.roots = [*frame.roots, *nodes_inside(unopened)]
        if tensors_may_be_dual():
            _note_tangents(frame, asked.values())
        may_go_back = self._end_in_graph(now, frame, given)
        if not (asked or closed):
            frame.call.no_pass_because = notes.NO_GRAD_OUT
        else:
            if idle is not frame.call.idle_outputs:
                frame.call.idle_outputs = idle
            if len(asked) > 1 and "grad_output" in self._block.fields:
                self._values.take_off_inner(frame, asked)
        if frame.has_views:
            frame.find_overwritten()
        # What is computed from an unopened value is known only when the forward ends.
        (now.closed.append if closed else self._returned.add)(frame)
        if frame.in_backward or may_go_back:
            self._returned.hook()
            if now.left:
                self._hook_left(now)

    def end_forward(self, now: Running) -> None:
        """Have everything hooked that waited for the end of the forward."""
        self._returned.add_all(now.closed)
        self._returned.hook()
        if now.left:
            self._hook_left(now)
        self._values.settle(now.views, now.handed_on)

    def _end_in_graph(self, now: Running, frame: Frame, given: tuple[Any, ...]) -> bool:
        """Note the end of the call's part of the graph, and the nodes it left behind.

        Args:
            now: What runs in this thread.
            frame: The call.
            given: Its arguments, in which it may have left tensors.

        Returns:
            Whether it may have run a backward pass through its part.
        """
        may_go_back = not (frame.in_backward or is_of_torch(type(frame.module)))
        if may_go_back:  # perhaps through tensors that it has left somewhere
            left = nodes_left_in(frame.module, given)
            frame.roots = [*frame.roots, *left]
            last = max(map(sequence_number, left), default=-1)
            if last >= frame.since or self._block.left_out:
                self._take_left(now, frame, given)
        if frame.has_threads:
            frame.stand_alone()
        else:
            frame.until = next_sequence_number()
            frame.graph.roots += frame.roots
            # No module of torch's casts anything itself, but modules inside it may.
            if (may_go_back or frame.call.calls_others) and not frame.graph.autocasts:
                frame.owns_casts = not any_autocast()
            if may_go_back:
                self._returned.look_for_others(now.stack, frame)
        return may_go_back

    def _take_left(self, now: Running, frame: Frame, given: tuple[Any, ...]) -> None:
        """Hook what a call has left, as a state for later calls.

        Args:
            now: What runs in this thread.
            frame: The call.
            given: Its arguments, in which it may have left tensors.
        """
        if not self._can_be_replayed:
            return
        module = frame.module
        # Some inside may not be recorded.
        modules = modules_in(module) if self._block.left_out else [module]
        calls = *now.stack, frame
        for value in take_left(now.left, calls, modules, given, now.values):
            self.hook(now, frame, value, is_output=True)
            frame.roots = [*frame.roots, cast(Node, value.node)]

    def _hook_left(self, now: Running) -> None:
        """Hook what computes gradients of tensors that calls have made and left."""
        running = {*now.stack, *now.closed}
        ended = [frame for frame in now.left if frame not in running]
        hook_left(now.left, ended, now.values, self._nodes)

    def _hook_returned(self, now: Running, frame: Frame, value: Value) -> None:
        """Take the share of an input that the call returns as it was.

        It is the gradient of all uses of the tensor, including those inside the call.
        """
        # So far it was hooked as an input only.
        self._values.hook(value, frame.within, now.views, is_output=True)
        places = [place for place, it in frame.inputs.items() if it.end == value.end]
        frame.call.returned = [*dict.fromkeys((*frame.call.returned, *places))]


def _note_tangents(frame: Frame, outputs: Iterable[Value]) -> None:
    """Add the nodes that made the tangents of a call's outputs to its part."""
    tangents = [tangent_of(it.tensor) for it in outputs]
    nodes = [it.grad_fn for it in tangents if it is not None]
    if found := [node for node in nodes if node is not None]:
        frame.roots = [*frame.roots, *found]
        frame.call.has_tangents = True


def _mark_returned(frame: Frame, leaf: Tensor) -> None:
    """Write down which of its parameters a call returns as they are."""
    for name, (parameter, _, _) in cast(Parameters, frame.parameters).items():
        if parameter is leaf:
            frame.call.returned = [*frame.call.returned, name]
