"""Small nets of linear layers with an activation between each two."""

from collections.abc import Sequence
from itertools import chain as joined
from typing import NamedTuple

from torch import Tensor

from gradlib.jacobian.fast.chains import order as orders
from gradlib.jacobian.fast.chains.chain import Chain
from gradlib.jacobian.fast.chains.layers import Layer
from gradlib.jacobian.fast.chains.plain import NetForm, Parameters, PlainNet, is_small
from gradlib.jacobian.fast.chains.planned import planned
from gradlib.jacobian.fast.chains.rows import by_rows, goes_by_rows
from gradlib.jacobian.plan import Plan
from gradlib.private.modes import enable_grad, grad_is_enabled

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
            return by_rows(*self)
        finally:
            enable_grad(before)

    def planned(self, plan: Plan) -> Plan:
        """Return a plan to multiply the Jacobians of its layers."""
        between, x, linears = self
        widths = x.shape[1], *[weight.shape[0] for weight, _ in linears]
        order = orders.best(widths, (*[True] * len(between), False), x.shape[0])
        net = PlainNet(NetForm(between, order, widths, (), True), x, linears)
        return planned(plan, net.chain)


def small_net_of(chain: Chain) -> SmallNet | None:
    """Return the small net that a chain is, if it is one.

    Args:
        chain: What was found in somebody's code.
    """
    if chain.squeezed or chain.x.dim() > 2 or not is_small(chain.order):
        return None
    if not goes_by_rows(chain):
        return None
    return SmallNet(chain.bends[1:-1], chain.x, chain.linears)
