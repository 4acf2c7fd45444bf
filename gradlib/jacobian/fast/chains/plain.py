"""Linear layers with an activation between each two: the commonest networks.

To read the layers of one, and to plan its products, takes longer than the products of a
small one. So what follows from its form alone is found once for each form: the classes
of its layers and tensors, and their shapes, dtypes and devices. Nothing of a net itself
is kept.
"""

from collections.abc import Callable, Sequence
from functools import lru_cache
from itertools import chain as joined
from itertools import starmap
from operator import itemgetter
from types import NoneType
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn, strided
from torch.nn import Parameter

from gradlib.jacobian.fast.chains import order as orders
from gradlib.jacobian.fast.chains.chain import Chain
from gradlib.jacobian.fast.chains.layers import POINTWISE, Layer, Linear
from gradlib.jacobian.fast.chains.mapped import NO_MAPS, Kind, kind_of
from gradlib.jacobian.fast.chains.own import Found, are_same, run_by
from gradlib.jacobian.fast.chains.result import IN_CACHE
from gradlib.jacobian.fast.kernels import DTYPES
from gradlib.jacobian.fresh import HUGE
from gradlib.private.modes import nobody_looks_on
from gradlib.private.modules import is_plain_module, own_children, own_parameters

LITTLE = 2**20
"""Up to what cost, as `order.Order.cost` has it, it does not matter who multiplies: it
takes some 100 µs."""

Parameters: TypeAlias = tuple[Tensor, Tensor | None]
"""The weight and the bias of a linear layer."""


class NetForm(NamedTuple):
    """What is known of all nets whose layers and tensors are alike.

    Attributes:
        between: What is elementwise between the linear layers, in their order.
        order: In which order their Jacobians are multiplied.
        widths: How many entries go into each linear layer, and come out of the last.
        own: What of torch they run.
        is_small: Whether there is nothing to plan but to go forward, and back by rows,
            with all samples at once.
        follow: What follows the linear layers, by torch's names, where it matters who
            multiplies.
    """

    between: Sequence[list[Layer]]
    order: orders.Order
    widths: tuple[int, ...]
    own: Found
    is_small: bool
    follow: frozenset[str]


class PlainNet(NamedTuple):
    """A net, and what it is given.

    Attributes:
        form: What is known of its form.
        x: ``(batch, in)``.
        linears: The parameters of its linear layers.
    """

    form: NetForm
    x: Tensor
    linears: Sequence[Parameters]

    @property
    def chain(self) -> Chain:
        """It as a chain."""
        (between, order, widths, *_), x, linears = self
        return Chain(
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


def is_small(
    order: orders.Order, widths: Sequence[int], samples: int, dtype: torch.dtype
) -> bool:
    """Tell whether all samples go through at once, and back by rows.

    Args:
        order: In which the Jacobians of the layers are multiplied.
        widths: How many entries go into each linear layer, and come out of the last.
        samples: How many there are.
        dtype: Of all tensors.
    """
    inside = samples * (order.each + sum(widths[1:-1]))
    result = samples * widths[0] * widths[-1] * dtype.itemsize
    return inside <= IN_CACHE and result < HUGE and orders.is_by_rows(order.tree)


def followers(between: Sequence[Sequence[Layer]]) -> frozenset[str]:
    """Return what follows linear layers, by torch's names.

    Args:
        between: What is elementwise between them, in their order.
    """
    firsts = [layers[0].pointwise for layers in between]
    return frozenset(it.name for it in firsts if it is not None)


def plain_net(fn: Callable[..., Any], inputs: tuple[Any, ...]) -> PlainNet | None:
    """Return such a net, if it is one, as it is called.

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
    return PlainNet(form, x, linears)


_WEIGHT_AND_BIAS: Callable[[Any], Parameters] = itemgetter("weight", "bias")


@lru_cache(maxsize=4096)
def _form(
    layers: tuple[type[nn.Module], ...],
    classes: tuple[type[Any], ...],
    kinds: tuple[Kind, ...],
) -> NetForm | None:
    """Return what is known of all nets of a form; ``None`` if they are others.

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
    if not between or 0 in (*size, *widths) or len(biases) > orders.MOST:
        return None
    order = orders.best(tuple(widths), (*[True] * len(between), False), size[0])
    own = joined.from_iterable(map(run_by, {nn.Sequential, *layers}))
    bent = [[Layer(None, it)] for it in between]
    small = is_small(order, widths, size[0], dtype)
    follow = followers(bent) if order.cost > LITTLE else frozenset[str]()
    return NetForm(bent, order, tuple(widths), tuple(own), small, follow)
