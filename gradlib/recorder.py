"""Recording what goes through modules, forward and backward.

The only file that attaches recording hooks. It builds on hooks of tensors and of graph
nodes, not on full backward hooks: those raise on in-place operations and see only
tensors and tuples of tensors.

Where each gradient is seen:

- ``grad_output``: a hook on the output, set as the call returns.
- ``grad_input``: the call is handed an alias of each input; what flows back through the
  alias is this call's share. A module that overwrites its input takes the alias out of
  the graph; then it is what the call's part of the graph hands on to the input.
- ``grad_input_total``: a hook on the input itself.
- ``param_grads``: what the call's part of the graph hands to each parameter.
- ``param_grads_total``: a hook on the parameter.
"""

import sys
from collections import Counter
from collections.abc import Callable, Generator, MutableMapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node
from torch.utils.hooks import RemovableHandle
from torch.utils.weak import WeakTensorKeyDictionary

from gradlib.errors import NotAModuleError
from gradlib.graph import Edge, edges_into
from gradlib.passes import Passes, Receiver
from gradlib.private import (
    next_sequence_number,
    own_parameters,
    sequence_number,
)
from gradlib.recording import Recording
from gradlib.trace import CallTrace, Place
from gradlib.tree import Tree
from gradlib.values import keep
from gradlib.views import Region, base_of, watch

# The tensor that an alias of ours stands for. Shared by nested recordings, so that each
# looks through the aliases of the others.
_originals = cast(MutableMapping[Tensor, Tensor], WeakTensorKeyDictionary())


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
        yield recorder.recording
    finally:
        recorder.remove_hooks()


@dataclass
class _Alias:
    """An input handed to a call under another name."""

    tensor: Tensor
    original: Tensor
    overwritten: Callable[[], bool]
    # Where the gradient of the original goes: the edge, and for a view which part of
    # the gradient on that edge is its own. None for a leaf, which nobody can overwrite.
    goes_to: tuple[Edge, Region | None] | None
    places: list[int] = field(default_factory=list[int])  # among the flat inputs


@dataclass
class _Frame:
    """A call that has begun and not yet returned."""

    call: CallTrace
    handled: BaseException | None  # what an `except` around the call was handling
    aliases: list[_Alias] = field(default_factory=list[_Alias])
    since: int = 0


class _Recorder:
    """The hooks of one block and what they share."""

    def __init__(self, model: nn.Module) -> None:
        self._calls: list[CallTrace] = []
        self._counts: Counter[str] = Counter()
        self._stack: list[_Frame] = []
        self._forwards = 0
        self._passes = Passes()
        # What each hooked node feeds, by its sequence number and entry.
        self._fed: dict[tuple[int, int, Region | None], list[Receiver]] = {}
        self._handles: list[RemovableHandle] = []
        self.recording = Recording(_names(model), self._calls)
        for name, module in _modules(model).items():
            self._attach(name, module)

    def remove_hooks(self) -> None:
        """Remove every hook, those on tensors and graph nodes still alive included."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def _attach(self, name: str, module: nn.Module) -> None:
        before = partial(self._before, name)
        self._handles += [
            module.register_forward_pre_hook(before, with_kwargs=True),
            module.register_forward_hook(
                self._after, with_kwargs=True, always_call=True
            ),
        ]
        for own, parameter in own_parameters(module).items():
            if parameter.requires_grad:
                self._hook(parameter, partial(self._passes.on_parameter, name, own))

    def _hook(self, tensor: Tensor, hook: Callable[[Tensor], None]) -> None:
        self._handles.append(cast(Any, tensor).register_hook(hook))

    def _hook_value(self, tensor: Tensor, hook: Callable[[Tensor], None]) -> None:
        """Hook the value a tensor has now, whatever overwrites it later."""
        self._hook(tensor, hook)
        if found := base_of(tensor):
            base, region = found
            self._hook(base, partial(_if_overwritten, watch(tensor), region, hook))

    def _before(
        self,
        name: str,
        module: nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        inputs = Tree.of((args, kwargs))
        frame = _Frame(self._begin(name, module, inputs), sys.exception())
        self._stack.append(frame)
        if not torch.is_grad_enabled():
            frame.call.no_pass_because = "gradients were disabled when it was called"
            return None
        frame.aliases = self._aliases(frame.call, inputs)
        frame.since = next_sequence_number()
        if not frame.aliases:
            return None
        handed = {p: a.tensor for a in frame.aliases for p in a.places}
        return inputs.filled(dict(enumerate(inputs.leaves)) | handed)

    def _begin(self, name: str, module: nn.Module, inputs: Tree) -> CallTrace:
        if self._stack:
            self._stack[-1].call.calls_others = True
        else:
            self._forwards += 1
        call = CallTrace(
            name,
            self._counts[name],
            self._forwards - 1,
            type(module).__name__,
            _kept(inputs),
            {own: p.requires_grad for own, p in own_parameters(module).items()},
        )
        self._counts[name] += 1
        self._calls.append(call)
        return call

    def _aliases(self, call: CallTrace, inputs: Tree) -> list[_Alias]:
        """Make an alias of each input that requires grad, hooked."""
        made: dict[int, _Alias] = {}  # one for a tensor passed in two places
        for place, leaf in enumerate(inputs.leaves):
            if isinstance(leaf, Tensor) and leaf.requires_grad:
                if id(leaf) not in made:
                    made[id(leaf)] = self._alias(call, leaf)
                made[id(leaf)].places.append(place)
                call.inputs_asked.append(place)
        return list(made.values())

    def _alias(self, call: CallTrace, tensor: Tensor) -> _Alias:
        original = _originals.get(tensor, tensor)
        alias = tensor.view_as(tensor)
        _originals[alias] = original
        made = _Alias(alias, original, watch(alias), _destination(original))
        share = Place("input_shares", made.places)
        self._hook(alias, partial(self._passes.on_share, call, share))
        self._hook_value(original, partial(self._passes.on_total, call, made.places))
        return made

    def _after(
        self, module: nn.Module, _args: object, _kwargs: object, output: object
    ) -> None:
        frame = self._stack.pop()
        raised = sys.exception()
        if output is None and raised is not None and raised is not frame.handled:
            frame.call.no_pass_because = f"its forward raised {type(raised).__name__}"
            return
        outputs = Tree.of(output)
        frame.call.output = _kept(outputs)
        if torch.is_grad_enabled():
            self._hook_outputs(frame, outputs)
            self._hook_graph(frame, module, outputs)

    def _hook_outputs(self, frame: _Frame, outputs: Tree) -> None:
        call = frame.call
        overwritten = {id(a.original) for a in frame.aliases if a.overwritten()}
        for place, leaf in enumerate(outputs.leaves):
            if isinstance(leaf, Tensor) and leaf.requires_grad:
                call.outputs_asked.append(place)
                hook = partial(self._passes.on_output, call, place)
                found = base_of(leaf)
                if found and id(_originals.get(leaf)) in overwritten:
                    # The caller may go on under the name it had: hook what they share.
                    base, region = found
                    self._hook(base, partial(_of_region, region, hook))
                else:
                    self._hook_value(leaf, hook)
        if not call.outputs_asked:
            call.no_pass_because = "its output does not require grad"

    def _hook_graph(self, frame: _Frame, module: nn.Module, outputs: Tree) -> None:
        """Hook the nodes that feed parameters and overwritten inputs."""
        parameters: dict[Tensor, list[Place]] = {
            parameter: [Place("param_shares", [own])]
            for own, parameter in own_parameters(module).items()
            if parameter.requires_grad
        }
        edges: dict[Edge, list[Place]] = {}
        for alias in frame.aliases:
            if alias.goes_to is not None and alias.overwritten():
                edge, region = alias.goes_to
                place = Place("input_shares", alias.places, region)
                edges.setdefault(edge, []).append(place)
        if not (parameters or edges):
            return
        for node, entry, places in edges_into(
            [
                leaf.grad_fn
                for leaf in outputs.leaves
                if isinstance(leaf, Tensor) and leaf.grad_fn is not None
            ],
            parameters=parameters,
            edges=edges,
            since=frame.since,
        ):
            for place in places:
                self._hook_node(node, entry, frame.call, place)

    def _hook_node(self, node: Node, entry: int, call: CallTrace, place: Place) -> None:
        key = (sequence_number(node), entry, place.region)
        fed = self._fed.setdefault(key, [])
        if not fed:
            hook = partial(self._passes.on_node, entry, fed)
            self._handles.append(node.register_hook(hook))
        fed.append((call, place))


def _of_region(region: Region, hook: Callable[[Tensor], None], grad: Tensor) -> None:
    """Call a view's hook with the view's part of the gradient of its base."""
    hook(region.of(grad))


def _if_overwritten(
    overwritten: Callable[[], bool],
    region: Region,
    hook: Callable[[Tensor], None],
    grad: Tensor,
) -> None:
    """Do the same, if the view was overwritten: its own hook is lost then."""
    if overwritten():
        _of_region(region, hook, grad)


def _names(model: nn.Module) -> dict[str, str]:
    """Return every name of every module, with the name it is recorded under."""
    first = {module: name for name, module in _modules(model).items()}
    every = _modules(model, remove_duplicate=False)
    return {name: first[module] for name, module in every.items()}


def _modules(model: nn.Module, remove_duplicate: bool = True) -> dict[str, nn.Module]:
    return dict(cast(Any, model).named_modules(remove_duplicate=remove_duplicate))


def _kept(tree: Tree) -> Tree:
    """Return the tree with its tensors kept at the values they have now."""
    return tree.map(lambda leaf: keep(leaf) if isinstance(leaf, Tensor) else leaf)


def _destination(tensor: Tensor) -> tuple[Edge, Region | None] | None:
    """Return where the gradient of `tensor` goes once it is overwritten."""
    source, region = base_of(tensor) or (tensor, None)
    if source.grad_fn is None:
        return None
    return (source.grad_fn, source.output_nr), region
