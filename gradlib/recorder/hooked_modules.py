"""The modules of a model, hooked for a block, and the names of their calls.

The only file of the recorder that sets hooks on modules. It builds on hooks of tensors
and of graph nodes, not on full backward hooks: those raise on in-place operations and
see only tensors and tuples of tensors.
"""

import itertools
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator
from contextlib import suppress
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_module_registration_hook
from torch.optim.optimizer import register_optimizer_step_post_hook

from gradlib.finishing import finish
from gradlib.module_hook import (
    ModuleHook,
    copy_without_ours,
    nothing,
    remove_stopped,
    stop_all,
)
from gradlib.private.hooks import (
    hook_dicts,
    hook_modules,
    hook_numbers,
    put_after_others,
    put_before_others,
    unhook_modules,
)
from gradlib.private.modules import modules_in, own_parameters, what_stands_in
from gradlib.recorder.hooked import Hooked
from gradlib.recorder.module_calls import ModuleCalls
from gradlib.recorder.uncalled import note_used_directly, why_no_call
from gradlib.recording.trace import NOT_CHOSEN, Block
from gradlib.selection import (
    COMPILED,
    are_equal,
    first_names,
    has_own_call,
    modules_of,
    uncompiled,
)
from gradlib.sharded import flattened, swaps_parameters


class HookedModules:
    """The modules of a model, with those that are added to it in the block."""

    def __init__(
        self,
        model: nn.Module,
        chosen: Callable[[str, nn.Module], bool],
        block: Block,
        calls: ModuleCalls,
        places: dict[nn.Module, str],
        names: dict[str, str],
    ) -> None:
        """Begin with no hook.

        Args:
            model: The model.
            chosen: Tells whether to record a module, by the name of its place.
            block: What all calls have in common.
            calls: Writes down the calls that the hooks see.
            places: The modules in the model, each with its place: the name it has now.
                It is kept up to date.
            names: The name under which the calls of the module in a place are found,
                by each name of the place. It is kept up to date too.
        """
        self._model = model
        self._chosen = chosen
        self._block = block
        self._calls = calls
        self._places = places
        self._names = names
        self._flattened = flattened(model)
        self._hooked: dict[nn.Module, Hooked] = {}
        # By name, which several modules may have one after the other. No two threads
        # get the same index.
        self._calls_of: defaultdict[str, Iterator[int]] = defaultdict(itertools.count)
        self._hook_dicts: list[dict[int, Any]] = []  # of all modules in the model
        self._seen: tuple[Any, Any] = None, None  # what stood there at the last look
        self._hooks: dict[nn.Module, tuple[ModuleHook, ModuleHook]] = {}
        self._undo: list[Callable[[], None]] = []

    def attach(self) -> None:
        """Hook every module, and those that are added later."""
        for module, name in self._places.items():
            self._attach(name, name, module)
        hook_modules(self._hooks)
        self._undo.append(copy_without_ours())
        self._hook_dicts = hook_dicts(self._places)
        self._seen = self._what_stands()
        added = register_module_module_registration_hook(self._added)
        self._undo.append(added.remove)
        if (history := self._block.history) is not None:
            learned = register_optimizer_step_post_hook(history.stepped)
            self._undo.append(learned.remove)
        self._calls.when_forward_begins = self._look_for_new

    def detach(self) -> None:
        """Remove every hook from the modules."""
        finish(
            (
                partial(self._detach, self._hooks),
                *self._undo,
                self._undo.clear,
                self._let_go,
            )
        )

    def _let_go(self) -> None:
        self._calls.when_forward_begins = nothing  # else a reference cycle keeps all

    def remove_stopped(self) -> None:
        """Remove our hooks from modules that took them over from one they replace."""
        with suppress(RuntimeError):  # another thread changes the model
            remove_stopped(self._standing())

    def note_used_directly(self) -> None:
        """Say which modules got gradients for their parameters and were not called."""
        note_used_directly(self._hooked.values(), self._block.left_out)

    def _standing(self) -> Collection[nn.Module]:
        """Return the modules that were in the model, and those that are now."""
        if self._seen[0] == what_stands_in(self._places):
            return self._places.keys()
        return {*self._places, *modules_in(self._model)}

    def _attach(self, name: str, place: str, module: nn.Module) -> None:
        """Make the hooks of a module that was chosen, which `hook_modules` sets.

        Args:
            name: The name under which its calls are recorded.
            place: The name it has in the model now.
            module: The module.
        """
        if isinstance(module, torch.jit.ScriptModule):
            self._block.left_out[name] = "a ScriptModule takes no hooks"
            return
        is_left_out = not self._is_chosen(name, place, module)
        if is_left_out and place:
            return  # the model itself is hooked all the same, to count the forwards
        if has_own_call(module):  # said only where no call was seen
            self._block.left_out[name] = why_no_call(module)
        calls = self._calls
        hooked = Hooked(name, module, self._calls_of[name], is_left_out=is_left_out)
        self._hooked[module] = hooked
        if own := own_parameters(module):
            calls.parameters.meet(hooked, own)
        before = ModuleHook(calls.before, hooked)
        after = ModuleHook(calls.after, hooked)
        hooked.before_id, hooked.after_id = id(before), id(after)
        self._hooks[module] = before, after
        views = self._flattened.get(module)
        if views is not None or swaps_parameters(module):
            swapped = ModuleHook(calls.swapped, views)
            self._undo.append(module.register_forward_pre_hook(swapped).remove)

    def _detach(self, hooks: dict[nn.Module, tuple[ModuleHook, ModuleHook]]) -> None:
        """Take away hooks again, and stop them wherever they stand."""
        unhook_modules(hooks)
        stop_all(itertools.chain.from_iterable(hooks.values()))
        hooks.clear()

    def _is_chosen(self, name: str, place: str, module: nn.Module) -> bool:
        if self._chosen(place, module):
            self._block.left_out.pop(name, None)  # an earlier module there may be
            return True
        self._block.left_out[name] = NOT_CHOSEN
        return False

    def _added(self, parent: nn.Module, key: str, module: nn.Module | None) -> None:
        """Hook what is added to a module while the block runs."""
        history = self._block.history
        if module is None or (history is not None and history.is_set_back):
            return
        place = self._places.get(parent)
        if place is None:
            return
        hooked_before = len(self._hooks)
        for path, inner in modules_of(module, remove_duplicate=False).items():
            name = ".".join(it for it in (place, key, path) if it)
            if inner in self._places:
                self._note_twin(name, inner)
            else:
                self._places[inner] = name
                self._name_place(name, name)
                if inner not in self._hooked:
                    self._attach(name, name, inner)
        new = itertools.islice(self._hooks.items(), hooked_before, None)
        hook_modules(dict(new))

    def _look_for_new(self) -> None:
        """Look for new modules and new hooks in the model as a forward begins.

        ``Sequential.insert`` does not call the hook that tells of a new module.
        """
        if self._seen == self._what_stands():
            return
        try:
            every = modules_of(self._model, remove_duplicate=False)
        except RuntimeError:  # another thread changes the model: wait for the next look
            return
        self._name_all(every)
        hook_modules(self._hooks)  # new ones, and those that others took away
        for module in self._places:
            if (hooked := self._hooked.get(module)) is not None:
                put_before_others(module, hooked.before_id)
                put_after_others(module, hooked.after_id)
        if self._block.history is not None:
            self._block.history.has_changed = True
        self._hook_dicts = hook_dicts(self._places)
        self._seen = self._what_stands()

    def _what_stands(self) -> tuple[Any, Any]:
        return what_stands_in(self._places), hook_numbers(self._hook_dicts)

    def _name_all(self, every: dict[str, nn.Module]) -> None:
        """Name modules after their places now, and hook the new ones.

        A module that was called keeps the name of its calls. Another module that is now
        in its old place gets a name of its own.

        Args:
            every: The modules of the model, by each of their places.
        """
        every = self._without_twins(every)
        standing = first_names(every)
        called = {it.name for it in self._hooked.values() if it.was_called}
        kept = {
            hooked.name
            for module in standing
            if (hooked := self._hooked.get(module)) is not None and hooked.was_called
        }
        self._places.clear()
        for module, place in standing.items():
            self._places[module] = place
            hooked, name = self._hooked.get(module), place
            while name in kept:
                name += " (new)"
            if hooked is None:
                self._attach(name, place, module)
            elif not hooked.was_called:
                hooked.rename(name, self._calls_of[name])
                if not self._is_chosen(name, place, module) and place:
                    self._detach({module: self._hooks.pop(module)})
                    del self._hooked[module]
        for place, module in every.items():
            hooked = self._hooked.get(module)
            if hooked is None or place in called:
                self._name_place(place, place)
            else:
                self._name_place(place, hooked.name)
                self._names[hooked.name] = hooked.name

    def _without_twins(self, every: dict[str, nn.Module]) -> dict[str, nn.Module]:
        """Return modules by their places, but for those that only equal one of ours."""
        first = {it: it for it in self._places}
        apart: dict[str, nn.Module] = {}
        for place, module in every.items():
            if first.setdefault(module, module) is module:
                apart[place] = module
            else:
                self._leave_out(place, module)
        return apart

    def _note_twin(self, place: str, module: nn.Module) -> None:
        """Leave out a module that equals one of ours, unless it is that one."""
        hooked = self._hooked.get(module)
        if hooked is not None and hooked.module is module:
            return
        if not any(it is module for it in self._places):
            self._leave_out(place, module)

    def _leave_out(self, place: str, module: nn.Module) -> None:
        """Say of a module that it is not recorded, as it equals another."""
        if self._block.history is not None:
            self._block.history.meet_twin(module)
        called = {it.name for it in self._hooked.values() if it.was_called}
        name = place
        while name in called:  # it stands in the place of that one
            name += " (new)"
        self._name_place(name, name)
        if self._is_chosen(name, place, module):
            said = are_equal(type(module).__name__)
            self._block.left_out[name] = f"it and another module are two, but {said}"

    def _name_place(self, place: str, name: str) -> None:
        """Note the name under which the calls of the module in a place are found."""
        self._names[place] = name
        if COMPILED in place:
            self._names.setdefault(uncompiled(place), name)
