"""Small nets: linear layers and activations, with all samples computed at once."""

from itertools import chain as joined
from typing import NamedTuple

from torch import Tensor

from gradlib.jacobian.fast.chains.chain import Chain
from gradlib.jacobian.fast.chains.plain import (
    LITTLE,
    NetForm,
    PlainNet,
    followers,
    is_small,
)
from gradlib.jacobian.fast.chains.planned import planned
from gradlib.jacobian.fast.chains.rows import by_rows, goes_by_rows
from gradlib.jacobian.fast.matmul import TORCH, library_for
from gradlib.jacobian.fresh import keep_what_is_freed
from gradlib.jacobian.plan import JacobianPlan
from gradlib.private.modes import enable_grad, grad_is_enabled

UNSURE = frozenset(("hardswish", "hardtanh"))
"""Functions whose slope at NaN, in torch, depends on the number of entries and their
places in memory."""


class SmallNet(NamedTuple):
    """A small net and its input."""

    net: PlainNet

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the Jacobian, ``(batch, out, in)``."""
        return self.net.chain.shape

    @property
    def may_hide(self) -> list[Tensor]:
        """Tensors whose infinity this hides, but torch's rows may not; mostly none."""
        form, x, linears = self.net
        bends = [it.pointwise for it in joined.from_iterable(form.between)]
        if not any(it is not None and it.name in UNSURE for it in bends):
            return []
        parameters = joined.from_iterable(linears)
        return [x, *(it for it in parameters if it is not None)]

    def jacobian(self) -> Tensor:
        """Return the Jacobian, ``(batch, out, in)``."""
        form, x, linears = self.net
        library = TORCH
        if form.follow:
            keep_what_is_freed()
            library = library_for(x, form.follow)
        before = grad_is_enabled()
        try:  # an interrupt may come at any time
            enable_grad(False)
            return by_rows(form.between, x, linears, None, library)
        finally:
            enable_grad(before)

    def planned(self, plan: JacobianPlan) -> JacobianPlan:
        """Return the plan that multiplies the Jacobians of its layers."""
        return planned(plan, self.net.chain)


def small_net_of(chain: Chain) -> SmallNet | None:
    """Return the small net that a chain is, or ``None``."""
    x, order, between = chain.x, chain.order, chain.bends[1:-1]
    if chain.squeezed or x.dim() > 2 or not goes_by_rows(chain):
        return None
    widths = x.shape[1], *[weight.shape[0] for weight, _ in chain.linears]
    if not is_small(order, widths, x.shape[0], x.dtype):
        return None
    follow = followers(between) if order.cost > LITTLE else frozenset[str]()
    form = NetForm(between, order, widths, (), True, follow)
    return SmallNet(PlainNet(form, x, chain.linears))
