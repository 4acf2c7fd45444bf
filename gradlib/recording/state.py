"""What a call needs besides its arguments to be computed again."""

import random
from bisect import bisect_right
from collections.abc import Callable, Collection, Generator, Iterable, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from operator import attrgetter, itemgetter
from typing import Any, Final, TypeAlias, cast

import numpy
import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from gradlib.module_hook import NO_HOOKS, all_are_ours, hooks_of_others
from gradlib.private import (
    BUFFERS,
    CHILDREN,
    FORWARD_HOOKS,
    PARAMETERS,
    any_autocast,
    any_global_hook,
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

Values: TypeAlias = dict[nn.Module, dict[str, list[Any]]]
"""What stood under each name in each module: a moment and what stood there since, as
`Kept`, ``None`` or `GONE`, then the next moment, and so on."""


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
        # The modes of each module: as last seen, and since when, of those that changed.
        self._mode: dict[nn.Module, Mode] = {}
        self._modes: dict[nn.Module, list[tuple[int, Mode]]] = {}
        self._children: list[tuple[int, dict[nn.Module, Children]]] = []
        self._hooks: list[tuple[int, dict[nn.Module, Hooks]]] = []
        self.is_set_back = False  # while a call is computed again
        # Whether others stand in the modules than at the last look, or other hooks.
        self.has_changed = True
        # When that look was, and the modes it saw.
        self._looked = -1
        self._seen: dict[nn.Module, Mode] = {}
        self._world: World | None = None
        self._all_are_hooked = False  # by a hook that holds for every module
        # The moment after the last call of each module that was called since.
        self._called: dict[nn.Module, int] = {}
        self._attributes = PastAttributes()

    @property
    def modules(self) -> tuple[nn.Module, ...]:
        """Every module of the model."""
        return tuple(self._modules)

    @torch.no_grad()  # once, and not for each tensor
    def look(self, moment: int) -> None:
        """Keep what has changed since the last look."""
        modes = self._modes_now()
        for module in self._modules:
            self._attributes.look_at(module, moment, moment)
            parameters, buffers = own_parameters(module), own_buffers(module)
            if parameters:
                self._look_at(self._parameters, module, parameters, moment)
            if buffers:
                self._look_at(
                    self._buffers, module, buffers, self._called.get(module, moment)
                )
        self._called.clear()
        self._looked, self._all_are_hooked = moment, any_global_hook()
        if modes != self._seen:
            for module, mode in modes.items():
                self._look_at_mode(module, mode, moment)
            self._seen = modes
        if self.has_changed:
            self._children.append((moment, self._standing()))
            self._look_at_hooks(moment)
            for module in self._modules:
                self._since.setdefault(module, moment)
            self.has_changed = False

    def forward_ends(self, moment: int) -> None:
        """Keep what a forward has left in the attributes.

        Modules of torch do not change their own.
        """
        if all(map(is_of_torch, {*map(type, self._modules)})):
            return
        for module in self._modules:
            if not is_of_torch(type(module)):
                since = self._called.get(module, moment)
                self._attributes.look_at(module, moment, since)

    def meet(self, module: nn.Module, moment: int) -> None:
        """Keep what a call meets for the first time, or has made, if it was lazy."""
        self._look_at(self._parameters, module, own_parameters(module), moment)
        self._look_at(self._buffers, module, own_buffers(module), moment)

    def meet_hooks(self, moment: int) -> None:
        """Keep the hooks anew: a forward has set one before a call that begins now."""
        self._look_at_hooks(moment)

    def stepped(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        """Keep anew what an optimizer has learned: a fused one leaves no sign of it."""
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                self._kept.pop(id(parameter), None)

    def world(self, module: nn.Module, moment: int) -> World:
        """Keep what a call of `module` meets that begins now.

        Returns:
            What surrounds it.
        """
        own = vars(module)
        self._look_at_called(module, own, moment)
        known = self._world
        autocast = _autocast() if any_autocast() else _NO_AUTOCAST
        is_dual = tensors_may_be_dual()
        if (
            known is not None
            and known.autocast == autocast
            and known.is_dual is is_dual
            and not self._all_are_hooked
            and _draws_nothing(type(module), own)
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
        return self._mode_at(module, moment)[0]

    def kind(self, module: nn.Module, moment: int) -> type[nn.Module]:
        """Return the class that `module` had at a moment."""
        return self._mode_at(module, moment)[1]

    def _modes_now(self) -> dict[nn.Module, Mode]:
        """Return the mode of each module: one and the same for all that have it."""
        modes: dict[Mode, Mode] = {}
        now = zip(map(_TRAINING, self._modules), map(type, self._modules), strict=True)
        each = [modes.setdefault(mode, mode) for mode in now]
        return dict(zip(self._modules, each, strict=True))

    def _mode_at(self, module: nn.Module, moment: int) -> Mode:
        if module not in self._modes:
            return self._mode.get(module, (module.training, type(module)))
        until = bisect_right(self._modes[module], moment, key=itemgetter(0))
        return self._modes[module][until - 1][1]

    def _look_at_mode(self, module: nn.Module, mode: Mode, since: int) -> None:
        before = self._mode.setdefault(module, mode)
        if before != mode:
            self._modes.setdefault(module, [(-1, before)]).append((since, mode))
            self._mode[module] = mode

    def _look_at_called(
        self, module: nn.Module, own: dict[str, Any], moment: int
    ) -> None:
        """Keep what is not as it was when the forward began.

        Of modes and attributes we take it that they are so since the module was last
        seen: what contains it has mostly set them, or what calls that, or itself.
        """
        seen, called = self._seen.get(module), self._called.get(module, 0)
        if seen is None:
            self._meet_new(module, moment)
        elif seen[0] != module.training:
            self._look_at_modes()
        children = own[CHILDREN]
        if children and children != self._children[-1][1].get(module, children):
            self._look_at_children(moment)
        self._attributes.look_at(module, moment, called or self._looked + 1)
        for parameter in own[PARAMETERS].values():
            kept = self._kept.get(id(parameter))
            if kept is not None and kept.was_written_to():
                self._look_at_parameters(moment, by_data=kept.has_its_version())
                break
        buffers = own[BUFFERS]
        if buffers:  # a call may change its own, as BatchNorm does
            self._look_at(self._buffers, module, buffers, called or moment)
        self._called[module] = moment + 1

    def _look_at_modes(self) -> None:
        """Keep the modes that a forward has set, each since it was last seen."""
        for module, (training, kind) in self._seen.items():
            if training != module.training:
                self._seen[module] = mode = module.training, kind
                since = self._called.get(module, self._looked + 1)
                self._look_at_mode(module, mode, since)

    def _look_at_parameters(self, moment: int, *, by_data: bool) -> None:
        """Keep what a call has written to weights before it called what has them.

        What is written to ``.data``, as to normalize them, mostly stays the same where
        it is done again. So of that we take it too that it is so since last seen.
        """
        for module in self._modules:  # one weight may stand in several
            since = self._called.get(module, self._looked + 1) if by_data else moment
            self._look_at(self._parameters, module, own_parameters(module), since)

    def _meet_new(self, module: nn.Module, moment: int) -> None:
        """Keep a module that a forward has made, as if it had stood there before."""
        self._since.setdefault(module, moment)
        self.meet(module, moment)
        self._seen[module] = mode = module.training, type(module)
        self._look_at_mode(module, mode, moment)
        self._look_at_children(moment)
        self._look_at_hooks(max(self._looked, self._hooks[-1][0]))

    def _look_at_children(self, moment: int) -> None:
        """Keep what a forward has put in: as if always, where nothing stood before."""
        now = self._standing()
        when, before = self._children[-1]
        if when < self._looked:
            copied = {module: dict(stood) for module, stood in before.items()}
            self._children.append((self._looked, copied))
        for when, every in reversed(self._children):
            if when < self._looked:
                break
            for module, children in now.items():
                stood = every.setdefault(module, {})
                for name, child in children.items():
                    if stood.get(name) is None:
                        stood[name] = child
        if self._children[-1][1] != now:
            self._children.append((moment, now))

    def _look_at_hooks(self, moment: int) -> None:
        """Keep the hooks of the modules; nothing for none at all."""
        hooks: dict[nn.Module, Hooks] = {}
        if not all_are_ours(self._modules):
            hooks = {it: (type(it), hooks_of_others(it)) for it in self._modules}
        self._hooks.append((moment, hooks))

    def _standing(self) -> dict[nn.Module, Children]:
        """Return what stands in each of the modules."""
        return {it: dict(own_children(it)) for it in self._modules}

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
                values += first, kept
            elif values[-1] is not kept:
                values += max(moment, values[-2]), kept
        if len(own) < len(known):
            for key, values in known.items():
                if values and key not in own and values[-1] is not GONE:
                    values += moment, GONE

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
            until = bisect_right(values[::2], moment)
            kept = values[2 * until - 1] if until else GONE
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


_TRAINING: Callable[[nn.Module], bool] = attrgetter("training")
AUTOCAST_DEVICES = ("cpu", "cuda")
_NO_AUTOCAST: dict[str, torch.dtype] = {}


def _draws_nothing(kind: type[nn.Module], own: dict[str, Any]) -> bool:
    """Tell whether a call of a module is known to draw no random number.

    Its class may be known for that, but not a forward put in, or hooks of others: of
    ours it has one before its forward, and one after it.

    Args:
        kind: Its class.
        own: Its ``vars()``.
    """
    return (
        not own[CHILDREN]
        and "forward" not in own
        and len(own[FORWARD_HOOKS[0]]) < 2
        and len(own[FORWARD_HOOKS[1]]) < 2
        and _never_draws(kind)
    )


@cache
def _never_draws(kind: type[nn.Module]) -> bool:
    return is_of_torch(kind) and not (
        kind.__module__ in ("torch.nn.modules.dropout", "torch.nn.modules.rnn")
        or issubclass(kind, nn.RReLU | nn.FractionalMaxPool2d | nn.FractionalMaxPool3d)
    )
