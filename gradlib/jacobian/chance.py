"""Random numbers of our own: nobody's change for being looked at."""

import torch
from torch import Tensor


class Chance:
    """Draws the same numbers each time it is made."""

    def __init__(self) -> None:
        """Begin anew."""
        self._generator = torch.Generator("cpu").manual_seed(60_221_407)

    def vector(self, like: Tensor) -> Tensor:
        """Return normal numbers of the shape, dtype and device of a tensor."""
        # A fifth of the time that they take in float64, whose digits nobody needs.
        drawn = torch.randn(
            like.shape, generator=self._generator, dtype=torch.float32, device="cpu"
        )
        return drawn.to(like)

    def half(self, batch: int) -> Tensor:
        """Return which of at least two samples are in a half that is drawn."""
        order = torch.randperm(batch, generator=self._generator, device="cpu")
        return order < (batch + 1) // 2
