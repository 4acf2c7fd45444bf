"""The hooks of ours on modules, told from everybody else's."""

from functools import partial


class ModuleHook(partial[None]):
    """A hook that records. A copy of the module does not record, nor does a replay."""

    def __reduce__(self) -> tuple[type["ModuleHook"], tuple[object]]:
        """Copy and pickle it as a hook that does nothing."""
        return ModuleHook, (_nothing,)


def _nothing(*_: object) -> None:
    pass
