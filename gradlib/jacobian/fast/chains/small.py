"""Small nets of linear layers with an activation between each two, the commonest ones.

To read the layers of one, and to plan its products, takes longer than the products. So
what follows from its form alone is found once for each form: the classes of its layers
and tensors, and their shapes, dtypes and devices. Nothing of a net itself is kept.
"""

from collections.abc import Callable, Sequence
from functools import lru_cache
from itertools import chain as joined
from itertools import starmap
from operator import itemgetter
from types import NoneType
from typing import Any, NamedTuple, TypeAlias

from torch import Tensor, nn, strided
from torch.nn import Parameter
from torch.nn import functional as F

from gradlib.jacobian.fast.chains import order as orders
from gradlib.jacobian.fast.chains.bends import Bend, bent, pulled
from gradlib.jacobian.fast.chains.chain import DTYPES, Chain
from gradlib.jacobian.fast.chains.layers import POINTWISE, Layer
from gradlib.jacobian.fast.chains.mapped import NO_MAPS, Kind, Linear, kind_of
from gradlib.jacobian.fast.chains.own import Found, are_same, run_by
from gradlib.jacobian.fast.chains.planned import planned
from gradlib.jacobian.plan import Plan
from gradlib.private import (
    enable_grad,
    grad_is_enabled,
    is_plain_module,
    nobody_looks_on,
    own_children,
    own_parameters,
)

SMALL = 2**20
"""How much a small net takes at most, as `order.Order.cost` has it: some 100 µs.

For larger ones it matters how much memory there is, and which library multiplies.
"""

UNSURE = frozenset(("hardswish", "hardtanh", "relu6"))
"""The functions whose slope at NaN is one or the other, in torch, by how many entries
there are and where they stand in memory."""

Parameters: TypeAlias = tuple[Tensor, Tensor | None]
"""The weight and the bias of a linear layer."""


class Form(NamedTuple):
    """What is known of all nets whose layers and tensors are alike.

    Attributes:
        between: What is elementwise between the linear layers, in their order.
        own: What of torch they run.
    """

    between: Sequence[list[Layer]]
    own: Found


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
        chain = Chain(
            x,
            NO_MAPS,
            [*starmap(Linear, linears)],
            [[], *between, []],
            None,
            False,
            *(widths[0], widths[-1]),
            order,
            sum(widths[1:-1]),
            widths[-1:],
        )
        return planned(plan, chain)


def small_net(fn: Callable[..., Any], inputs: tuple[Any, ...]) -> SmallNet | None:
    """Return a small net, if it is one, as it is called.

    Args:
        fn: The net.
        inputs: What it would be called with.
    """
    if type(fn) is not nn.Sequential or len(inputs) != 1:
        return None
    net: Any = fn
    modules: list[Any] = [*own_children(net).values()]
    if not modules or type(modules[0]) is not nn.Linear:  # as of most others
        return None
    if not nobody_looks_on():
        return None
    x = inputs[0]
    try:
        if not (is_plain_module(net) and all(map(is_plain_module, modules))):
            return None
        linears = [*map(_WEIGHT_AND_BIAS, map(own_parameters, modules[::2]))]
        tensors = [x, *joined.from_iterable(linears)]
        form = _form(
            tuple(map(type, modules)),
            tuple(map(type, tensors)),
            tuple([kind_of(it) for it in tensors if it is not None]),
        )
    except (AttributeError, KeyError, RuntimeError, TypeError):  # no module, layer, x
        return None
    if form is None or not are_same(form.own):
        return None
    return SmallNet(form.between, x, linears)


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
    order = chain.order
    if order.cost > SMALL or not orders.is_by_rows(order.tree):
        return None
    return SmallNet(between, chain.x, chain.linears)


_WEIGHT_AND_BIAS: Callable[[Any], Parameters] = itemgetter("weight", "bias")


@lru_cache(maxsize=4096)
def _form(
    layers: tuple[type[nn.Module], ...],
    classes: tuple[type[Any], ...],
    kinds: tuple[Kind, ...],
) -> Form | None:
    """Return what is known of all nets of a form; ``None`` if they are no small ones.

    Args:
        layers: The classes of the layers.
        classes: Of x, and of the weight and bias of each linear layer.
        kinds: Of the same, where there is a tensor.
    """
    bends = [POINTWISE.get(it) for it in layers[1::2]]
    between = [it for it in bends if it is not None and not it.options]
    if len(layers) != 2 * len(between) + 1 or {*layers[::2]} != {nn.Linear}:
        return None
    of_x, weights, biases = classes[0], classes[1::2], classes[2::2]
    if of_x not in (Tensor, Parameter) or {*weights} != {Parameter}:
        return None
    (dtype, _, layout, size), *_ = kinds
    if dtype not in DTYPES or layout is not strided or len(size) != 2:
        return None
    if {*biases} - {Parameter, NoneType} or len({it[:3] for it in kinds}) != 1:
        return None
    shapes = iter([it[3] for it in kinds[1:]])
    widths = [size[1]]
    for kind in biases:
        outs, *ins = next(shapes)
        if ins != widths[-1:] or (kind is Parameter and next(shapes) != (outs,)):
            return None
        widths.append(outs)
    if not between or 0 in (*size, *widths):
        return None
    order = orders.best(tuple(widths), (*[True] * len(between), False), size[0])
    if order.cost > SMALL or not orders.is_by_rows(order.tree):
        return None
    own = joined.from_iterable(map(run_by, {nn.Sequential, *layers}))
    return Form([[Layer(None, it)] for it in between], tuple(own))


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
