"""What stood in the modules of a model at each moment, for replays of its calls."""

from collections.abc import Collection, Generator, Mapping
from contextlib import contextmanager
from typing import Any, Final, Literal

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from gradlib.module_hook import NO_HOOKS, all_are_ours, hooks_of_others
from gradlib.private.hooks import (
    any_global_hook,
    hooks_set,
)
from gradlib.private.modes import (
    enable_grad,
    grad_is_enabled,
)
from gradlib.private.modules import (
    is_of_torch,
    modules_in,
    own_buffers,
    own_children,
    own_parameters,
)
from gradlib.recording.kept import Kept
from gradlib.recording.past_attributes import Attributes, PastAttributes
from gradlib.recording.seen import Children, Hooks, Seen, Tensors, are_as_kept
from gradlib.recording.standing import Standing
from gradlib.recording.world import World, world_now
from gradlib.selection import modules_of


class History:
    """The weights, buffers, modes, children and hooks of a model at each moment.

    A moment is a number that grows. A value is kept again only when it has changed.
    """

    def __init__(self, modules: Collection[nn.Module]) -> None:
        """Begin with nothing known of `modules`, to which some may be added."""
        self._modules = modules
        self._seen: dict[nn.Module, Seen] = {}
        # What is kept of each tensor, by its id. None is kept as None.
        self._kept: dict[int, Kept | None] = {id(None): None}
        self._attributes = PastAttributes()
        self.in_attributes = self._attributes.tensors
        self.is_set_back = False  # while a call is replayed
        # Whether children or hooks of the modules have changed since the last look.
        self.has_changed = True
        self._looked = -1  # when the last forward began
        self._hooks_set = -1  # how many hooks torch had set then
        self._world: World | None = None
        self._all_are_hooked = False  # by a global module hook
        # Modules that equal one of ours, each with the moment since which it is known.
        self._twins: list[tuple[int, nn.Module]] = []
        self._standing: Standing | None = None  # while it is used for several replays

    def look(self, moment: int) -> None:
        """Keep what has changed since the last look."""
        were_enabled = grad_is_enabled()
        try:  # before the change: an interrupt may come right after it
            enable_grad(False)  # once, and not for each tensor
            self._look(moment)
        finally:
            enable_grad(were_enabled)

    def _look(self, moment: int) -> None:
        known = self._seen.get
        for module in self._modules:
            seen = known(module)
            if seen is None:
                self._meet(module, moment)
            else:
                self._look_again(seen, module, moment)
        if self.has_changed:
            self._meet_hooks(moment)
            self.has_changed = False
        self._looked, self._all_are_hooked = moment, any_global_hook()
        self._hooks_set = hooks_set()

    def forward_ends(self, moment: int) -> None:
        """Keep what a forward has left in the attributes.

        Modules of torch change none of their attributes.
        """
        if all(map(is_of_torch, {*map(type, self._modules)})):
            return
        for module in self._modules:
            seen = self._seen.get(module)
            if seen is not None and not is_of_torch(type(module)):
                self._look_at_attributes(seen, module, moment, seen.last + 1)

    def meet(self, module: nn.Module, moment: int) -> None:
        """Keep tensors that a call is the first to use, or made in a lazy module."""
        seen = self._known(module, moment)
        self._look_at_tensors(seen, "parameters", own_parameters(module), moment)
        self._look_at_tensors(seen, "buffers", own_buffers(module), moment)

    def meet_given(self, module: nn.Module, moment: int) -> bool:
        """Keep what stands in a module among the arguments, if it is of the model."""
        is_ours = module in self._modules
        if is_ours:
            self._look_at_called(module, moment)
        return is_ours

    def meet_twin(self, module: nn.Module) -> None:
        """Note a module that is none of ours, but for which its class takes it."""
        if not any(it is module for _, it in self._twins):
            self._twins.append((self._looked, module))

    def has_twin(self, module: nn.Module, moment: int) -> bool:
        """Tell whether one was met by a moment that stands in `module` now."""
        twins = {id(twin) for since, twin in self._twins if since < moment}
        if not twins:
            return False
        inside = modules_of(module, remove_duplicate=False).values()
        return any(id(it) in twins for it in inside)

    def _meet_hooks(self, moment: int) -> None:
        """Keep the hooks of all modules anew; this is fast where there are none."""
        have_none = all_are_ours(self._modules)
        for module in self._modules:
            seen = self._seen.get(module)
            if seen is not None and not (have_none and seen.hooks is None):
                self._look_at_hooks(seen, module, moment)

    def _look_at_hooks(self, seen: Seen, module: nn.Module, since: int) -> None:
        have_none = all_are_ours((module,))
        found = None if have_none else (type(module), hooks_of_others(module))
        if found != seen.hooks:
            seen.change("hooks", found, since)
            self.has_changed = True  # it may be gone by the next forward: look again

    def stepped(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        """Keep an optimizer's parameters anew: writes of a fused one leave no sign."""
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                self._kept.pop(id(parameter), None)

    def world(
        self, module: nn.Module, moment: int, autocast: dict[str, torch.dtype]
    ) -> World:
        """Keep the state in which a call of `module` begins now, under `autocast`.

        Returns:
            The state outside of the model.
        """
        self._look_at_called(module, moment)
        self._world = world_now(module, self._world, autocast, self._all_are_hooked)
        return self._world

    def children(self, module: nn.Module, moment: int) -> Children:
        """Return the children that `module` had at a moment."""
        return dict(self._known(module, moment).at("children", moment))

    def inside(self, module: nn.Module, moment: int) -> dict[nn.Module, str]:
        """Return `module` and all modules inside it at a moment.

        Returns:
            By module the prefix of its names: ``""`` for `module`, ``"0."`` for a
            child.
        """
        prefixes, waiting = {module: ""}, [module]
        for it in waiting:
            for name, child in self.children(it, moment).items():
                if child is not None and child not in prefixes:
                    prefixes[child] = f"{prefixes[it]}{name}."
                    waiting.append(child)
        return prefixes

    def whole(self, module: nn.Module, moment: int) -> dict[str, Kept]:
        """Return all parameters and buffers in `module` at a moment, by kind and name.

        Returns:
            The keys are as ``"param 0.weight"`` and ``"buffer running_mean"``.
        """
        return {
            f"{kind} {prefix}{name}": kept
            for it, prefix in self.inside(module, moment).items()
            for kind, own in (
                ("param", self.parameters(it, moment)),
                ("buffer", self.buffers(it, moment)),
            )
            for name, kept in own.items()
            if kept is not None
        }

    def at(self, module: nn.Module, moment: int) -> dict[str, Kept]:
        """Return the own parameters and buffers that `module` had at a moment."""
        both = self.parameters(module, moment) | self.buffers(module, moment)
        return {name: kept for name, kept in both.items() if kept is not None}

    def parameters(self, module: nn.Module, moment: int) -> Tensors:
        """Return the own parameters that `module` had at a moment.

        A tensor that stood in two places is one `Kept` here too.
        """
        return self._known(module, moment).at("parameters", moment)

    def buffers(self, module: nn.Module, moment: int) -> Tensors:
        """Return the own buffers that `module` had at a moment, in the same way."""
        return self._known(module, moment).at("buffers", moment)

    def made_since(self, module: nn.Module, moment: int) -> dict[str, Tensor]:
        """Return the first values of the weights that a module lacked at a moment."""
        return {
            name: self.at(module, last_lazy)[name].value
            for name, last_lazy in self._known(module, moment).filled.items()
            if moment <= last_lazy
        }

    def attributes(self, module: nn.Module, moment: int) -> Attributes:
        """Return the attributes that `module` had at a moment."""
        return self._known(module, moment).at("attributes", moment)

    def hooks(self, module: nn.Module, moment: int) -> dict[str, Any]:
        """Return the hooks `module` had at a moment, by the attribute they stood in."""
        known: Hooks | None = self._known(module, moment).at("hooks", moment)
        if known is None:
            return NO_HOOKS
        # A lazy module has taken another class since, without the methods hooks call.
        return known[1] if known[0] is type(module) else hooks_of_others(module)

    def training(self, module: nn.Module, moment: int) -> bool:
        """Tell whether `module` was in training at a moment."""
        return self._known(module, moment).at("training", moment)

    def kind(self, module: nn.Module, moment: int) -> type[nn.Module]:
        """Return the class that `module` had at a moment."""
        return self._known(module, moment).at("kind", moment)

    @contextmanager
    def looked_at_once(self) -> Generator[None]:
        """Compare the modules with what is known of them once for several replays."""
        self._standing = Standing(self._seen, self._modules)
        try:
            yield
        finally:
            self._standing = None

    def changed(self, moment: int, inner: Collection[nn.Module]) -> list[nn.Module]:
        """Return the modules that are not known to be as they were at a moment.

        With them come those that share a weight or buffer with modules in `inner`.
        """
        standing = self._standing or Standing(self._seen, self._modules)
        held = {id(kept) for it in inner for kept in self.at(it, moment).values()}
        return standing.changed(moment, held)

    def _known(self, module: nn.Module, moment: int) -> Seen:
        """Return what is known of a module; one first seen later is as it was then."""
        seen = self._seen.get(module)
        if seen is None:
            seen = self._meet(module, moment)
            self._look_at_hooks(seen, module, moment)
        return seen

    def _meet(self, module: nn.Module, moment: int) -> Seen:
        """Look at a module for the first time."""
        seen = Seen(
            moment,
            getattr(module, "training", False),  # no frozen ScriptModule has one
            type(module),
            dict(own_children(module)),
            self._attributes.of(module, moment),
        )
        if own := own_parameters(module):
            self._look_at_tensors(seen, "parameters", own, moment)
        if own := own_buffers(module):
            self._look_at_tensors(seen, "buffers", own, moment)
        self._seen[module] = seen  # once it is complete: another thread may read it
        return seen

    def _look_again(self, seen: Seen, module: nn.Module, moment: int) -> None:
        """Look at a module as a forward begins."""
        if seen.training is not (training := getattr(module, "training", False)):
            seen.change("training", training, moment)
        if seen.kind is not type(module):
            seen.change("kind", type(module), moment)
        if self.has_changed:
            self._look_at_children(seen, module, moment)
        self._look_at_attributes(seen, module, moment, moment)
        parameters, buffers = own_parameters(module), own_buffers(module)
        if parameters or seen.parameters:
            self._look_at_tensors(seen, "parameters", parameters, moment)
        if buffers or seen.buffers:  # its last call may have changed them
            self._look_at_tensors(seen, "buffers", buffers, seen.last + 1)
        seen.last = moment

    def _look_during(self, seen: Seen, module: nn.Module, moment: int) -> None:
        """Look at a module as a call begins; changes date from after the last look."""
        since = seen.last + 1
        if seen.training is not (training := getattr(module, "training", False)):
            seen.change("training", training, since)
        self._look_at_children(seen, module, since)
        self._look_at_attributes(seen, module, moment, since)
        own, known = own_parameters(module), seen.parameters
        # A hook that is set or removed later counts for the calls from here on.
        if seen.hooks is not None or hooks_set() != self._hooks_set:
            self._look_at_hooks(seen, module, since)
        if not are_as_kept(own, known):
            self._look_at_tensors(seen, "parameters", own, since)
        if buffers := own_buffers(module):  # a call may change its own, as BatchNorm
            self._look_at_tensors(seen, "buffers", buffers, since)
        seen.last = moment

    def _look_at_called(self, module: nn.Module, moment: int) -> None:
        """Keep what has changed in a called module and in all modules inside it.

        So the state in which a call begins is known, also of modules that it changes
        before it calls them.
        """
        if moment == self._looked:  # it begins the forward: `look` has seen all
            return
        for it in modules_in(module) if own_children(module) else (module,):
            seen = self._seen.get(it)
            if seen is None:
                self._meet_new(it, moment)
            else:
                self._look_during(seen, it, moment)

    def _look_at_children(self, seen: Seen, module: nn.Module, since: int) -> None:
        own, known = own_children(module), seen.children
        if (own or known) and [*own.items()] != [*known.items()]:  # their order counts
            seen.change("children", dict(own), since)
            self.has_changed = True  # it may be undone by the next forward: look again

    def _look_at_attributes(
        self, seen: Seen, module: nn.Module, moment: int, since: int
    ) -> None:
        known = seen.attributes
        if not known.stand_in(vars(module)):
            found = self._attributes.anew(known, module, moment)
            if found is not known:
                seen.change("attributes", found, since)

    def _meet_new(self, module: nn.Module, moment: int) -> None:
        """Keep a module that a forward has made, and where it has put it."""
        self._meet(module, moment)
        for parent in self._modules:
            seen = self._seen.get(parent)
            if seen is not None:
                self._look_at_children(seen, parent, seen.last + 1)
        self._meet_hooks(moment)

    def _look_at_tensors(
        self,
        seen: Seen,
        field: Literal["parameters", "buffers"],
        own: Mapping[str, Tensor | None],
        since: int,
    ) -> None:
        found: Tensors = {}
        for name, tensor in own.items():
            kept = self._kept.get(id(tensor), _UNKNOWN)
            is_new = kept is _UNKNOWN or (kept is not None and kept.has_changed())
            if tensor is not None and is_new:
                if is_lazy(tensor):
                    seen.lazy |= {name}
                    continue
                kept = self._kept[id(tensor)] = Kept(tensor)
            found[name] = kept
        for name in seen.lazy & found.keys():
            seen.fill(field, name, found[name])
        if found != getattr(seen, field):
            seen.change(field, found, since)


_UNKNOWN: Final[Any] = object()
"""Stands for the `Kept` of a tensor that was not met before."""
