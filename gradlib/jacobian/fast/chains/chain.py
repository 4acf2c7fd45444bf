"""Chains of layers whose Jacobians are known, where no mode or hook is in force."""

from itertools import chain as joined
from typing import NamedTuple

from torch import Tensor, nn

from gradlib.jacobian.fast.chains import order as orders
from gradlib.jacobian.fast.chains.layers import Layer, Linear, every
from gradlib.jacobian.fast.chains.mapped import Maps
from gradlib.jacobian.fast.chains.norms import BATCH_NORM
from gradlib.jacobian.fast.replayed import Replays


class Chain(NamedTuple):
    """Convolutions and the like, then linear layers, with elementwise layers around.

    Attributes:
        x: The input, ``(batch, *in)``.
        maps: The layers that are gone back through vector by vector, before the first
            linear layer.
        linears: The linear layers.
        bends: The elementwise layers before the first linear layer, and after each.
        softmax: The softmax at the end, if there is one.
        squeezed: Whether the output's last axis, of one entry, is taken away.
        ins: How many entries of a sample the first linear layer gets.
        outs: How many entries of a sample the last one returns.
        order: The order in which the Jacobians of the linear layers are multiplied.
        entries: How many entries a sample takes at once, without the last product.
        size: The shape of a sample of the output, before its axis is taken away.
        replays: Its replays on a GPU, if a chain of its form was met before.
    """

    x: Tensor
    maps: Maps
    linears: list[Linear]
    bends: list[list[Layer]]
    softmax: nn.Softmax | nn.LogSoftmax | None
    squeezed: bool
    ins: int
    outs: int
    order: orders.Order
    entries: int
    size: tuple[int, ...]
    replays: Replays | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the Jacobian, ``(batch, *out, *in)``."""
        samples, *rest = self.x.shape
        return (samples, *([] if self.squeezed else self.size), *rest)

    @property
    def tensors(self) -> list[Tensor]:
        """The tensors that the Jacobian is computed from: x, weights and buffers."""
        tensors = [
            self.x,
            *(it for linear in self.linears for it in linear if it is not None),
        ]
        for layer in (*every(self.maps.layers), *joined.from_iterable(self.bends)):
            module, known = layer
            if type(module) is Linear:
                tensors += [it for it in module if it is not None]
            elif known in (None, BATCH_NORM) and isinstance(module, nn.Module):
                tensors += [*module.parameters(), *module.buffers()]
        return tensors

    @property
    def softens_early(self) -> bool:
        """Whether the softmax is applied to the last matrix, as it is the smaller."""
        return self.softmax is not None and self.linears[-1].weight.shape[1] < self.ins

    @property
    def begins_alike(self) -> bool:
        """Whether all samples share the vectors that go back into the maps."""
        bends = any(self.bends) or self.softmax is not None
        return bool(self.maps.layers) and not bends

    @property
    def multiply_adds(self) -> int:
        """How many multiply-adds all products take, and all rows through the maps."""
        rows = self.x.shape[0] * self.outs
        softmax = rows * self.ins if self.softmax is not None else 0
        once = (rows - self.outs) * self.maps.alike if self.begins_alike else 0
        through_maps = rows * self.maps.multiply_adds - once
        return self.order.multiply_adds + softmax + through_maps
