"""What happens at every call of a recorded module: before it, and after it.

A call's arguments and result are left as they are, so the model computes what it would
compute alone. Where each gradient is seen:

- ``grad_output`` and the totals: a hook on the output, the input or the parameter.
- ``grad_input`` and ``param_grads``: the autograd nodes the call made are walked as it
  returns; what they hand to an input or a parameter is this call's share.
"""

import itertools
import sys
import threading
from collections import Counter
from collections.abc import Callable
from functools import partial
from types import FrameType
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node
from torch.nn.parameter import is_lazy

from gradlib.private import (
    backward_pass_id,
    is_of_torch,
    never_compiled,
    next_sequence_number,
    own_parameters,
    running_frame,
    values_are_stand_ins,
)
from gradlib.recorder.checkpoints import (
    Checkpoints,
    around_forward,
    checkpoint_around,
    is_reentrant,
)
from gradlib.recorder.forward_values import Value, Values
from gradlib.recorder.frame import Frame, hand_on
from gradlib.recorder.graph import leaving_edges
from gradlib.recorder.passes import Passes
from gradlib.recorder.views import Region, watch
from gradlib.recording import notes
from gradlib.recording.trace import GRADIENTS, NO_INPUTS, Block, CallTrace, Grads
from gradlib.tree import Tree
from gradlib.values import Keep


class ModuleCalls:
    """Writes down the calls of a block as they begin and return."""

    def __init__(self, block: Block, passes: Passes, keep: Keep) -> None:
        """Begin with no call.

        Args:
            block: What all calls have in common.
            passes: The backward passes of the block.
            keep: Gives what to keep of arguments and outputs.
        """
        self.traces: list[CallTrace] = []
        self._block = block
        self._passes = passes
        self._counts: Counter[str] = Counter()
        self._forwards = itertools.count()
        self._moments = itertools.count()
        self._now = _Running(keep)
        self._checkpoints = Checkpoints(self.traces)
        self._gathers = not block.fields.isdisjoint(GRADIENTS)
        self._gathers_inputs = "grad_input" in block.fields
        self._gathers_parameters = "param_grads" in block.fields
        # The parameters met, each with what it got: its id is its own while it lives.
        self._parameters: dict[int, tuple[nn.Parameter, Grads]] = {}

    @never_compiled
    def before(
        self,
        name: str,
        module: nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> None:
        """Write down that a call begins, and hook what flows into it."""
        now, python = self._now, running_frame(1)
        self._drop_broken_off(now, module, python)
        if values_are_stand_ins():
            self._begin(now, name, module).no_pass_because = notes.STAND_INS
            return
        inputs = Tree.of_call(args, kwargs)
        running = backward_pass_id()
        call, within = None, None
        if running != -1 and (around := checkpoint_around(python)):
            if not is_reentrant(around):  # its first computation is hooked
                self._mark_recomputed(name, inputs, running)
                return
            call, within = self._computed_again(around, name, running), running
        if call is None:
            call = self._begin(now, name, module)
            self._remember_state(now, call, module)
        call.idle, call.no_pass_because = (), ""
        frame = Frame(call, module, python, sys.exception(), within)
        frame.since = next_sequence_number()
        if not self._gathers:
            call.no_pass_because = notes.NOT_ASKED
        elif torch.is_grad_enabled():
            frame.gathers = True
            call.flows.append(frame.flow)
        else:
            call.checkpoints |= around_forward(python)
            call.no_pass_because = notes.DISABLED
        self._take_inputs(now, frame, inputs)
        if own := own_parameters(module):
            self._take_parameters(frame, own)
        now.stack.append(frame)

    def _drop_broken_off(
        self, now: "_Running", module: nn.Module, caller: FrameType | None
    ) -> None:
        """Forget calls that ended without a word, as on KeyboardInterrupt.

        They show when their module is called again: is its call still running?
        """
        stack = now.stack
        if not _is_open(module, stack):
            return
        running: set[FrameType | None] = set()
        while caller is not None:
            running.add(caller)
            caller = caller.f_back
        while stack and stack[-1].python not in running:
            stack.pop().call.no_pass_because = notes.BROKEN_OFF
        if not stack:
            now.end_forward()

    def _mark_recomputed(self, name: str, inputs: Tree, running: int) -> None:
        call = self._checkpoints.original(name, inputs, running)
        if call is not None:
            call.recomputed_in = running

    def _computed_again(
        self, around: FrameType, name: str, running: int
    ) -> CallTrace | None:
        """Return the call that a reentrant checkpoint computes again; None for none."""
        for call in self._checkpoints.reentrant(around, running):
            if call.name == name:
                call.recomputed_in = running
                return call
        return None

    def _begin(self, now: "_Running", name: str, module: nn.Module) -> CallTrace:
        """Write down that a call begins."""
        index = self._counts[name]
        self._counts[name] = index + 1
        moment = next(self._moments)
        call = CallTrace(self._block, name, index, type(module).__name__, moment)
        if now.stack:
            outer = now.stack[-1].call
            outer.calls_others = True
            call.caller, call.forward = outer.moment, outer.forward
        else:
            call.forward = next(self._forwards)
            if backward_pass_id() == -1:
                self._passes.finish()
        if name in self._block.left_out:
            call.moment = -1  # the model itself, which only counts the forwards
        else:
            self.traces.append(call)
        return call

    def _remember_state(
        self, now: "_Running", call: CallTrace, module: nn.Module
    ) -> None:
        """Keep what it takes to compute the call again."""
        history = self._block.history
        if history is not None:
            if not now.stack:
                history.look(call.moment)
            call.module = module
            call.world = history.world(module, call.moment)

    def _take_inputs(self, now: "_Running", frame: Frame, inputs: Tree) -> None:
        """Keep what the call is given, and hook it for all of what flows into it."""
        call, flow, values = frame.call, frame.flow, now.values
        outermost = not now.stack
        gathers = frame.gathers and self._gathers_inputs
        kept: list[Any] = []
        for place, leaf in enumerate(inputs.leaves):
            if not isinstance(leaf, Tensor):
                kept.append(leaf)
                continue
            value = values.of(leaf, outermost)
            kept.append(value.kept)
            if not leaf.requires_grad:
                call.idle = [*call.idle, place]
            elif gathers:
                frame.inputs.append(value)
                frame.has_views = frame.has_views or value.base is not None
                flow.shares[place] = frame.ends.setdefault(value.end, {})
                if value.grads is None:
                    self._hook_value(value, frame.within)
                flow.totals[place] = cast(Grads, value.grads)
        if call.inputs is NO_INPUTS:  # or it is the recomputation of an earlier call
            call.inputs = Tree(kept, inputs.spec)

    def _take_parameters(
        self, frame: Frame, own: dict[str, nn.Parameter | None]
    ) -> None:
        """Hook the parameters a module has now: they may be new since the last call."""
        call, flow = frame.call, frame.flow
        gathers = frame.gathers and self._gathers_parameters
        names: list[str] = []
        for name, parameter in own.items():
            if parameter is None:
                continue
            known = self._parameters.get(id(parameter))
            if known is None:
                if is_lazy(parameter):
                    frame.lazy = True
                    continue
                known = self._parameters[id(parameter)] = parameter, {}
                if parameter.requires_grad and self._gathers_parameters:
                    self._passes.hook_parameter(*known)
            names.append(name)
            if not parameter.requires_grad:
                call.idle = [*call.idle, name]
            elif gathers:
                flow.shares[name] = frame.ends.setdefault(id(parameter), {})
                flow.totals[name] = known[1]
        call.parameters = names

    def _hook_value(
        self, value: Value, within: int | None, *, is_output: bool = False
    ) -> None:
        """Hook the value a tensor has now, whatever overwrites it later."""
        grads: Grads = {}
        value.grads = grads
        hook = self._passes.hook_tensor
        value.unhook = hook(value.tensor, grads, within, is_output=is_output).remove
        if value.base is not None:
            base, _, region = value.base
            part = partial(_if_overwritten, watch(value.tensor), region)
            hook(base, grads, within, is_output=is_output, part=part)

    @never_compiled
    def after(
        self, module: nn.Module, _args: object, _kwargs: object, output: object
    ) -> None:
        """Write down that a call returns, and hook what flows back to it."""
        now = self._now
        stack = now.stack
        if not _is_open(module, stack):
            return  # not seen to begin, or computed again only to restore values
        while (frame := stack.pop()).module is not module:
            frame.call.no_pass_because = notes.BROKEN_OFF
        raised = sys.exception()
        if raised is not None and raised is not frame.handled:
            frame.call.no_pass_because = notes.RAISED.format(type(raised).__name__)
        else:
            if frame.lazy:  # its parameters are there now
                self._take_parameters(frame, own_parameters(module))
                if self._block.history is not None:
                    self._block.history.meet(module, frame.call.moment)
            self._take_outputs(now, frame, Tree.of(output))
        if not stack:
            now.end_forward()

    def _take_outputs(self, now: "_Running", frame: Frame, outputs: Tree) -> None:
        """Keep what the call returns, and hook all that gradients will pass."""
        asked: dict[int, Value] = {}
        kept: list[Any] = []
        for place, leaf in enumerate(outputs.leaves):
            if not isinstance(leaf, Tensor):
                kept.append(leaf)
                continue
            value = now.values.of(leaf)
            kept.append(value.kept)
            if leaf.requires_grad:
                asked[place] = value
        frame.call.output = Tree(kept, outputs.spec)
        if not (frame.gathers and torch.is_grad_enabled()):
            return
        self._hook_graph(now, frame, asked)
        for place, value in asked.items():
            if value in frame.inputs:
                self._hook_returned(frame, value)
            elif value.grads is None:
                self._hook_value(value, frame.within, is_output=True)
            frame.flow.outputs[place] = cast(Grads, value.grads)
        if not asked:
            frame.call.no_pass_because = notes.NO_GRAD_OUT
        elif len(asked) > 1 and "grad_output" in self._block.fields:
            self._hook_inner(frame, asked)

    def _hook_graph(
        self, now: "_Running", frame: Frame, asked: dict[int, Value]
    ) -> None:
        """Hook the nodes that hand gradients to the call's inputs and parameters.

        Walked is what the call made. The calls inside have walked their part: what led
        out of theirs and does not lead out of this one ends in nodes of this one.
        """
        roots = frame.roots
        for value in asked.values():
            if type(value.end) is tuple:
                roots.append(value.end[0])
        if not is_of_torch(type(frame.module)):
            roots += _nodes_in_attributes(frame.module)
        leaving = leaving_edges(roots, frame.since, frame.ends, now.seen)
        if frame.leaving:
            leaving += frame.leaving
        for node, receivers in frame.receivers(leaving).items():
            self._passes.hook_node(node, receivers, frame.within)
        if now.stack:
            hand_on(leaving, now.stack, now.seen)

    def _hook_returned(self, frame: Frame, value: Value) -> None:
        """Take the share of an input that the call returns as it was.

        It is the gradient of all uses of the tensor, those inside the call included.
        """
        # It was hooked before the call, as an input only.
        self._hook_value(value, frame.within, is_output=True)
        share, shares = frame.ends[value.end], frame.flow.shares
        places = [key for key in shares if shares[key] is share]
        for place in places:
            if isinstance(place, int):
                shares[place] = cast(Grads, value.grads)
                frame.call.returned_inputs = [*frame.call.returned_inputs, place]

    def _hook_inner(self, frame: Frame, outputs: dict[int, Value]) -> None:
        """Take off what the call itself gives to an output, to make another of it."""
        ends = {value.end for value in outputs.values()}
        nodes = [end[0] for end in ends if not isinstance(end, int)]
        edges = leaving_edges(nodes, frame.since, ends, set())
        for place, value in outputs.items():
            inner = [
                (node, entry)
                for node, entry, edge, leaf in edges
                if value.end in (edge, id(leaf))
            ]
            if inner:
                less = partial(_without, self._passes.hook_inner(inner))
                grads = frame.flow.outputs[place] = Grads()
                self._passes.hook_tensor(
                    value.tensor, grads, frame.within, part=less, is_output=True
                )


class _Running(threading.local):
    """The forward that runs in a thread."""

    def __init__(self, keep: Keep) -> None:
        self.stack: list[Frame] = []
        self.seen: set[Node] = set()  # the nodes walked
        self.values = Values(keep)  # the tensors met

    def end_forward(self) -> None:
        """Let go of what only the forward needed."""
        self.seen.clear()
        self.values.clear()


def _is_open(module: nn.Module, stack: list[Frame]) -> bool:
    return module in [frame.module for frame in stack]


def _nodes_in_attributes(module: nn.Module) -> list[Node]:
    """Return the nodes of tensors that a module made and kept, to use them later."""
    made = [it.grad_fn for it in vars(module).values() if isinstance(it, Tensor)]
    return [node for node in made if node is not None]


def _if_overwritten(
    overwritten: Callable[[], bool], region: Region, grad: Tensor
) -> Tensor | None:
    """Return a view's part of its base's gradient, if its own is lost."""
    return region.of(grad) if overwritten() else None


def _without(inner: dict[int, Tensor], grad: Tensor) -> Tensor:
    """Return a gradient less what the running pass has put in `inner`."""
    part = inner.get(backward_pass_id())
    return grad if part is None else grad.detach() - part
