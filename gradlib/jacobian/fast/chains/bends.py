"""The elementwise layers of a chain, forward and back."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from gradlib.jacobian.fast.chains.layers import Layer
from gradlib.private.modes import grad_is_enabled


class Bend(NamedTuple):
    """An elementwise layer at its place in a chain.

    Attributes:
        layer: The layer.
        value: Its input or output, as its slope needs: ``(batch, ...)``.
    """

    layer: Layer
    value: Tensor

    def part(self, start: int, stop: int) -> "Bend":
        """Return the bend for some samples."""
        return self._replace(value=self.value[start:stop])

    def pull(self, v: Tensor, ours: bool) -> tuple[Tensor, bool]:
        """Go back.

        Args:
            v: The vectors, ``(batch, count, ...)``; without a batch axis they are the
                same for all samples.
            ours: Whether they may be overwritten, if they have a batch axis.

        Returns:
            Their VJPs, and whether these may be overwritten.
        """
        (module, known), value = self
        assert known is not None, "a convolution is not elementwise"
        has_samples, alone = v.dim() > 2, not grad_is_enabled()
        ours = ours and has_samples and alone
        if known.factor is not None and has_samples:  # the slope is a single number
            factor = known.factor(module)
            if factor == 1:
                return v, ours
            return (v.mul_(factor) if ours else v * factor), True
        value = value.unsqueeze(1)
        if known.cuts or v.shape[1 if has_samples else 0] < 2:
            return known.pull(module, v, value, ours), True
        # Computing the slope costs more than a product, so it is done once.
        slope = known.pull(module, torch.ones_like(value), value, alone)
        return (v.mul_(slope) if ours else v * slope), True


def bent(
    layers: Sequence[Layer], x: Tensor, *, ours: bool, last: bool, begun: bool
) -> tuple[list[Bend], Tensor]:
    """Return elementwise layers with the values their slopes need, and their output.

    Args:
        layers: The layers, in the order of the forward pass.
        x: The input of the first, ``(batch, ...)``.
        ours: Whether x may be overwritten.
        last: Whether the output is not needed; then it may be wrong.
        begun: Whether x is the output of the first already, not to be overwritten.
    """
    bends: list[Bend] = []
    ours = ours and not grad_is_enabled()
    if begun:
        bends.append(Bend(layers[0], x))
        ours = False
    for number, layer in enumerate(layers[len(bends) :], 1 + len(bends)):
        needless = last and number == len(layers)
        value, x, is_new = passed(layer, x, ours=ours, needless=needless)
        bends.append(Bend(layer, value))
        ours = is_new and not grad_is_enabled()
    return bends, x


def passed(
    layer: Layer, x: Tensor, *, ours: bool, needless: bool = False
) -> tuple[Tensor, Tensor, bool]:
    """Go forward through an elementwise layer.

    Args:
        layer: The layer.
        x: Its input, ``(batch, ...)``.
        ours: Whether x may be overwritten.
        needless: Whether the output is not needed; then it may be wrong.

    Returns:
        The value that its slope needs, its output, and whether that is a third tensor.
    """
    module, known = layer
    assert known is not None, "a convolution is not elementwise"
    if known.looks_at == "y" or (known.looks_at == "either" and not needless):
        y = ((ours and known.overwrite) or known.forward)(module, x)
        return y, y, False
    return (x, x, False) if needless else (x, known.forward(module, x), True)


def pulled(v: Tensor, bends: Sequence[Bend]) -> Tensor:
    """Return vectors times the slopes of elementwise layers, overwriting the vectors.

    Args:
        v: The vectors, ``(batch, count, ...)``; without a batch axis they are the same
            for all samples, and not overwritten.
        bends: The layers, in the order of the forward pass.
    """
    for bend in reversed(bends):
        v, _ = bend.pull(v, True)
    return v
