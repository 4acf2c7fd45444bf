"""Random numbers from a generator of our own, so that the user's is not advanced."""

import torch
from torch import Tensor


class Chance:
    """Draws the same numbers each time it is made."""

    def __init__(self) -> None:
        """Seed the generator."""
        self._generator = torch.Generator("cpu").manual_seed(60_221_407)

    def vector(self, like: Tensor) -> Tensor:
        """Return normal numbers of the shape, dtype and device of a tensor."""
        # Not in float64, which takes five times as long: few digits are enough.
        drawn = torch.randn(
            like.shape, generator=self._generator, dtype=torch.float32, device="cpu"
        )
        return drawn.to(like)

    def half(self, batch: int) -> Tensor:
        """Return a random half of at least two samples, as a mask ``(batch,)``."""
        order = torch.randperm(batch, generator=self._generator, device="cpu")
        return order < (batch + 1) // 2
