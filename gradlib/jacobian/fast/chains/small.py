"""Small nets of linear layers with an activation between each two."""

from collections.abc import Sequence
from itertools import chain as joined
from typing import NamedTuple

from torch import Tensor
from torch.nn import functional as F

from gradlib.jacobian.fast.chains import order as orders
from gradlib.jacobian.fast.chains.bends import Bend, bent, pulled
from gradlib.jacobian.fast.chains.chain import Chain
from gradlib.jacobian.fast.chains.layers import Layer
from gradlib.jacobian.fast.chains.plain import Form, Parameters, PlainNet, is_small
from gradlib.jacobian.fast.chains.planned import planned
from gradlib.jacobian.plan import Plan
from gradlib.private import enable_grad, grad_is_enabled

UNSURE = frozenset(("hardswish", "hardtanh", "relu6"))
"""The functions whose slope at NaN is one or the other, in torch, by how many entries
there are and where they stand in memory."""


class SmallNet(NamedTuple):
    """A small net, and what it is given.

    Attributes:
        between: What is elementwise between the linear layers, in their order.
        x: ``(batch, in)``.
        linears: The parameters of these layers.
    """

    between: Sequence[list[Layer]]
    x: Tensor
    linears: Sequence[Parameters]

    @property
    def may_hide(self) -> list[Tensor]:
        """What may be infinite where the Jacobian is not: mostly rows hide the same."""
        bends = [it.pointwise for it in joined.from_iterable(self.between)]
        if not any(it is not None and it.name in UNSURE for it in bends):
            return []
        parameters = joined.from_iterable(self.linears)
        return [self.x, *(it for it in parameters if it is not None)]

    def jacobian(self) -> Tensor:
        """Return the Jacobian, ``(batch, out, in)``."""
        before = grad_is_enabled()
        try:  # where an interrupt may come at once
            enable_grad(False)
            return _jacobian(*self)
        finally:
            enable_grad(before)

    def planned(self, plan: Plan) -> Plan:
        """Return a plan to multiply the Jacobians of its layers."""
        between, x, linears = self
        widths = x.shape[1], *[weight.shape[0] for weight, _ in linears]
        order = orders.best(widths, (*[True] * len(between), False), x.shape[0])
        net = PlainNet(Form(between, order, widths, (), True), x, linears)
        return planned(plan, net.chain)


def small_net_of(chain: Chain) -> SmallNet | None:
    """Return the small net that a chain is, if it is one.

    Args:
        chain: What was found in somebody's code.
    """
    first, *between, last = chain.bends
    if chain.maps.layers or chain.softmax is not None or chain.squeezed:
        return None
    if first or last or not between or not all(between) or chain.x.dim() > 2:
        return None
    return SmallNet(between, chain.x, chain.linears) if is_small(chain.order) else None


def _jacobian(
    between: Sequence[list[Layer]], x: Tensor, linears: Sequence[Parameters]
) -> Tensor:
    """Go forward, and then back with all rows."""
    seen: list[list[Bend]] = []
    h, last = x, len(between) - 1
    for place, layers in enumerate(between):
        h = F.linear(h, *linears[place])
        bends, h = bent(layers, h, ours=True, last=place == last)
        seen.append(bends)
    v = linears[-1][0]
    while seen:
        v = pulled(v, seen.pop(), ours=True) @ linears[len(seen)][0]
    return v
