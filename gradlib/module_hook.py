"""The hooks of ours on modules, told from everybody else's."""

from collections import OrderedDict
from collections.abc import Mapping
from functools import partial
from typing import Any

from torch import nn

from gradlib.private import (
    BACKWARD_HOOKS,
    FORWARD_HOOKS,
    HOOKS,
    KIND_OF_BACKWARD_HOOKS,
)


class ModuleHook(partial[None]):
    """A hook that records. A copy of the module does not record, nor does a replay."""

    def __reduce__(self) -> tuple[type["ModuleHook"], tuple[object]]:
        """Copy and pickle it as a hook that does nothing."""
        return ModuleHook, (_nothing,)


def without_ours(hooks: Mapping[int, Any]) -> OrderedDict[int, Any]:
    """Return a module's hooks without those that record."""
    others = {key: it for key, it in hooks.items() if not isinstance(it, ModuleHook)}
    return OrderedDict(others)


def hooks_of_others(module: nn.Module) -> dict[str, Any]:
    """Return what a module has of hooks, as its attributes, without those of ours."""
    own = vars(module)
    there = [
        it for kind in (*FORWARD_HOOKS, *BACKWARD_HOOKS) for it in own[kind].values()
    ]
    if all(isinstance(it, ModuleHook) for it in there):
        return _NONE
    kept: dict[str, Any] = {
        kind: OrderedDict((key, it) for key, it in own[kind].items() if key != id(it))
        for kind in HOOKS
    }
    for kind in FORWARD_HOOKS:
        kept[kind] = without_ours(kept[kind])
    return kept | {KIND_OF_BACKWARD_HOOKS: own[KIND_OF_BACKWARD_HOOKS]}


_NONE: dict[str, Any] = {kind: OrderedDict[int, Any]() for kind in HOOKS}


def _nothing(*_: object) -> None:
    pass
