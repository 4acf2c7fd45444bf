"""What a call needs besides its arguments to be computed again."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from gradlib.private import (
    any_autocast,
    is_of_torch,
    own_buffers,
    own_children,
    own_parameters,
)
from gradlib.values import keep


@dataclass(frozen=True, slots=True)
class World:
    """What is not the model's, and yet changes what a call computes."""

    random: Tensor  # the state of the CPU's generator
    cuda_random: tuple[Tensor, ...]  # of each CUDA device, once CUDA is in use
    autocast: dict[str, torch.dtype]  # by device type, where it is enabled


class History:
    """The weights, buffers and modes of a model at every moment of a block.

    A moment is a number that grows; what stands in a place is kept again only when it
    has changed.
    """

    def __init__(self, modules: Mapping[str, nn.Module]) -> None:
        """Begin with nothing known of `modules`, which may grow."""
        self._modules = modules
        self._last: dict[tuple[nn.Module, str], tuple[Tensor, int]] = {}
        self._values: dict[tuple[nn.Module, str], list[tuple[int, Tensor]]] = {}
        self._modes: list[tuple[int, dict[nn.Module, bool]]] = []
        self._world: World | None = None

    def look(self, moment: int) -> None:
        """Keep what has changed since the last look."""
        for module in self._modules.values():
            self._look_at(module, own_parameters(module), moment)
            self._look_at(module, own_buffers(module), moment)
        modes = {module: module.training for module in self._modules.values()}
        if not self._modes or modes != self._modes[-1][1]:
            self._modes.append((moment, modes))

    def world(self, module: nn.Module, moment: int) -> World:
        """Return what surrounds a call of `module` that begins now."""
        buffers = own_buffers(module)
        if buffers:  # a call may change its own, as BatchNorm does
            self._look_at(module, buffers, moment)
        known = self._world
        autocast = _autocast() if any_autocast() else {}
        if known is not None and known.autocast == autocast and _draws_nothing(module):
            return known
        random = torch.get_rng_state()
        cuda: tuple[Tensor, ...] = ()
        if torch.cuda.is_initialized():
            cuda = tuple(torch.cuda.get_rng_state_all())
        if known is not None and torch.equal(random, known.random):
            random = known.random  # each is some kilobytes
        self._world = World(random, cuda, autocast)
        return self._world

    def tensors(self, module: nn.Module, moment: int) -> dict[str, Tensor]:
        """Return the parameters and buffers that `module` had at a moment.

        Names are relative to it, as in its ``state_dict``. A tensor that stands in two
        places is one tensor here too.
        """
        found: dict[str, Tensor] = {}
        for path, inner in cast(Any, module).named_modules():
            for key in (*own_parameters(inner), *own_buffers(inner)):
                values = self._values.get((inner, key), [])
                then = [value for at, value in values if at <= moment]
                if then:
                    found[f"{path}.{key}" if path else key] = then[-1]
        return found

    def modes(self, moment: int) -> dict[nn.Module, bool]:
        """Return which modules were in training at a moment."""
        return next(modes for at, modes in reversed(self._modes) if at <= moment)

    def _look_at(
        self, module: nn.Module, own: Mapping[str, Tensor | None], moment: int
    ) -> None:
        for key, tensor in own.items():
            if tensor is None or is_lazy(tensor):
                continue
            place = module, key
            last = self._last.get(place)
            version = tensor._version
            if last is None or last[0] is not tensor or last[1] != version:
                self._last[place] = tensor, version
                self._values.setdefault(place, []).append((moment, keep(tensor)))


def _autocast() -> dict[str, torch.dtype]:
    return {
        device: torch.get_autocast_dtype(device)
        for device in ("cpu", "cuda")
        if torch.is_autocast_enabled(device)
    }


def _draws_nothing(module: nn.Module) -> bool:
    """Tell whether a call of `module` is known to draw no random number."""
    return not own_children(module) and _never_draws(type(module))


@cache
def _never_draws(kind: type[nn.Module]) -> bool:
    return is_of_torch(kind) and not (
        kind.__module__ in ("torch.nn.modules.dropout", "torch.nn.modules.rnn")
        or issubclass(kind, nn.RReLU | nn.FractionalMaxPool2d | nn.FractionalMaxPool3d)
    )
