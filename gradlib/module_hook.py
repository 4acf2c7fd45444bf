"""The hooks of ours on modules, told from everybody else's."""

from collections import OrderedDict
from collections.abc import Mapping
from functools import partial
from typing import Any


class ModuleHook(partial[None]):
    """A hook that records. A copy of the module does not record, nor does a replay."""

    def __reduce__(self) -> tuple[type["ModuleHook"], tuple[object]]:
        """Copy and pickle it as a hook that does nothing."""
        return ModuleHook, (_nothing,)


def without_ours(hooks: Mapping[int, Any]) -> OrderedDict[int, Any]:
    """Return a module's hooks without those that record."""
    others = {key: it for key, it in hooks.items() if not isinstance(it, ModuleHook)}
    return OrderedDict(others)


def _nothing(*_: object) -> None:
    pass
