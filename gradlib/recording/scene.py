"""A call's module and arguments, as they were when it began, to run it again.

The module itself is called. While it runs, its parameters, buffers, hooks and modes are
those of the call; afterwards everything is as it was before.
"""

from collections.abc import Callable, Generator, Iterable, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeAlias, cast

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from gradlib.errors import CannotReplayError
from gradlib.finishing import finish
from gradlib.module_hook import AHEAD, NO_HOOKS, nothing
from gradlib.opaque import keep_opaque
from gradlib.private.hooks import (
    BACKWARD_PRE_HOOKS_OF,
    HOOKS,
    KIND_OF_BACKWARD_HOOKS,
    backward_pre_hooks,
    forward_pre_hooks,
    hooks_set,
)
from gradlib.private.modules import (
    BUFFERS,
    CHILDREN,
    PARAMETERS,
    is_of_torch,
    modules_in,
    own_buffers,
    own_children,
    own_parameters,
)
from gradlib.recording.attributes import (
    Copies,
    be_like,
    fill_slots,
    in_slots,
)
from gradlib.recording.go_back import go_back, take_share, without_hooks_of_others
from gradlib.recording.history import History
from gradlib.recording.kept import Kept
from gradlib.recording.lazy_modules import draw_again
from gradlib.recording.left_behind import left_in, left_in_arguments
from gradlib.recording.past_attributes import NOT_KEPT, OF_TORCH
from gradlib.recording.places import input_name
from gradlib.recording.replayable import label, modules_of_call
from gradlib.recording.trace import ARGUMENT, CallTrace, Key, Left
from gradlib.recording.world import World, autocast_set_to
from gradlib.tree import Tree
from gradlib.values import came_from, clone, keep

Change: TypeAlias = Callable[[Tensor], Tensor]
"""Maps a recorded tensor to the one that a replay uses, which is copied first."""


class Scene:
    """The model as it was when a call began."""

    def __init__(
        self, trace: CallTrace, history: History, world: World, change: Change
    ) -> None:
        """Set nothing yet.

        Args:
            trace: The call.
            history: The model's history.
            world: What the call began in.
            change: Maps a recorded tensor to the one to use.
        """
        self._trace = trace
        self._module = cast(nn.Module, trace.module)
        self._history = history
        self._world = world
        self._change = change
        # By id of the recorded value: a tensor in two places has only one.
        self._weights: dict[int, nn.Parameter] = {}
        self._leaves: dict[Key, Tensor] = {}
        self._given: dict[int, Tensor] = {}  # the inputs that required grad, by place
        self._shares: dict[int, Tensor] = {}  # by id of the leaf
        self._arguments: Any = ((), {})
        self._passed: tuple[Any, ...] = ()  # the arguments
        self._versions: dict[str, int] = {}  # of own parameters, as the call began
        self._undo: Callable[[], None] = nothing  # removes the hook that gives inputs
        self._returned: object = None  # what the module returned last
        self._hooks_set = 0  # how many torch had set before the module was called
        self._copies = Copies(change)  # of attributes

    @contextmanager
    def set(self) -> Generator[None]:
        """Give the module, and those that it may call, the state that they had."""
        before = {module: dict(vars(module)) for module in self._modules()}
        filled = {module: in_slots(module) for module in before}
        steps = [
            partial(_put_back, module, state, filled[module])
            for module, state in before.items()
        ]
        # In the same dicts, which handles of hooks know: the call may remove a hook.
        places = [state[kind] for state in before.values() for kind in HOOKS]
        steps += [partial(_fill, hooks, hooks.copy()) for hooks in places]
        self._history.is_set_back = True
        try:
            for module in before:
                self._set(module)
            # Last: attributes may hold any parameter, buffer or argument.
            self._arguments = self._copied_arguments()
            self._set_attributes(before)
            yield
        finally:
            finish([*steps, partial(setattr, self._history, "is_set_back", False)])

    def run(self) -> Tree:
        """Call the module, and return its output."""
        args, kwargs = self._arguments
        self._passed = *args, *kwargs.values()
        own = self._trace.parameters
        self._versions = {
            it: self._leaves[it]._version for it in own if it in self._leaves
        }
        self._give_arguments()
        # They run last, as the recorder's do. For backward hooks torch makes other
        # tensors of the output after that.
        self._module.register_forward_pre_hook(self._begins)
        self._module.register_forward_hook(self._returns)
        vars(self._module)[BACKWARD_PRE_HOOKS_OF] = self._pre_hooks
        self._hooks_set = hooks_set()
        with self._world.in_force(), self._explained("Computing {} again"):
            # Not the class's own __call__: the recorded values have its changes.
            return Tree.of(nn.Module.__call__(self._module, *args, **kwargs))

    def pull(
        self,
        output: Tree,
        left: Mapping[Left, Tensor],
        grads: Mapping[Key | Left, Tensor],
        autocast: Mapping[str, torch.dtype],
    ) -> dict[Key, Tensor | None]:
        """Return the gradients of the inputs and own parameters.

        Args:
            output: What the call returned.
            left: What it left in attributes and buffers, as `left` gives it.
            grads: The gradients of the output's tensors, by place, and of these.
            autocast: The dtypes of autocast in the pass, by device type.
        """
        self._shares.clear()  # of passes that the call itself has run, as for forces
        returned = Tree.of(self._returned).leaves
        # A tensor returned twice has one gradient. It is copied, as hooks and backwards
        # may write over it.
        ends = [
            (place, id(returned[place]), it) for place, it in enumerate(output.leaves)
        ]
        ends += [(key, id(it), it) for key, it in left.items()]
        roots = {
            of: (leaf, keep(grad).to(leaf.device, leaf.dtype))
            for key, of, leaf in ends
            if (grad := grads.get(key)) is not None
        }
        tensors = [it for it in (*returned, *left.values()) if isinstance(it, Tensor)]
        with (
            without_hooks_of_others(tensors, self._hooks_set),
            autocast_set_to(autocast),
            self._explained("Computing the gradients of {} again"),
        ):
            go_back(list(roots.values()), list(self._leaves.values()))
        return {key: self._shares.get(id(leaf)) for key, leaf in self._leaves.items()}

    def left(self) -> dict[Left, Tensor]:
        """Return the tensors that the call made and left, and did not return."""
        found: dict[Left, Tensor] = {
            (module, name, place): tensor
            for module in modules_in(self._module)
            for name, place, tensor in left_in(module)
        }
        for place, tensor in left_in_arguments(self._passed):
            found[self._module, ARGUMENT, place] = tensor
        returned = {id(leaf) for leaf in Tree.of(self._returned).leaves}
        given = {id(it) for it in self._given.values()}
        return {
            key: it
            for key, it in found.items()
            if it._version or not (id(it) in given or it in self._copies)
            if id(it) not in returned
        }

    def overwritten(self) -> tuple[str, ...]:
        """Return the names of the inputs that the call has overwritten: ``args[0]``."""
        return tuple(
            input_name(self._trace, place)
            for place, given in self._given.items()
            if given._version
        )

    def written(self) -> tuple[str, ...]:
        """Return the own parameters to which the call wrote, unseen by autograd."""
        return tuple(
            name
            for name, version in self._versions.items()
            if self._leaves[name]._version != version
        )

    @contextmanager
    def _explained(self, what: str) -> Generator[None]:
        try:
            yield
        except Exception as error:
            # contextlib would take the new error for a StopIteration that caused it.
            cause = None if isinstance(error, StopIteration) else error
            said = f"{type(error).__name__}: {error}".removesuffix(": ")
            raise CannotReplayError(
                f"{what.format(label(self._trace))} raised {said}"
            ) from cause

    def _modules(self) -> Iterable[nn.Module]:
        """Return the modules that may run and have to be set.

        A call may use others than those inside its module. Those that still stand as
        they did need not be set, and may not be written to: what a call wrote has
        changed since.
        """
        inner = modules_of_call(self._trace, self._history)
        if all(map(self._calls_no_others, inner)):
            return inner
        others = self._history.changed(self._trace.moment, inner)
        return dict.fromkeys((*inner, *others))

    def _calls_no_others(self, module: nn.Module) -> bool:
        """Tell whether a module is torch's own, with nothing added to what it runs."""
        moment, history = self._trace.moment, self._history
        return (
            is_of_torch(type(module))
            and history.hooks(module, moment) is NO_HOOKS
            and "forward" not in history.attributes(module, moment).names
        )

    def _set(self, module: nn.Module) -> None:
        """Give a module the state that it had, but for its attributes."""
        moment, state = self._trace.moment, vars(module)
        self._set_tensors(module)
        children = self._history.children(module, moment)
        for name in children.keys() - own_children(module).keys():
            state.pop(name, None)  # what has taken the child's place since
        state[CHILDREN] = children
        state["training"] = self._history.training(module, moment)
        hooks = self._history.hooks(module, moment)
        state[KIND_OF_BACKWARD_HOOKS] = hooks[KIND_OF_BACKWARD_HOOKS]
        for kind in HOOKS:
            _fill(state[kind], hooks[kind])
        made = self._history.made_since(module, moment)
        draw_again(module, self._history.kind(module, moment), made)
        if module is self._module:
            self._ask_for_parameters()

    def _set_tensors(self, module: nn.Module) -> None:
        """Give a module copies of the parameters and buffers that it had."""
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

    def _ask_for_parameters(self) -> None:
        """Have a pass take the shares of the called module's own parameters."""
        own, not_asked = own_parameters(self._module), self._trace.never_asked()
        for name in self._trace.parameters:
            parameter = own.get(name)
            if parameter is not None and name not in not_asked:
                # Under a checkpoint it may have required no grad at first.
                parameter.requires_grad_()
                if all(parameter is not it for it in self._leaves.values()):
                    take_share(self._shares, parameter, parameter)
                self._leaves[name] = parameter

    def _give_arguments(self) -> None:
        """Give the call the recorded arguments, at the place of the recorder's hook.

        The hooks before that had made them what they are: global ones, and those of the
        module that were put before the recorder's in that forward.
        """
        self._undo = self._module.register_forward_pre_hook(
            self._give, prepend=True, with_kwargs=True
        ).remove
        hooks = self._history.hooks(self._module, self._trace.moment)
        own = forward_pre_hooks(self._module)
        for key in [*own][hooks[AHEAD] : 0 : -1]:
            own.move_to_end(key, last=False)

    def _give(self, *_: object) -> Any:
        return self._arguments

    def _pre_hooks(self) -> list[Callable[..., None]]:
        # The recorded gradient is what these had made of it. Stand-ins are needed: with
        # any set, torch makes other tensors of the module's inputs and outputs.
        return [nothing for _ in backward_pre_hooks(self._module)]

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
        # An object in several modules is as the called one held it, or else as the one
        # that was looked at first.
        order = sorted(stood, key=lambda it: (it is not self._module, stood[it].last))
        with self._explained("Copying the attributes for {}"):
            for module in order:
                state, then = vars(module), stood[module].found
                for name in state.keys() - OF_TORCH - then.keys():
                    del state[name]
                kept = {key: it for key, it in then.items() if it is not NOT_KEPT}
                state.update(kept)
                self._copies.put_into(module)
            self._copies.put_on_tensors()

    def _weight(self, kept: Kept) -> nn.Parameter:
        known = self._weights.get(id(kept.value))
        if known is None:
            made = keep(self._change(kept.value))
            known = nn.Parameter(made, requires_grad=kept.requires_grad)
            be_like(known, kept.tensor)
            self._weights[id(kept.value)] = known
        return known

    def _buffer(self, kept: Kept, now: Tensor | None) -> Tensor:
        part = self._copies.part_of(now)
        if part is not None:
            return part
        made = self._change(kept.value)
        # Copied as when it was kept: the call may resize a small one.
        made = made.clone() if kept.is_copy else keep(made)
        if kept.requires_grad:  # not a leaf: torch refuses writes to one
            made = clone(made.requires_grad_())
        be_like(made, kept.tensor)
        self._copies.know(now, made)
        return made

    def _copied_arguments(self) -> Any:
        """Return copies of the arguments: the module may overwrite these."""
        trace, not_asked = self._trace, self._trace.never_asked()
        as_parameter = trace.passed_parameters()
        made: dict[int, tuple[Tensor, Tensor]] = {}  # the leaf, and what is given
        filled: list[Any] = []
        for place, kept in enumerate(trace.inputs.leaves):
            if not isinstance(kept, Tensor):
                module = trace.given_modules.get(place)
                filled.append(keep_opaque(kept) if module is None else module)
                continue
            if place in as_parameter:
                leaf = given = self._leaves[as_parameter[place]]
            elif id(kept) in made:
                leaf, given = made[id(kept)]
            else:
                leaf = given = keep(self._change(kept)).to(came_from(kept))
                if place not in not_asked:
                    leaf.requires_grad_()
                    given = clone(leaf)
                    take_share(self._shares, leaf, given)
                made[id(kept)] = leaf, given
            if (original := trace.held_inputs.get(place)) is not None:
                self._copies.know_given(original, given)
            filled.append(given)
            if place not in not_asked:
                self._leaves[place], self._given[place] = leaf, given
        return Tree(filled, trace.inputs.spec).build()


def _put_back(
    module: nn.Module, state: Mapping[str, Any], filled: Mapping[Any, Any]
) -> None:
    """Give a module back its state. This may be interrupted, and is then run again."""
    now = vars(module)
    now.update(state)
    for name in now.keys() - state.keys():
        now.pop(name, None)
    if [*now] != [*state]:  # their order counts too
        now.clear()
        now.update(state)
    fill_slots(module, filled)


def _fill(hooks: dict[int, Any], others: Mapping[int, Any]) -> None:
    """Replace the hooks in a dict, which stays the same object."""
    hooks.clear()
    hooks.update(others)
