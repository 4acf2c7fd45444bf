"""Modules without a call: why none was seen, and which were used all the same."""

from collections.abc import Collection, Sequence

from torch import nn

from gradlib.recorder.hooked import Hooked
from gradlib.wording import listed


def why_no_call(module: nn.Module) -> str:
    """Say why no call was seen of a module whose class has its own ``__call__``."""
    kind = type(module)
    if kind in (nn.ParameterList, nn.ParameterDict):  # theirs only raises
        return (
            f"a {kind.__name__} is never called, and its parameters are in no "
            "param_grads: read their .grad"
        )
    return (
        f"{kind.__name__} has a __call__ of its own, and where that does not call "
        "nn.Module's, no hook sees it"
    )


def note_used_directly(every: Collection[Hooked], left_out: dict[str, str]) -> None:
    """Say which modules got gradients for their parameters and were not called.

    A parameter that a module which was called has too is in that one's totals.

    Args:
        every: The modules of a block.
        left_out: The modules that were not recorded, and why; some are added.
    """
    others = [hooked for hooked in every if not hooked.was_called]
    if not others:
        return
    shown = {
        id(total)
        for hooked in every
        if hooked.was_called
        for _, _, total in hooked.parameters.values()
    }
    for hooked in others:
        names = [
            name
            for name, (_, _, total) in hooked.parameters.items()
            if total and id(total) not in shown
        ]
        if names:
            left_out.setdefault(hooked.name, _used_directly(names))


def _used_directly(names: Sequence[str]) -> str:
    """Say that parameters with these names got gradients which no call shows."""
    gradients = "a gradient" if len(names) == 1 else "gradients"
    return (
        f"it was not called, and yet its {listed(names)} got {gradients}, as where a "
        "parent uses its weights directly, or calls module.forward(x). No param_grads "
        "has this: read .grad"
    )
