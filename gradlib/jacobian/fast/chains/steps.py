"""Steps back through the layers of a chain, one after the other."""

from typing import Any, Protocol

from torch import Tensor

from gradlib.private.modes import grad_is_enabled


class Step(Protocol):
    """A step back through a layer, with all that it needs of the forward pass.

    A step that differs from sample to sample has a ``part(start, stop)`` for some.
    """

    def pull(self, v: Tensor, ours: bool, /) -> tuple[Tensor, bool]:
        """Go back.

        Args:
            v: The vectors, ``(batch, count, channels, ...)``.
            ours: Whether they may be overwritten: not where a graph keeps them.

        Returns:
            Their VJPs, and whether these may be overwritten.
        """
        ...


Steps = list[Step]
"""The step of each layer, in the order of the forward pass."""


def differs(step: Step) -> bool:
    """Tell whether a step differs from sample to sample."""
    return hasattr(step, "part")


def part(steps: Steps, start: int, stop: int) -> Steps:
    """Return the steps for some samples."""
    every: list[Any] = [*steps]
    return [it.part(start, stop) if differs(it) else it for it in every]


def pulled_back(steps: Steps, v: Tensor, *, ours: bool) -> tuple[Tensor, bool]:
    """Go back through all layers.

    Args:
        steps: The steps.
        v: The vectors, ``(batch, count, ...)``.
        ours: Whether they may be overwritten.

    Returns:
        Their VJPs, and whether these may be overwritten.
    """
    alone = not grad_is_enabled()
    for it in reversed(steps):
        v, ours = it.pull(v, ours and alone)
    return v, ours
