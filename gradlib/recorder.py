"""Recording what goes through modules, forward and backward.

The only file that attaches recording hooks. It builds on hooks of tensors and of graph
nodes, not on full backward hooks: those raise on in-place operations and see only
tensors and tuples of tensors.

A call's arguments and result are left as they are, so the model computes what it would
compute alone. Where each gradient is seen:

- ``grad_output``: a hook on the output, set as the call returns, less what the call's
  own computation gives to that output.
- ``grad_input`` and ``param_grads``: the autograd nodes the call made are walked as it
  returns; what they hand to an input or a parameter is this call's share.
- the totals: a hook on the input or the parameter itself.
"""

import inspect
import sys
from collections import Counter
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from types import FrameType
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node
from torch.utils.hooks import RemovableHandle

from gradlib.errors import NotAModuleError
from gradlib.frame import Frame, Input, edge_of, input_of, places_of
from gradlib.graph import Edge, GraphEdge, edges_of_call
from gradlib.passes import Passes
from gradlib.private import (
    backward_pass_id,
    next_sequence_number,
    own_parameters,
    sequence_number,
)
from gradlib.recording import Recording
from gradlib.trace import CallTrace, Place
from gradlib.tree import Tree
from gradlib.values import KeptValues
from gradlib.views import Region, base_of, watch


def record(model: nn.Module) -> AbstractContextManager[Recording]:
    """Record every module call in the block, forward and backward.

    Call ``backward()`` inside the block: after it no hook is left, and the recording
    keeps what it saw. Results and gradients are what they would be without it.

    Args:
        model: The module to record, with all modules inside it. On any device.

    Returns:
        A context manager that gives the recording, which fills while the block runs.

    Raises:
        NotAModuleError: `model` is not a ``torch.nn.Module``.

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
    return _recording(model)


@contextmanager
def _recording(model: nn.Module) -> Generator[Recording]:
    recorder = _Recorder(model)
    try:
        recorder.attach_hooks()
        yield recorder.recording
    finally:
        recorder.remove_hooks()


class _Recorder:
    """The hooks of one block and what they share."""

    def __init__(self, model: nn.Module) -> None:
        self._calls: list[CallTrace] = []
        self._counts: Counter[str] = Counter()
        self._stack: list[Frame] = []
        self._forwards = 0
        self._passes = Passes()
        self._handles: list[RemovableHandle] = []
        # Of the forward that runs: the nodes walked, and the values kept by tensor.
        self._seen: set[Node] = set()
        self._kept = KeptValues()
        self._watched: dict[tuple[str, str, int], nn.Parameter] = {}
        self._modules = _modules(model)
        self.recording = Recording(_names(model), self._calls)

    def attach_hooks(self) -> None:
        """Hook every module."""
        for name, module in self._modules.items():
            before = _ModuleHook(partial(self._before, name))
            after = _ModuleHook(self._after)
            self._handles += [
                module.register_forward_pre_hook(before, with_kwargs=True),
                module.register_forward_hook(after, with_kwargs=True, always_call=True),
            ]

    def remove_hooks(self) -> None:
        """Remove every hook, those on tensors and graph nodes still alive included."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def _before(
        self,
        name: str,
        module: nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> None:
        python = inspect.currentframe()
        for _ in ("_before", "_ModuleHook.__call__"):  # out to torch's own frame
            python = python and python.f_back
        self._drop_broken_off(module, python)
        inputs = Tree.of((args, kwargs))
        own = own_parameters(module)
        self._watch_parameters(name, own)
        call = self._recomputed(name, inputs)
        if call is None:
            call = self._begin(name, module, own, inputs)
        elif not call.no_pass_because:
            return  # its first computation is hooked; this one only restores values
        call.no_pass_because = ""  # without gradients the first time, now with them
        frame = Frame(call, module, own, python, sys.exception())
        self._stack.append(frame)
        if not torch.is_grad_enabled():
            call.no_pass_because = "gradients were disabled when it was called"
            return
        frame.inputs = self._hook_inputs(call, inputs)
        frame.since = next_sequence_number()

    def _drop_broken_off(self, module: nn.Module, caller: FrameType | None) -> None:
        """Forget calls that ended without a word, as on KeyboardInterrupt.

        They show when their module is called again: is its call still running?
        """
        if all(frame.module is not module for frame in self._stack):
            return
        running: set[FrameType | None] = set()
        while caller is not None:
            running.add(caller)
            caller = caller.f_back
        while self._stack and self._stack[-1].python not in running:
            self._stack.pop().call.no_pass_because = "its forward was broken off"
        if not self._stack:
            self._end_forward()

    def _recomputed(self, name: str, inputs: Tree) -> CallTrace | None:
        """Return the call that a checkpoint computes again inside a backward pass.

        The last one with these inputs: a pass goes through the calls backwards.
        """
        running = backward_pass_id()
        if running == -1:
            return None
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
        self,
        name: str,
        module: nn.Module,
        own: dict[str, nn.Parameter],
        inputs: Tree,
    ) -> CallTrace:
        outermost = not self._stack
        if outermost:
            self._forwards += 1
        else:
            self._stack[-1].call.calls_others = True
        call = CallTrace(
            name,
            self._counts[name],
            self._forwards - 1,
            type(module).__name__,
            inputs.map(partial(self._kept.of, foreign=outermost)),
            {key: parameter.requires_grad for key, parameter in own.items()},
        )
        self._counts[name] += 1
        self._calls.append(call)
        return call

    def _watch_parameters(self, name: str, own: dict[str, nn.Parameter]) -> None:
        """Hook the parameters a module has now: they may be new since the last call."""
        for key, parameter in own.items():
            watched = (name, key, id(parameter)) in self._watched
            if parameter.requires_grad and not watched:
                self._watched[name, key, id(parameter)] = parameter
                self._hook(parameter, partial(self._passes.on_parameter, name, key))

    def _hook_inputs(self, call: CallTrace, inputs: Tree) -> list[Input]:
        """Hook each input that requires grad, and return where its gradient goes."""
        found: dict[int, Input] = {}  # one for a tensor passed in two places
        call.inputs_asked.clear()  # a second backward pass recomputes once more
        for place, leaf in enumerate(inputs.leaves):
            if not (isinstance(leaf, Tensor) and leaf.requires_grad):
                continue
            call.inputs_asked.append(place)
            if id(leaf) in found:
                found[id(leaf)].places.append(place)
                continue
            given = found[id(leaf)] = input_of(leaf, place)
            total = partial(self._passes.on_total, call, given.places)
            self._hook_value(leaf, total)
        return list(found.values())

    def _hook(self, tensor: Tensor, hook: Callable[[Tensor], None]) -> None:
        self._handles.append(cast(Any, tensor).register_hook(hook))

    def _hook_value(self, tensor: Tensor, hook: Callable[[Tensor], None]) -> None:
        """Hook the value a tensor has now, whatever overwrites it later."""
        self._hook(tensor, hook)
        if found := base_of(tensor):
            base, region = found
            self._hook(base, partial(_if_overwritten, watch(tensor), region, hook))

    def _after(
        self, module: nn.Module, _args: object, _kwargs: object, output: object
    ) -> None:
        if all(frame.module is not module for frame in self._stack):
            return  # its call was not seen to begin: an earlier hook raised
        while (frame := self._stack.pop()).module is not module:
            frame.call.no_pass_because = "its forward was broken off"
        raised = sys.exception()
        if output is None and raised is not None and raised is not frame.handled:
            frame.call.no_pass_because = f"its forward raised {type(raised).__name__}"
        else:
            outputs = Tree.of(output)
            frame.call.output = outputs.map(self._kept.of)
            if torch.is_grad_enabled():
                self._hook_graph(frame, outputs)
                self._hook_outputs(frame, outputs)
        if not self._stack:
            self._end_forward()

    def _end_forward(self) -> None:
        self._seen.clear()
        self._kept.clear()

    def _hook_outputs(self, frame: Frame, outputs: Tree) -> None:
        call = frame.call
        inputs = {id(given.tensor): given for given in frame.inputs}
        asked = [
            (place, leaf)
            for place, leaf in enumerate(outputs.leaves)
            if isinstance(leaf, Tensor) and leaf.requires_grad
        ]
        call.outputs_asked = [place for place, _ in asked]
        if not asked:
            call.no_pass_because = "it returned no tensor that requires grad"
        for place, leaf in asked:
            self._hook_value(leaf, partial(self._passes.on_output, call, place))
            given = inputs.pop(id(leaf), None)
            if given is not None and not given.overwritten():
                call.returned_inputs += given.places
                share = partial(self._passes.on_returned_input, call, given.places)
                self._hook_value(leaf, share)
        if len(asked) > 1:
            self._hook_inner(frame, asked)

    def _hook_inner(self, frame: Frame, outputs: list[tuple[int, Tensor]]) -> None:
        """Hook the nodes of a call that use one of its outputs to make another."""
        places: dict[Edge, list[int]] = {}
        for place, leaf in outputs:
            if (edge := edge_of(leaf)) and sequence_number(edge[0]) >= frame.since:
                places.setdefault(edge, []).append(place)
        roots = [leaf.grad_fn for _, leaf in outputs if leaf.grad_fn is not None]
        for one in edges_of_call(roots, since=frame.since, seen=set()):
            if one.edge in places:
                receiver = one.entry, Place("inner", places[one.edge])
                self._hook_node(one.node, frame.call, [receiver])

    def _hook_graph(self, frame: Frame, outputs: Tree) -> None:
        """Hook the nodes that hand gradients to the call's inputs and parameters."""
        receivers: dict[Node, list[tuple[int, Place]]] = {}
        for edge in self._edges_leaving(frame, outputs):
            for place in places_of(frame, edge):
                receivers.setdefault(edge.node, []).append((edge.entry, place))
        for node, places in receivers.items():
            self._hook_node(node, frame.call, places)

    def _hook_node(
        self, node: Node, call: CallTrace, receivers: list[tuple[int, Place]]
    ) -> None:
        hook = partial(self._passes.on_node, call, receivers)
        self._handles.append(node.register_hook(hook))

    def _edges_leaving(self, frame: Frame, outputs: Tree) -> list[GraphEdge]:
        """Walk what the call made, and return the edges that lead out of it.

        The calls inside have walked their part. What led out of theirs and does not
        lead out of this one's ends in nodes of this call: more places to begin.
        """
        roots = [edge.edge[0] for edge in frame.inner] + [
            leaf.grad_fn
            for leaf in (*outputs.leaves, *vars(frame.module).values())
            if isinstance(leaf, Tensor) and leaf.grad_fn is not None
        ]
        walk = edges_of_call(roots, since=frame.since, seen=self._seen)
        edges = [*walk, *frame.inner]
        leaving = [edge for edge in edges if edge.leads_out(frame.since)]
        if self._stack:
            self._stack[-1].inner += leaving
        return leaving


class _ModuleHook:
    """A hook of ours on a module. A copy of the module does not record."""

    def __init__(self, call: Callable[..., None]) -> None:
        self._call: Callable[..., None] | None = call

    def __call__(self, *args: Any) -> None:
        if self._call is not None:
            self._call(*args)

    def __getstate__(self) -> dict[str, None]:
        return {"_call": None}


def _same(a: Tree, b: Tree) -> bool:
    """Tell whether the tensors of two trees have the same values."""
    pairs = zip(a.leaves, b.leaves, strict=False)
    return a.spec == b.spec and all(
        torch.equal(x, y.detach())
        for x, y in pairs
        if isinstance(x, Tensor) and isinstance(y, Tensor)
    )


def _if_overwritten(
    overwritten: Callable[[], bool],
    region: Region,
    hook: Callable[[Tensor], None],
    grad: Tensor,
) -> None:
    """Call a view's hook with its part of its base's gradient, if its own is lost."""
    if overwritten():
        hook(region.of(grad))


def _names(model: nn.Module) -> dict[str, str]:
    """Return every name of every module, with the name it is recorded under."""
    first = {module: name for name, module in _modules(model).items()}
    every = _modules(model, remove_duplicate=False)
    return {name: first[module] for name, module in every.items()}


def _modules(model: nn.Module, remove_duplicate: bool = True) -> dict[str, nn.Module]:
    return dict(cast(Any, model).named_modules(remove_duplicate=remove_duplicate))
