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
        value: What it was given, or what it returned: ``(batch, ...)``.
    """

    layer: Layer
    value: Tensor

    def part(self, start: int, stop: int) -> "Bend":
        """Return it for some samples."""
        return self._replace(value=self.value[start:stop])

    def pull(self, v: Tensor, ours: bool) -> tuple[Tensor, bool]:
        """Go back."""
        found = pulled(v, [self], ours=ours)
        return found, ours or found is not v


def bent(
    layers: Sequence[Layer], x: Tensor, *, ours: bool, last: bool, begun: bool = False
) -> tuple[list[Bend], Tensor]:
    """Return what is needed to go back through elementwise layers, and their output.

    Args:
        layers: In the order of the forward pass.
        x: What they are given.
        ours: Whether x may be overwritten.
        last: Whether nobody asks for the output; then it may be anything.
        begun: Whether x is what the first has returned, and may not be overwritten.
    """
    found: list[Bend] = []
    ours = ours and not grad_is_enabled()
    if begun:
        found.append(Bend(layers[0], x))
        ours = False
    for number, layer in enumerate(layers[len(found) :], 1 + len(found)):
        known = layer.pointwise
        assert known is not None, "a convolution is not elementwise"
        needless = last and number == len(layers)
        if known.looks_at == "y" or (known.looks_at == "either" and not needless):
            if ours and known.overwrite is not None:
                x = known.overwrite(layer.module, x)
            else:
                x = known.forward(layer.module, x)
            found.append(Bend(layer, x))
            ours = False
        else:
            found.append(Bend(layer, x))
            if not needless:
                x = known.forward(layer.module, x)
                ours = not grad_is_enabled()
    return found, x


def pulled(v: Tensor, bends: Sequence[Bend], *, ours: bool = False) -> Tensor:
    """Return vectors ``(batch, count, ...)`` times the slopes of elementwise layers.

    Args:
        v: The vectors; without a batch axis they are the same for all samples.
        bends: In the order of the forward pass.
        ours: Whether v may be overwritten, if it has a batch axis.
    """
    alone = not grad_is_enabled()  # no graph keeps what is overwritten
    ours = ours and alone and v.dim() > 2
    for (module, known), value in reversed(bends):
        assert known is not None, "a convolution is not elementwise"
        if known.factor is not None and v.dim() > 2:  # it is all in one number
            factor = known.factor(module)
            if factor != 1:
                v, ours = v.mul_(factor) if ours else v * factor, alone
            continue
        value = value.unsqueeze(1)
        if known.cuts or v.shape[1 if v.dim() > 2 else 0] < 2:
            v = known.pull(module, v, value, ours)
        else:  # a function is dearer than a product
            slope = known.pull(module, torch.ones_like(value), value, alone)
            v = v.mul_(slope) if ours else v * slope
        ours = alone
    return v
