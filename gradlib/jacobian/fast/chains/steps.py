"""What is needed to go back through layers of a chain, one after the other."""

from typing import Any, Protocol

from torch import Tensor


class Step(Protocol):
    """What is needed to go back through a layer.

    What differs from sample to sample has a ``part(start, stop)``, for some of them.
    """

    def pull(self, v: Tensor, ours: bool) -> tuple[Tensor, bool]:
        """Go back.

        Args:
            v: Vectors, ``(batch, count, channels, ...)``.
            ours: Whether they may be overwritten.

        Returns:
            What comes of them, and whether that may be.
        """
        ...


Seen = list[Step]
"""Of each layer in turn what is needed to go back."""


def part(seen: Seen, start: int, stop: int) -> Seen:
    """Return what was seen of some samples."""
    every: list[Any] = [*seen]
    return [it.part(start, stop) if hasattr(it, "part") else it for it in every]


def pulled_back(seen: Seen, v: Tensor, *, ours: bool) -> tuple[Tensor, bool]:
    """Go back through all layers.

    Args:
        seen: What is needed for that.
        v: Vectors, ``(batch, count, ...)``.
        ours: Whether they may be overwritten.

    Returns:
        What comes of them, and whether that may be.
    """
    for it in reversed(seen):
        v, ours = it.pull(v, ours)
    return v, ours
