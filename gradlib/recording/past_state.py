"""The modules of a model, set back to what they were when a call began.

While they are, their parameters, buffers, hooks, attributes and modes are those of the
call; afterwards everything is as it was before.
"""

from collections.abc import Collection, Generator, Iterable, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from gradlib.finishing import finish
from gradlib.module_hook import NO_HOOKS
from gradlib.private.classes import in_slots
from gradlib.private.hooks import HOOKS, KIND_OF_BACKWARD_HOOKS
from gradlib.private.modules import (
    BUFFERS,
    CHILDREN,
    PARAMETERS,
    is_of_torch,
    own_buffers,
    own_children,
    own_parameters,
)
from gradlib.recording.attributes import (
    Change,
    Copies,
    be_like,
    fill_slots,
)
from gradlib.recording.history import History
from gradlib.recording.kept import Kept
from gradlib.recording.lazy_modules import draw_again
from gradlib.recording.past_attributes import NOT_KEPT, OF_TORCH
from gradlib.recording.replayable import explained, modules_of_call
from gradlib.recording.trace import CallTrace
from gradlib.values import clone, keep


class PastState:
    """The state that modules had when a call began."""

    def __init__(
        self, trace: CallTrace, history: History, change: Change, copies: Copies
    ) -> None:
        """Set nothing yet.

        Args:
            trace: The call.
            history: The model's history.
            change: Maps a recorded tensor to the one to use.
            copies: The copies of what stood in attributes, to which some are added.
        """
        self._trace = trace
        self._history = history
        self._change = change
        self._copies = copies
        # By id of the recorded value: a tensor in two places has only one.
        self._weights: dict[int, nn.Parameter] = {}
        self._are_set: Collection[nn.Module] = ()

    @contextmanager
    def set(self) -> Generator[None]:
        """Give the modules that a call may run their state, but for the attributes."""
        before = {module: dict(vars(module)) for module in self._modules()}
        filled = {module: in_slots(module) for module in before}
        steps = [
            partial(_put_back, module, state, filled[module])
            for module, state in before.items()
        ]
        # In the same dicts, which handles of hooks know: the call may remove a hook.
        places = [state[kind] for state in before.values() for kind in HOOKS]
        steps += [partial(_fill, hooks, hooks.copy()) for hooks in places]
        self._are_set = before.keys()
        self._history.is_set_back = True
        try:
            for module in before:
                self._set(module)
            yield
        finally:
            finish([*steps, partial(setattr, self._history, "is_set_back", False)])

    def set_attributes(self) -> None:
        """Give the modules copies of their attributes.

        Last: these may hold any parameter, buffer or argument.
        """
        moment = self._trace.moment
        stood = {it: self._history.attributes(it, moment) for it in self._are_set}
        called = self._trace.module
        # An object in several modules is as the called one held it, or else as the one
        # that was looked at first.
        order = sorted(stood, key=lambda it: (it is not called, stood[it].last))
        with explained(self._trace, "Copying the attributes for {}"):
            for module in order:
                state, then = vars(module), stood[module].found
                for name in state.keys() - OF_TORCH - then.keys():
                    del state[name]
                kept = {key: it for key, it in then.items() if it is not NOT_KEPT}
                state.update(kept)
                self._copies.put_into(module)
            self._copies.put_on_tensors()

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
