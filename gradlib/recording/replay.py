"""Computing a recorded call again, and its vector-Jacobian product (VJP).

The module itself is called. While it runs, its parameters, buffers, hooks and modes are
those of the call; afterwards everything is as it was before.
"""

from collections.abc import Callable, Generator, Iterable, Mapping
from contextlib import ExitStack, contextmanager
from copy import copy
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias, cast

import torch
from torch import Tensor, nn
from torch.nn.modules.lazy import LazyModuleMixin
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import is_lazy

from gradlib.errors import CannotReplayError
from gradlib.opaque import keep_opaque
from gradlib.private import (
    BACKWARD_PRE_HOOKS_OF,
    BUFFERS,
    CHILDREN,
    PARAMETERS,
    backward_pre_hooks,
    hook_tensor,
    is_of_torch,
    own_buffers,
    own_children,
    own_parameters,
    run_eagerly,
)
from gradlib.recording.attributes import (
    Copies,
    attributes,
    fill_slots,
    in_slots,
    tensors_with_graph,
)
from gradlib.recording.difference import shape_of
from gradlib.recording.kept import Kept
from gradlib.recording.lazy_modules import draw_again
from gradlib.recording.notes import input_name, note
from gradlib.recording.past_attributes import NOT_KEPT, OF_TORCH
from gradlib.recording.state import (
    AUTOCAST_DEVICES,
    History,
    World,
    random_state_kept,
)
from gradlib.recording.trace import BATCHED_PASS, Block, CallTrace, Key
from gradlib.storage import NotSaved
from gradlib.tree import Tree
from gradlib.values import came_from, clone, keep

Change: TypeAlias = Callable[[Tensor], Tensor]
"""Gives the value that takes the place of a recorded one, which is copied then."""


@dataclass(slots=True)
class Replayed:
    """A call computed again."""

    output: Tree
    # This call's share of the gradient of each input and own parameter. None where the
    # output has not the form it had, and what was recorded for it fits no more.
    shares: dict[Key, Tensor | None] | None
    # The attributes in which it left tensors that gradients can flow through.
    left_in: tuple[str, ...]


def replay(
    trace: CallTrace,
    number: int,
    change: Change = lambda kept: kept,
    begin: Callable[[], None] = lambda: None,
    turn: Callable[[], None] = lambda: None,
) -> Replayed:
    """Compute a call again, and its VJP with what a pass gave its output.

    Args:
        trace: The call.
        number: Our number of the backward pass.
        change: Gives what to put in the place of a recorded tensor.
        begin: Called before the module is. Hooks that it sets are gone afterwards.
        turn: Called between the forward and the backward.

    Raises:
        CannotReplayError: Too little is known of the call, or it raised.
    """
    history, world = _known(trace)
    before = trace.graph_before(number)
    if before is not None:
        fix = (
            "Without is_grads_batched, the first of its rows can be computed again"
            if before == BATCHED_PASS
            else f"{before.capitalize()} can be computed again"
        )
        raise CannotReplayError(
            f"Backward pass {number} may have gone through the graph of {before}, "
            "which had create_graph=True: then what it gave this call is more than the "
            f"VJP of the forward. {fix}."
        )
    if number in trace.block.unfinished:
        raise CannotReplayError(
            f"Backward pass {number} raised, or has not ended yet: what it gave this "
            "call may be a part."
        )
    with random_state_kept(_cuda_devices()), _eagerly():
        scene = _Scene(trace, history, change)
        with scene.set():
            begin()
            output = scene.run(world)
            grads = trace.gradients("outputs", number)
            turn()
            shares = scene.pull(output, grads) if _fit(grads, output) else None
            return Replayed(output.map(_detached), shares, scene.left_in(output))


def forward_again(trace: CallTrace, change: Change) -> Tree:
    """Compute a call's output again, from what `change` makes of the recorded values.

    Raises:
        CannotReplayError: Too little is known of the call.
    """
    history, world = _known(trace)
    with random_state_kept(_cuda_devices()), _eagerly():
        scene = _Scene(trace, history, change)
        with scene.set():
            return scene.run(world).map(_detached)


def no_pass(trace: CallTrace) -> CannotReplayError:
    """Return the error for a call that no backward pass has reached."""
    return CannotReplayError(
        f"There is no backward pass to compute again: {note(trace)}."
    )


def inputs_of(trace: CallTrace) -> dict[Key, Tensor]:
    """Return the recorded inputs and own parameters that required grad."""
    history, _ = _known(trace)
    # A parameter that is passed too is one leaf, under its name.
    not_asked = _idle(trace) | _passed_parameters(trace).keys()
    found: dict[Key, Tensor] = {
        place: leaf
        for place, leaf in enumerate(trace.inputs.leaves)
        if isinstance(leaf, Tensor) and place not in not_asked
    }
    own = history.at(cast(nn.Module, trace.module), trace.moment)
    found.update(
        (name, own[name].value)
        for name in trace.parameters
        if name in own and own[name].requires_grad
    )
    return found


def _idle(trace: CallTrace) -> set[Key]:
    """Return the inputs that required no grad, also when a checkpoint came back."""
    active = {key for flow in trace.flows for key in flow.shares}
    return set(trace.idle) - active


class _Scene:
    """A call's module and arguments, everything as it was when the call began."""

    def __init__(self, trace: CallTrace, history: History, change: Change) -> None:
        self._trace = trace
        self._module = cast(nn.Module, trace.module)
        self._history = history
        self._change = change
        # By id of the recorded value, which is the same for one tensor in two places.
        self._weights: dict[int, nn.Parameter] = {}
        self._leaves: dict[Key, Tensor] = {}
        self._shares: dict[int, Tensor] = {}  # by id of the leaf
        self._undo: Callable[[], None] = _nothing  # what is for the first call alone
        self._returned: object = None  # what the module returned last
        self._copies = Copies(change)  # of attributes

    @contextmanager
    def set(self) -> Generator[None]:
        """Give the module, and whatever it may call, the state they had."""
        before = {module: dict(vars(module)) for module in self._modules()}
        filled = {module: in_slots(module) for module in before}
        self._history.is_set_back = True
        try:
            for module in before:
                self._set(module)
            # They may hold any parameter or buffer.
            self._set_attributes(before)
            yield
        finally:
            for module, state in before.items():
                vars(module).clear()
                vars(module).update(state)
                fill_slots(module, filled[module])
            self._history.is_set_back = False

    def run(self, world: World) -> Tree:
        """Call the module."""
        args, kwargs = given = self._arguments()
        # What was recorded is what the hooks of every module had made of them, which
        # run before a module's own.
        self._undo = self._module.register_forward_pre_hook(
            partial(_instead, given), prepend=True, with_kwargs=True
        ).remove
        # The last of its hooks, as the recorder's is: for backward hooks torch makes
        # other tensors of the output.
        self._module.register_forward_pre_hook(self._begins)
        self._module.register_forward_hook(self._returns)
        vars(self._module)[BACKWARD_PRE_HOOKS_OF] = self._pre_hooks
        with _surrounded_by(world), self._explained("Computing {} again"):
            # Not the class's own __call__: what that changes was recorded as changed.
            return Tree.of(nn.Module.__call__(self._module, *args, **kwargs))

    def pull(
        self, output: Tree, grads: Mapping[Key, Tensor | None]
    ) -> dict[Key, Tensor | None]:
        """Return the gradients of the inputs and own parameters."""
        self._shares.clear()  # of passes that the call itself has run, as for forces
        returned = Tree.of(self._returned).leaves
        # What is returned twice is one tensor, and has one gradient.
        roots = {
            id(returned[place]): (leaf, grad.to(leaf.device, leaf.dtype))
            for place, leaf in enumerate(output.leaves)
            if (grad := grads.get(place)) is not None
        }
        # What was recorded for the output is what the hooks of the tensor made of it.
        for leaf in returned:
            if isinstance(leaf, Tensor):
                _remove_hooks_of_others(leaf)
        # As torch has it: autocast is for the forward.
        with _autocast({}), self._explained("Computing the gradients of {} again"):
            _go_back(list(roots.values()), list(self._leaves.values()))
        return {key: self._shares.get(id(leaf)) for key, leaf in self._leaves.items()}

    def left_in(self, output: Tree) -> tuple[str, ...]:
        """Return the attributes in which the call left tensors it did not return."""
        returned = {id(leaf) for leaf in output.leaves}
        return tuple(
            f"{path}.{name}".removeprefix(".")
            for path, module in cast(Any, self._module).named_modules()
            for name, value in attributes(module)
            for tensor in tensors_with_graph(value)
            if tensor not in self._copies and id(tensor) not in returned
        )

    @contextmanager
    def _explained(self, what: str) -> Generator[None]:
        try:
            yield
        except Exception as error:
            raise CannotReplayError(
                f"{what.format(label(self._trace))} raised {type(error).__name__}: "
                f"{error}"
            ) from error

    def _modules(self) -> Iterable[nn.Module]:
        """Return what the call may call: a module may know others than those in it."""
        inner = self._history.inside(self._module, self._trace.moment)
        if is_of_torch(type(self._module)) and len(inner) == 1:
            return inner
        return dict.fromkeys((*inner, *self._history.modules))

    def _set(self, module: nn.Module) -> None:
        moment, state = self._trace.moment, vars(module)
        now: dict[str, Any] = {**own_parameters(module), **own_buffers(module)}
        lazy = {name: it for name, it in now.items() if it is not None and is_lazy(it)}
        now = {name: it for name, it in now.items() if name not in lazy}
        parameters: dict[str, Any] = lazy.copy()
        buffers: dict[str, Any] = {}
        for name, kept in self._history.parameters(module, moment).items():
            parameters[name] = kept and self._weight(kept)
            if kept is not None:
                self._copies.know(now.get(name), parameters[name])
        for name, kept in self._history.buffers(module, moment).items():
            buffers[name] = kept and self._buffer(kept, now.get(name))
        for name in (*parameters, *buffers):
            state.pop(name, None)  # what has taken its place since
        state[PARAMETERS], state[BUFFERS] = parameters, buffers
        children = self._history.children(module, moment)
        for name in children.keys() - own_children(module).keys():
            state.pop(name, None)  # what has taken the child's place since
        state[CHILDREN] = children
        state["training"] = self._history.training(module, moment)
        for kind, hooks in self._history.hooks(module, moment).items():
            state[kind] = copy(hooks)  # one may take itself away
        made = self._history.made_since(module, moment)
        draw_again(module, self._history.kind(module, moment), made)
        if module is self._module:
            for name in self._trace.parameters:
                parameter = parameters.get(name)
                if parameter is not None and parameter.requires_grad:
                    if all(parameter is not it for it in self._leaves.values()):
                        self._take_share(parameter, parameter)
                    self._leaves[name] = parameter

    def _take_share(self, leaf: Tensor, given: Tensor) -> None:
        """Take the gradient of what the module is given, before its hooks change it.

        It comes in parts where a reentrant checkpoint runs a pass inside the pass.
        """

        def take(grad: Tensor | None) -> None:
            if grad is not None:
                known = self._shares.get(id(leaf))
                self._shares[id(leaf)] = keep(grad) if known is None else known + grad

        hook_tensor(given, take)

    def _pre_hooks(self) -> list[Callable[..., None]]:
        # What was recorded for the output is what these had made of it. With any set,
        # torch makes other tensors of what it is given and returns.
        return [_nothing for _ in backward_pre_hooks(self._module)]

    def _begins(self, *_: object) -> None:
        # If the module calls itself, those calls have all of its hooks.
        vars(self._module).pop(BACKWARD_PRE_HOOKS_OF, None)
        self._undo()

    def _returns(self, _module: nn.Module, _args: object, output: object) -> None:
        # If the module calls itself, it is the outermost call that returns last.
        self._returned = output

    def _set_attributes(self, modules: Iterable[nn.Module]) -> None:
        moment = self._trace.moment
        stood = {it: self._history.attributes(it, moment) for it in modules}
        # What several hold is what the called one held, or who was looked at first.
        order = sorted(stood, key=lambda it: at.last if (at := stood[it]) else 0)
        for module in sorted(order, key=lambda it: it is not self._module):
            state, then = vars(module), stood[module]
            if then is not None:
                for name in state.keys() - OF_TORCH - then.found.keys():
                    del state[name]
                state.update(
                    (name, value)
                    for name, value in then.found.items()
                    if value is not NOT_KEPT
                )
            with self._explained("Copying the attributes for {}"):
                for name, value in attributes(module):
                    state[name] = self._copies.of(value)
                filled = in_slots(module)
                made = map(self._copies.of, filled.values())
                fill_slots(module, dict(zip(filled, made, strict=True)))

    def _weight(self, kept: Kept) -> nn.Parameter:
        known = self._weights.get(id(kept.value))
        if known is None:
            made = keep(self._change(kept.value))
            known = nn.Parameter(made, requires_grad=kept.requires_grad)
            _be_like(known, kept.tensor)
            self._weights[id(kept.value)] = known
        return known

    def _buffer(self, kept: Kept, now: Tensor | None) -> Tensor:
        part = self._copies.part_of(now)
        if part is not None:
            return part
        made = self._change(kept.value)
        # As it was kept: the call may give a small one another size.
        made = made.clone() if kept.is_copy else keep(made)
        _be_like(made, kept.tensor)
        self._copies.know(now, made)
        return made

    def _arguments(self) -> Any:
        """Return copies: the module may overwrite them."""
        trace, idle = self._trace, _idle(self._trace)
        as_parameter = _passed_parameters(trace)
        made: dict[int, tuple[Tensor, Tensor]] = {}  # the leaf, and what is given
        filled: list[Any] = []
        for place, kept in enumerate(trace.inputs.leaves):
            if not isinstance(kept, Tensor):
                filled.append(keep_opaque(kept))
                continue
            if place in as_parameter:
                leaf = given = self._leaves[as_parameter[place]]
            elif id(kept) in made:
                leaf, given = made[id(kept)]
            else:
                leaf = given = keep(self._change(kept)).to(came_from(kept))
                if place not in idle:
                    leaf.requires_grad_()
                    given = clone(leaf)
                    self._take_share(leaf, given)
                made[id(kept)] = leaf, given
            filled.append(given)
            if place not in idle:
                self._leaves[place] = leaf
        return Tree(filled, trace.inputs.spec).build()


def _passed_parameters(trace: CallTrace) -> dict[int, str]:
    """Tell which inputs are own parameters: they have one share for both."""
    found: dict[int, str] = {}
    for flow in trace.flows:
        names = {id(flow.shares[key]): key for key in flow.shares}
        for key, grads in flow.shares.items():
            name = names[id(grads)]  # parameters come after inputs
            if isinstance(key, int) and isinstance(name, str):
                found[key] = name
    return found


def _go_back(roots: list[tuple[Tensor, Tensor]], leaves: list[Tensor]) -> None:
    if not roots or not leaves:
        return
    outputs, grads = zip(*roots, strict=True)
    if _has_reentrant_checkpoint(outputs):  # it refuses autograd.grad
        torch.autograd.backward(outputs, grads)
    else:
        torch.autograd.grad(outputs, leaves, grads, allow_unused=True)


def _be_like(made: Tensor, original: Tensor) -> None:
    """Give a copy the class of a parameter, and the attributes that a tensor has."""
    vars(made).update(vars(original))
    if type(made) is nn.Parameter and issubclass(type(original), nn.Parameter):
        cast(Any, made).__class__ = type(original)


def _nothing(*_: object) -> None:
    pass


def _instead(given: Any, *_: object) -> Any:
    return given


def _remove_hooks_of_others(tensor: Tensor) -> None:
    """Leave those of `hook_tensor` alone: each has itself as its key."""
    hooks: dict[Any, Any] = cast(Any, tensor)._backward_hooks or {}
    for key, hook in [*hooks.items()]:
        if key is not hook:
            del hooks[key]


def _has_reentrant_checkpoint(outputs: Iterable[Tensor]) -> bool:
    nodes = [it.grad_fn for it in outputs]
    seen = set(nodes)
    while nodes:
        node = nodes.pop()
        if node is None:
            continue
        if type(node).__name__ == "CheckpointFunctionBackward":
            return True
        new = {before for before, _ in node.next_functions} - seen
        seen |= new
        nodes += new
    return False


def _known(trace: CallTrace) -> tuple[History, World]:
    """Return what it takes to compute a call again, or say why it is not there."""
    history = must_be_replayable(trace.block)
    world, called = trace.world, trace.module
    assert world is not None, "it is kept with every history"
    assert called is not None, "it is kept with every history"
    if world.is_dual:
        raise CannotReplayError(
            f"{label(trace)} ran inside torch.autograd.forward_ad.dual_level(): its "
            "tensors may have carried tangents, which are not kept."
        )
    for module in history.inside(called, trace.moment):
        kind = history.kind(module, trace.moment)
        if kind is not type(module) and not issubclass(kind, LazyModuleMixin):
            raise CannotReplayError(
                f"{label(trace)} contains what was a {kind.__name__} then and is a "
                f"{type(module).__name__} now, whose forward may be another. Replay "
                "before you give a module another class, as "
                "torch.nn.utils.parametrize does."
            )
        if isinstance(module, torch.jit.ScriptModule):
            raise CannotReplayError(
                f"{label(trace)} contains a ScriptModule, whose weights cannot be "
                "replaced for a replay. Record the module it was made of."
            )
        if isinstance(module, DistributedDataParallel):
            raise CannotReplayError(
                f"{label(trace)} goes through DistributedDataParallel, which talks to "
                "other processes when it is called. Replay the module that it wraps, "
                'as recording["module"].replay().'
            )
        if _draws_by_itself(module, history.training(module, trace.moment)):
            raise CannotReplayError(
                f"{label(trace)} contains an {type(module).__name__} with dropout, "
                "whose random numbers cuDNN draws from a state of its own. Record and "
                "replay it under torch.backends.cudnn.flags(enabled=False), or without "
                "dropout."
            )
    _must_be_kept(trace)
    if any(isinstance(it, Tensor) and it.is_meta for it in trace.inputs.leaves):
        raise CannotReplayError(
            f"{label(trace)} was given tensors without values, or they were kept on "
            'the device "meta". Record with another device.'
        )
    return history, world


def _draws_by_itself(module: nn.Module, training: bool) -> bool:
    """Tell whether a call draws random numbers that no generator of torch gives.

    cuDNN makes the state that the dropout of an RNN is drawn from when a generator was
    set, and goes on with it: see get_dropout_state() in
    https://github.com/pytorch/pytorch/blob/357b8267a5eb930eeb73ebd3bc18b841a7c1f03b/aten/src/ATen/native/cudnn/RNN.cpp
    """
    return (
        isinstance(module, nn.RNNBase)
        and training
        and module.dropout > 0
        and module.num_layers > 1
        and cast(Any, torch.backends.cudnn).is_acceptable(module.weight_ih_l0)
    )


def _must_be_kept(trace: CallTrace) -> None:
    """Raise unless all that the call was given can be given again."""
    for place, leaf in enumerate(trace.inputs.leaves):
        kept = None if isinstance(leaf, Tensor) else keep_opaque(leaf)
        if isinstance(kept, NotSaved):
            raise CannotReplayError(
                f"{input_name(trace, place)} is of type {kept.text}, which cannot be "
                "kept as it was. A call can be computed again where it is given "
                "tensors, plain values and structures of these."
            )


def must_be_replayable(block: Block) -> History:
    """Return the model's history in a block.

    Raises:
        CannotReplayError: What a replay starts from was not kept.
    """
    for field in ("args", "grad_output"):
        if field not in block.fields:
            raise CannotReplayError(
                f'A replay needs "{field}", and record(keep=...) left it out. Record '
                'with keep=("args", "grad_output", ...).'
            )
    if block.history is None:
        raise CannotReplayError(
            "Nothing is left of the model's state at that call: the recording was made "
            "with reduce=, or loaded from a file. Replay where you record, without "
            "reduce=. Nor is there of weights that FSDP has sharded, or DTensors: "
            "replay a model that is whole."
        )
    return block.history


def label(trace: CallTrace) -> str:
    """Return how a message names a call."""
    return f'call {trace.index} of "{trace.name}"'


def _fit(grads: Mapping[Key, Tensor], output: Tree) -> bool:
    """Tell whether there is still an output for each gradient."""
    leaves = dict[Key, Any](enumerate(output.leaves))
    return all(
        isinstance(leaf := leaves.get(place), Tensor)
        and leaf.requires_grad
        and shape_of(leaf) == shape_of(grad)
        for place, grad in grads.items()
    )


def _detached(leaf: object) -> object:
    return leaf.detach() if isinstance(leaf, Tensor) else leaf


def _cuda_devices() -> range:
    return range(torch.cuda.device_count() if torch.cuda.is_initialized() else 0)


@contextmanager
def _eagerly() -> Generator[None]:
    with torch.inference_mode(False), run_eagerly():  # gradients are enabled then too
        yield


@contextmanager
def _surrounded_by(world: World) -> Generator[None]:
    """Set torch's generators and autocast as they were when a call began."""
    random = torch.frombuffer(bytearray(world.random), dtype=torch.uint8)
    torch.set_rng_state(random)
    for device, state in enumerate(world.cuda_random):
        torch.cuda.set_rng_state(state, device)
    with _autocast(world.autocast):
        yield


@contextmanager
def _autocast(dtypes: Mapping[str, torch.dtype]) -> Generator[None]:
    with ExitStack() as stack:
        for device in AUTOCAST_DEVICES:
            dtype = dtypes.get(device)
            if dtype is not None:
                stack.enter_context(torch.autocast(device, dtype))
            elif torch.is_autocast_enabled(device):
                stack.enter_context(torch.autocast(device, enabled=False))
        yield
