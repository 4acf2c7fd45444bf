"""The hooks of ours on modules, told from everybody else's."""

from collections import OrderedDict
from collections.abc import Collection, Iterable, Mapping
from functools import partial
from itertools import chain
from operator import methodcaller
from typing import Any

from torch import nn

from gradlib.private import HOOKS, KIND_OF_BACKWARD_HOOKS, hook_dicts


class ModuleHook(partial[None]):
    """A hook that records. A copy of the module does not record, nor does a replay."""

    def __reduce__(self) -> tuple[type["ModuleHook"], tuple[object]]:
        """Copy and pickle it as a hook that does nothing."""
        return ModuleHook, (_nothing,)

    def stop(self) -> None:
        """Do nothing from now on, wherever it stands, and hold nothing."""
        _stop(self)


def without_ours(hooks: Mapping[int, Any]) -> OrderedDict[int, Any]:
    """Return a module's hooks without those that record."""
    others = {key: it for key, it in hooks.items() if not isinstance(it, ModuleHook)}
    return OrderedDict(others)


def hooks_of_others(module: nn.Module) -> dict[str, Any]:
    """Return what a module has of hooks, as its attributes, without those of ours."""
    own = vars(module)
    kept: dict[str, Any] = {KIND_OF_BACKWARD_HOOKS: own[KIND_OF_BACKWARD_HOOKS]}
    for kind in HOOKS:
        items = own[kind].items()
        others = ((key, it) for key, it in items if key != id(it))
        kept[kind] = without_ours(OrderedDict(others))
    return kept


def remove_stopped(modules: Collection[nn.Module]) -> None:
    """Take away those of ours that do nothing any more.

    Whoever puts another module in the place of one sets all its hooks on that one too.
    """
    if not any(hook_dicts(modules)):
        return
    for module in modules:
        every: list[dict[int, Any]] = [getattr(module, kind) for kind in HOOKS]
        stopped = {
            key
            for key, hook in chain.from_iterable(hooks.items() for hooks in every)
            if isinstance(hook, ModuleHook) and hook.func is _nothing
        }
        for hooks in every:
            for key in stopped & hooks.keys():
                del hooks[key]


def all_are_ours(modules: Iterable[nn.Module]) -> bool:
    """Tell whether nobody else has a hook on several modules, without a loop."""
    every = map(methodcaller("values"), filter(None, hook_dicts(modules)))
    return {*map(type, chain.from_iterable(every))} <= {ModuleHook}


NO_HOOKS: dict[str, Any] = {
    KIND_OF_BACKWARD_HOOKS: None,
    **{kind: OrderedDict[int, Any]() for kind in HOOKS},
}
"""The same of a module that has none."""


def _nothing(*_: object) -> None:
    pass


_stop = methodcaller("__setstate__", (_nothing, (), {}, None))
