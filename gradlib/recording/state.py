"""What a call needs besides its arguments to be computed again."""

import random
from bisect import bisect_right
from collections.abc import Collection, Generator, Iterable, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from operator import itemgetter
from typing import Any, Final, TypeAlias, cast

import numpy
import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from gradlib.module_hook import NO_HOOKS, all_are_ours, hooks_of_others
from gradlib.private import (
    any_autocast,
    is_of_torch,
    own_buffers,
    own_children,
    own_parameters,
    tensors_may_be_dual,
)
from gradlib.recording.kept import Kept
from gradlib.recording.past_attributes import PastAttributes, Run


@dataclass(frozen=True, slots=True)
class World:
    """What is not the model's, and yet changes what a call computes."""

    random: Tensor  # the state of the CPU's generator
    cuda_random: tuple[Tensor, ...]  # of each CUDA device, once CUDA is in use
    autocast: dict[str, torch.dtype]  # by device type, where it is enabled
    is_dual: bool  # whether tensors may have carried tangents, of forward-mode AD


Children: TypeAlias = dict[str, nn.Module | None]
"""What stands in a module, by name."""


GONE: Final = object()
"""Stands where a name was taken away."""

Values: TypeAlias = dict[nn.Module, dict[str, list[tuple[int, Any]]]]
"""What stood under each name in each module, since when: `Kept`, ``None`` or `GONE`."""


Hooks: TypeAlias = tuple[type[nn.Module], dict[str, Any]]
"""The class of a module, and its hooks, as its attributes."""


Mode: TypeAlias = tuple[bool, type[nn.Module]]
"""Whether a module is in training, and its class: some are given another one."""


class History:
    """The weights, buffers, modes, children and hooks of a model at each moment.

    A moment is a number that grows; what stands in a place is kept again only when it
    has changed.
    """

    def __init__(self, modules: Collection[nn.Module]) -> None:
        """Begin with nothing known of `modules`, which may become others."""
        self._modules = modules
        # What is kept of each tensor, by its id; what stood in each place, since when.
        self._kept: dict[int, Kept] = {}
        self._parameters: Values = {}
        self._buffers: Values = {}
        self._since: dict[nn.Module, int] = {}  # when each was seen first
        self._modes: list[tuple[int, dict[nn.Module, Mode]]] = []
        self._children: list[tuple[int, dict[nn.Module, Children]]] = []
        self._hooks: list[tuple[int, dict[nn.Module, Hooks]]] = []
        self.is_set_back = False  # while a call is computed again
        # Whether others stand in the modules than at the last look, or other hooks.
        self.has_changed = True
        # What that look saw: its moment, and the modes.
        self._looked = -1
        self._seen: dict[nn.Module, Mode] = {}
        self._world: World | None = None
        # After which moment a module may have changed its buffers.
        self._called: dict[nn.Module, int] = {}
        self._attributes = PastAttributes()

    @property
    def modules(self) -> tuple[nn.Module, ...]:
        """Every module of the model."""
        return tuple(self._modules)

    def look(self, moment: int) -> None:
        """Keep what has changed since the last look."""
        modes: dict[nn.Module, Mode] = {}
        for module in self._modules:
            modes[module] = module.training, type(module)
            parameters, buffers = own_parameters(module), own_buffers(module)
            if parameters:
                self._look_at(self._parameters, module, parameters, moment)
            if buffers:
                self._look_at(
                    self._buffers, module, buffers, self._called.pop(module, moment)
                )
        if not self._modes or modes != self._modes[-1][1]:
            self._modes.append((moment, modes))
        self._looked, self._seen = moment, self._modes[-1][1]
        if self.has_changed:
            self._look_inside()
            for module in self._modules:
                self._since.setdefault(module, moment)
            self.has_changed = False
        self._attributes.look(self._modules, moment)

    def forward_ends(self, moment: int) -> None:
        """Keep what a forward has left in the attributes."""
        self._attributes.look(self._modules, moment)

    def meet(self, module: nn.Module, moment: int) -> None:
        """Keep what a call meets for the first time, or has made, if it was lazy."""
        self._look_at(self._parameters, module, own_parameters(module), moment)
        self._look_at(self._buffers, module, own_buffers(module), moment)

    def meet_hooks(self, moment: int) -> None:
        """Keep the hooks anew: a forward has set one before a call that begins now."""
        self._looked = moment
        self._look_inside()

    def stepped(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        """Keep anew what an optimizer has learned: a fused one leaves no sign of it."""
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                self._kept.pop(id(parameter), None)

    def world(self, module: nn.Module, moment: int) -> World:
        """Return what surrounds a call of `module` that begins now."""
        if module not in self._seen:
            self._meet_new(module, moment)
        self._attributes.look_at_called(module, moment)
        for parameter in own_parameters(module).values():
            kept = self._kept.get(id(parameter))
            if kept is not None and kept.was_written_to():
                self._look_at_parameters(moment)
                break
        buffers = own_buffers(module)
        if buffers:  # a call may change its own, as BatchNorm does
            since = self._called.get(module, moment)
            self._look_at(self._buffers, module, buffers, since)
            self._called[module] = moment + 1
        known = self._world
        autocast = _autocast() if any_autocast() else _NO_AUTOCAST
        is_dual = tensors_may_be_dual()
        if (
            known is not None
            and known.autocast == autocast
            and known.is_dual is is_dual
            and _draws_nothing(module)
        ):
            return known
        random = torch.get_rng_state()
        cuda: tuple[Tensor, ...] = ()
        if torch.cuda.is_initialized():
            cuda = tuple(torch.cuda.get_rng_state_all())
        if known is not None and torch.equal(random, known.random):
            random = known.random  # each is some kilobytes
        self._world = World(random, cuda, autocast, is_dual)
        return self._world

    def children(self, module: nn.Module, moment: int) -> Children:
        """Return what stood in `module` at a moment."""
        until = bisect_right(self._children, moment, key=itemgetter(0))
        known = self._children[max(until - 1, 0)][1].get(module)
        return dict(own_children(module).items() if known is None else known)

    def inside(self, module: nn.Module, moment: int) -> list[nn.Module]:
        """Return `module` and all that stood in it at a moment."""
        found = {module: None}
        waiting = [module]
        while waiting:
            for child in self.children(waiting.pop(), moment).values():
                if child is not None and child not in found:
                    found[child] = None
                    waiting.append(child)
        return list(found)

    def at(self, module: nn.Module, moment: int) -> dict[str, Kept]:
        """Return the own parameters and buffers that `module` had at a moment."""
        both = self.parameters(module, moment) | self.buffers(module, moment)
        return {name: kept for name, kept in both.items() if kept is not None}

    def parameters(self, module: nn.Module, moment: int) -> dict[str, Kept | None]:
        """Return what stood among the parameters of `module` at a moment.

        A module that was not seen until later is as it was first seen. A tensor that
        stood in two places is one tensor here too.
        """
        return self._at(self._parameters, module, own_parameters(module), moment)

    def buffers(self, module: nn.Module, moment: int) -> dict[str, Kept | None]:
        """Return what stood among the buffers of `module`, in the same way."""
        return self._at(self._buffers, module, own_buffers(module), moment)

    def attributes(self, module: nn.Module, moment: int) -> Run | None:
        """Return what stood in a module's attributes; ``None`` where nobody looked."""
        return self._attributes.at(module, moment)

    def hooks(self, module: nn.Module, moment: int) -> dict[str, Any]:
        """Return the hooks `module` had as it was called, as its attributes."""
        until = bisect_right(self._hooks, moment, key=itemgetter(0))
        every = self._hooks[max(until - 1, 0)][1]
        if not every:
            return NO_HOOKS
        known = every.get(module)
        if known is None or known[0] is not type(module):
            # A lazy module has taken another class since, which has not what they call.
            return hooks_of_others(module)
        return known[1]

    def training(self, module: nn.Module, moment: int) -> bool:
        """Tell whether `module` was in training at a moment."""
        return self._mode(module, moment)[0]

    def kind(self, module: nn.Module, moment: int) -> type[nn.Module]:
        """Return the class that `module` had at a moment."""
        return self._mode(module, moment)[1]

    def _mode(self, module: nn.Module, moment: int) -> Mode:
        until = bisect_right(self._modes, moment, key=itemgetter(0))
        now = module.training, type(module)
        return self._modes[until - 1][1].get(module, now)

    def _look_at_parameters(self, moment: int) -> None:
        """Keep what a call has written to weights before it called what has them."""
        for module in self._modules:  # one weight may stand in several
            self._look_at(self._parameters, module, own_parameters(module), moment)

    def _meet_new(self, module: nn.Module, moment: int) -> None:
        """Keep a module that a forward has made, as if it had stood there before."""
        self._since.setdefault(module, moment)
        self.meet(module, moment)
        self._seen[module] = module.training, type(module)
        self._look_inside()

    def _look_inside(self) -> None:
        """Keep what stands in the modules, and their hooks; nothing for none at all."""
        children = {it: dict(own_children(it).items()) for it in self._modules}
        self._children.append((self._looked, children))
        hooks: dict[nn.Module, Hooks] = {}
        if not all_are_ours(self._modules):
            hooks = {it: (type(it), hooks_of_others(it)) for it in self._modules}
        self._hooks.append((self._looked, hooks))

    def _look_at(
        self,
        every: Values,
        module: nn.Module,
        own: Mapping[str, Tensor | None],
        moment: int,
    ) -> None:
        known = every.get(module)
        if known is None:
            known = every[module] = {}
        for key, tensor in own.items():
            values, first = known.get(key), moment
            if values is None:
                values = known[key] = []
            elif not values:
                first = -1  # it was lazy: as if it had been there at once
            if tensor is None:
                kept = None
            elif is_lazy(tensor):
                continue
            else:
                kept = self._kept.get(id(tensor))
                if kept is None or kept.has_changed():
                    kept = self._kept[id(tensor)] = Kept(tensor)
            if not values:
                values.append((first, kept))
            elif values[-1][1] is not kept:
                values.append((moment, kept))
        if len(own) < len(known):
            for key, values in known.items():
                if values and key not in own and values[-1][1] is not GONE:
                    values.append((moment, GONE))

    def _at(
        self,
        every: Values,
        module: nn.Module,
        own: Mapping[str, Tensor | None],
        moment: int,
    ) -> dict[str, Kept | None]:
        if module not in every and own:
            self._look_at(every, module, own, moment)
        moment = max(moment, self._since.get(module, moment))
        found: dict[str, Any] = {}
        for name, values in every.get(module, {}).items():
            until = bisect_right(values, moment, key=itemgetter(0))
            kept = values[until - 1][1] if until else GONE
            if kept is not GONE:
                found[name] = kept
        return found


@contextmanager
def random_state_kept(devices: Iterable[int] = ()) -> Generator[None]:
    """Put the states of all generators back: torch's, NumPy's and Python's.

    Args:
        devices: The CUDA devices whose generators are put back too.
    """
    python, numpys = random.getstate(), numpy.random.get_state()
    with cast(Any, torch.random).fork_rng(sorted(devices)):
        try:
            yield
        finally:
            random.setstate(python)
            numpy.random.set_state(numpys)


def _autocast() -> dict[str, torch.dtype]:
    return {
        device: torch.get_autocast_dtype(device)
        for device in AUTOCAST_DEVICES
        if torch.is_autocast_enabled(device)
    }


AUTOCAST_DEVICES = ("cpu", "cuda")
_NO_AUTOCAST: dict[str, torch.dtype] = {}


def _draws_nothing(module: nn.Module) -> bool:
    """Tell whether a call of `module` is known to draw no random number."""
    return not own_children(module) and _never_draws(type(module))


@cache
def _never_draws(kind: type[nn.Module]) -> bool:
    return is_of_torch(kind) and not (
        kind.__module__ in ("torch.nn.modules.dropout", "torch.nn.modules.rnn")
        or issubclass(kind, nn.RReLU | nn.FractionalMaxPool2d | nn.FractionalMaxPool3d)
    )
