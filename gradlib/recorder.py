"""Recording what goes through modules, forward and backward.

The only file that attaches recording hooks. It builds on hooks of tensors and of graph
nodes, not on full backward hooks: those raise on in-place operations and see only
tensors and tuples of tensors.

A call's arguments and result are left as they are, so the model computes what it would
compute alone. Where each gradient is seen:

- ``grad_output`` and the totals: a hook on the output, the input or the parameter.
- ``grad_input`` and ``param_grads``: the autograd nodes the call made are walked as it
  returns; what they hand to an input or a parameter is this call's share.
"""

import sys
import threading
from collections import Counter
from collections.abc import Callable, Generator, Iterable
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from types import FrameType
from typing import Any, cast

import torch
from optree import PyTreeSpec
from torch import Tensor, nn
from torch.autograd.graph import Node
from torch.nn.modules.module import register_module_module_registration_hook
from torch.nn.parameter import is_lazy
from torch.utils.hooks import RemovableHandle

from gradlib.errors import NotAModuleError, UnknownFieldError
from gradlib.forward_values import Value, Values
from gradlib.frame import Frame, hand_on
from gradlib.graph import leaving_edges
from gradlib.passes import Passes, Tap
from gradlib.private import (
    backward_pass_id,
    forget_compiled,
    is_of_torch,
    never_compiled,
    next_sequence_number,
    own_parameters,
    running_frame,
)
from gradlib.recording import Recording
from gradlib.selection import Choice, modules_of, recorded_names, selector
from gradlib.state import History
from gradlib.trace import FIELDS, GRADIENTS, Block, CallTrace, Grads, Key
from gradlib.tree import Tree
from gradlib.values import Keep, keeper
from gradlib.views import Region, watch


def record(
    model: nn.Module,
    *,
    modules: Choice | None = None,
    keep: Iterable[str] = FIELDS,
    reduce: Callable[[Tensor], Any] | None = None,
    device: torch.device | str | int | None = None,
) -> AbstractContextManager[Recording]:
    """Record every module call in the block, forward and backward.

    Call ``backward()`` inside the block: after it no hook is left, and the recording
    keeps what it saw. Results and gradients are what they would be without it.

    Args:
        model: The module to record, with all modules inside it. On any device.
        modules: Which of them: names as ``named_modules()`` gives them, patterns as
            ``"layers.*"``, or a function ``(name, module) -> bool``. Default: all.
        keep: Which fields of a call: any of ``"args"``, ``"output"``,
            ``"grad_input"``, ``"grad_output"`` and ``"param_grads"``. The keyword
            arguments travel with ``"args"``, the totals with their shares.
        reduce: A function of a tensor, as `tensor_stats`. What it returns is kept
            instead of the tensor. It gets each tensor detached, on its own device.
        device: Where the kept tensors go: ``"cpu"`` to spare the memory of a GPU.

    Returns:
        A context manager that gives the recording, which fills while the block runs.

    Raises:
        NotAModuleError: `model` is not a ``torch.nn.Module``.
        NoSuchModuleError: A name or pattern in `modules` fits no module.
        UnknownFieldError: `keep` names something that no call has.

    Example:
        ```python
        import torch
        from torch import nn

        import gradlib

        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(3, 5), nn.ReLU(), nn.Linear(5, 2))
        x = torch.ones(4, 3)
        with gradlib.record(model) as recording:
            model(x).sum().backward()

        print(recording)
        #> Recording: 4 calls, 1 forward, 1 backward pass
        #> module  type        output  grad_output  grad_input  param_grads
        #> (root)  Sequential  [4, 2]  2.83         -           -
        #> 0       Linear      [4, 5]  1.01         -           4.06
        #> 1       ReLU        [4, 5]  1.94         1.01        -
        #> 2       Linear      [4, 2]  2.83         1.94        7.04
        #> output: shape; gradients: norm over all entries, - where there is none
        print(recording["2"].grad_output[0])
        #> tensor([[1., 1.],
        #>         [1., 1.],
        #>         [1., 1.],
        #>         [1., 1.]])
        print(recording["0"].note)
        #> args[0] does not require grad
        ```
    """
    if not isinstance(cast(object, model), nn.Module):
        raise NotAModuleError(
            "record(model): model must be a torch.nn.Module, but it is of type "
            f"{type(model).__name__}. Put a function into the forward() of a module."
        )
    recorder = _Recorder(
        model,
        selector(model, modules),
        _fields(keep),
        keeper(reduce, device),
        reduces=reduce is not None,
    )
    return _recording(recorder)


@contextmanager
def _recording(recorder: "_Recorder") -> Generator[Recording]:
    try:
        recorder.attach_hooks()
        yield recorder.recording
    finally:
        recorder.remove_hooks()


def _fields(keep: Iterable[str]) -> frozenset[str]:
    fields = frozenset([keep] if isinstance(keep, str) else keep)
    for name in sorted(fields.difference(FIELDS)):
        known = ", ".join(f'"{field}"' for field in FIELDS)
        raise UnknownFieldError(
            f'record(keep=...): "{name}" is no field that can be kept. There are: '
            f"{known}."
        )
    return fields


class _Recorder:
    """The hooks of one block and what they share."""

    def __init__(
        self,
        model: nn.Module,
        chosen: Callable[[str, nn.Module], bool],
        fields: frozenset[str],
        keep: Keep,
        *,
        reduces: bool,
    ) -> None:
        self._chosen = chosen
        self._calls: list[CallTrace] = []
        self._counts: Counter[str] = Counter()
        self._forwards = 0
        values = fields & {"args", "output"}
        tensors = fields & {"grad_input", "grad_output"}
        self._now = _Running(keep if values else _nothing)
        self._passes = Passes(keep, keep if tensors else _nothing, reduces=reduces)
        self._modules = modules_of(model)  # by name; more may be added in the block
        self._names = recorded_names(model)
        # Whoever computes a call again needs its arguments, and the state they met.
        history = History(self._modules) if "args" in fields and not reduces else None
        self._block = Block(fields, self._passes.numbers, history)
        self._gathers = not fields.isdisjoint(GRADIENTS)
        self._handles: list[RemovableHandle] = []
        # The parameters met, each with what it got: its id is its own while it lives.
        self._parameters: dict[int, tuple[nn.Parameter, Grads]] = {}
        self.recording = Recording(self._block, self._names, self._calls)

    def attach_hooks(self) -> None:
        """Hook every module, and those that are added later."""
        for name, module in self._modules.items():
            self._attach(name, module)
        self._handles.append(register_module_module_registration_hook(self._added))
        forget_compiled()

    def remove_hooks(self) -> None:
        """Remove every hook, those on tensors and graph nodes still alive included."""
        for handle in self._handles + self._passes.handles:
            handle.remove()
        self._handles.clear()
        self._passes.handles.clear()
        self._passes.finish()
        forget_compiled()

    def _attach(self, name: str, module: nn.Module) -> None:
        """Hook a module that was chosen: before all other hooks, and after them."""
        if not self._chosen(name, module):
            self._block.left_out.add(name)
            return
        before, after = _ModuleHook(self._before, name), _ModuleHook(self._after)
        self._handles += [
            module.register_forward_pre_hook(before, prepend=True, with_kwargs=True),
            module.register_forward_hook(after, with_kwargs=True, always_call=True),
        ]

    def _added(self, parent: nn.Module, key: str, module: nn.Module | None) -> None:
        """Hook what is added to a module while the block runs."""
        for name, known in list(self._modules.items()):
            if known is parent and module is not None:
                for path, inner in modules_of(module).items():
                    full = ".".join(part for part in (name, key, path) if part)
                    if inner not in self._modules.values():
                        self._modules[full] = inner
                        self._names[full] = full
                        self._attach(full, inner)

    @never_compiled
    def _before(
        self,
        name: str,
        module: nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> None:
        now, python = self._now, running_frame(1)
        self._drop_broken_off(now, module, python)
        inputs = Tree.of_call(args, kwargs)
        call = None if backward_pass_id() == -1 else self._recomputed(name, inputs)
        if call is None:
            call = self._begin(now, name, module, inputs.spec)
        elif not call.no_pass_because:
            return  # its first computation is hooked; this one only restores values
        call.no_pass_because = ""  # without gradients the first time, now with them
        frame = Frame(call, module, python, sys.exception())
        if not self._gathers:
            call.no_pass_because = "no field with gradients was kept"
        elif torch.is_grad_enabled():
            frame.since = next_sequence_number()
            call.flows.append(frame.flow)
        else:
            call.no_pass_because = "gradients were disabled when it was called"
        self._take_inputs(now, frame, inputs.leaves)
        self._take_parameters(frame)
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
            stack.pop().call.no_pass_because = "its forward was broken off"
        if not stack:
            now.end_forward()

    def _recomputed(self, name: str, inputs: Tree) -> CallTrace | None:
        """Return the call that a checkpoint computes again inside a backward pass.

        The last one with these inputs: a pass goes through the calls backwards.
        """
        running = backward_pass_id()
        earlier = [
            call
            for call in reversed(self._calls)
            if call.name == name and call.recomputed_in != running
        ]
        fitting = (call for call in earlier if _same(call.inputs, inputs))
        call = earlier[0] if len(earlier) == 1 else next(fitting, None)
        if call is not None:
            call.recomputed_in = running
        return call

    def _begin(
        self, now: "_Running", name: str, module: nn.Module, spec: PyTreeSpec
    ) -> CallTrace:
        if now.stack:
            now.stack[-1].call.calls_others = True
        else:
            self._forwards += 1
            if self._block.history is not None:
                self._block.history.look(len(self._calls))
        index = self._counts[name]
        self._counts[name] = index + 1
        call = CallTrace(
            self._block,
            name,
            index,
            self._forwards - 1,
            type(module).__name__,
            Tree([], spec),
            len(self._calls),
        )
        if self._block.history is not None:
            call.module = module
            call.world = self._block.history.world(module, len(self._calls))
        self._calls.append(call)
        return call

    def _take_inputs(self, now: "_Running", frame: Frame, leaves: list[Any]) -> None:
        """Keep what the call is given, and hook it for all of what flows into it."""
        call, outermost = frame.call, not now.stack
        kept: list[Any] = []
        idle: list[Key] = []
        for place, leaf in enumerate(leaves):
            if not isinstance(leaf, Tensor):
                kept.append(leaf)
                continue
            value = now.values.of(leaf, foreign=outermost)
            kept.append(value.kept)
            if not leaf.requires_grad:
                idle.append(place)
            elif frame.gathers and "grad_input" in self._block.fields:
                frame.inputs.append(value)
                frame.expect(place, value.end)
                frame.flow.totals[place] = self._hook_value(value, call)
        if not call.inputs.leaves:  # or it is the recomputation of an earlier call
            call.inputs.leaves = kept
        call.idle = idle

    def _take_parameters(self, frame: Frame) -> None:
        """Hook the parameters a module has now: they may be new since the last call."""
        call, flow = frame.call, frame.flow
        call.parameters = []
        for name, parameter in own_parameters(frame.module).items():
            if parameter is None:
                continue
            if type(parameter) is not nn.Parameter and is_lazy(parameter):
                frame.lazy = True
                continue
            call.parameters.append(name)
            if not parameter.requires_grad:
                call.idle.append(name)
            elif frame.gathers and "param_grads" in self._block.fields:
                known = self._parameters.get(id(parameter))
                if known is None:
                    known = self._parameters[id(parameter)] = parameter, {}
                    self._passes.hook_parameter(*known)
                frame.expect(name, id(parameter))
                flow.totals[name] = known[1]

    def _hook_value(
        self, value: Value, call: CallTrace, *, is_output: bool = False
    ) -> Grads:
        """Hook the value a tensor has now, whatever overwrites it later, once."""
        if value.grads is not None:
            return value.grads
        grads: Grads = {}
        value.grads = grads
        tensor, within = value.tensor, call.recomputed_in
        self._passes.hook_tensor(
            tensor, Tap(grads, tensor.output_nr, is_output, within)
        )
        if value.base is not None:
            base, _, region = value.base
            part = partial(_if_overwritten, watch(tensor), region)
            tap = Tap(grads, base.output_nr, is_output, within, part)
            self._passes.hook_tensor(base, tap)
        return grads

    @never_compiled
    def _after(
        self, module: nn.Module, _args: object, _kwargs: object, output: object
    ) -> None:
        now = self._now
        stack = now.stack
        if not _is_open(module, stack):
            return  # not seen to begin, or computed again only to restore values
        while (frame := stack.pop()).module is not module:
            frame.call.no_pass_because = "its forward was broken off"
        raised = sys.exception()
        if output is None and raised is not None and raised is not frame.handled:
            frame.call.no_pass_because = f"its forward raised {type(raised).__name__}"
        else:
            if frame.lazy:  # its parameters are there now
                self._take_parameters(frame)
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
                grads = self._hook_returned(frame, value)
            else:
                grads = self._hook_value(value, frame.call, is_output=True)
            frame.flow.outputs[place] = grads
        if not asked:
            frame.call.no_pass_because = "it returned no tensor that requires grad"
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
        roots += [value.end[0] for value in asked.values() if type(value.end) is tuple]
        if not is_of_torch(type(frame.module)):
            roots += _nodes_in_attributes(frame.module)
        leaving = frame.leaving + leaving_edges(
            roots, since=frame.since, ends=frame.ends, seen=now.seen
        )
        for node, receivers in frame.receivers(leaving).items():
            self._passes.hook_node(node, receivers, frame.call.recomputed_in)
        if now.stack:
            hand_on(leaving, now.stack, now.seen)

    def _hook_returned(self, frame: Frame, value: Value) -> Grads:
        """Take the share of an input that the call returns as it was.

        It is the gradient of all uses of the tensor, those inside the call included.
        """
        value.grads = None  # hooked before the call, as an input only
        grads = self._hook_value(value, frame.call, is_output=True)
        share = frame.ends[value.end]
        for key, known in frame.flow.shares.items():
            if known is share and isinstance(key, int):
                frame.flow.shares[key] = grads
                frame.call.returned_inputs.append(key)
        return grads

    def _hook_inner(self, frame: Frame, outputs: dict[int, Value]) -> None:
        """Take off what the call itself gives to an output, to make another of it."""
        ends = {value.end for value in outputs.values()}
        nodes = [end[0] for end in ends if not isinstance(end, int)]
        edges = leaving_edges(nodes, since=frame.since, ends=ends, seen=set())
        for place, value in outputs.items():
            inner = [(node, entry) for node, entry, end, _ in edges if end == value.end]
            if inner:
                less = partial(_without, self._passes.hook_inner(inner))
                grads = frame.flow.outputs[place] = Grads()
                number, within = value.tensor.output_nr, frame.call.recomputed_in
                tap = Tap(grads, number, True, within, less)
                self._passes.hook_tensor(value.tensor, tap)


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


class _ModuleHook(partial[None]):
    """A hook of ours on a module. A copy of the module does not record."""

    def __reduce__(self) -> tuple[type["_ModuleHook"], tuple[Callable[..., None]]]:
        return _ModuleHook, (_nothing,)


def _nothing(*_: object) -> None:
    """Stand for a hook that does nothing, and for keeping nothing of a tensor."""


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


def _same(a: Tree, b: Tree) -> bool:
    """Tell whether the tensors of two trees have the same values."""
    pairs = zip(a.leaves, b.leaves, strict=False)
    return a.spec == b.spec and all(
        torch.equal(x, y.detach().to(x.device))
        for x, y in pairs
        if isinstance(x, Tensor) and isinstance(y, Tensor)
    )
