"""Plain nets, the commonest: linear layers with an activation between each two.

Reading the layers of a small net, and planning its products, takes longer than the
products. So this is done once for each form: the classes of layers and tensors, with
their shapes, dtypes and devices. No module or tensor of a net is kept.
"""

from collections.abc import Callable, Sequence
from functools import lru_cache
from itertools import chain as joined
from itertools import pairwise, starmap
from operator import itemgetter
from types import NoneType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn, strided
from torch.nn import Parameter

from gradlib.jacobian.fast.chains import order as orders
from gradlib.jacobian.fast.chains.chain import Chain
from gradlib.jacobian.fast.chains.layers import Layer, Linear, Parameters
from gradlib.jacobian.fast.chains.mapped import NO_MAPS, Kind, kind_of
from gradlib.jacobian.fast.chains.own import Found, are_same, run_by
from gradlib.jacobian.fast.chains.pointwise import POINTWISE
from gradlib.jacobian.fast.chains.result import IN_CACHE, planned
from gradlib.jacobian.fast.chains.rows import by_rows, goes_by_rows
from gradlib.jacobian.fast.kernels import DTYPES
from gradlib.jacobian.fast.matmul import DONE_TO_ENTRIES, FASTER, LARGE, TORCH, Library
from gradlib.jacobian.fresh import HUGE, keep_what_is_freed
from gradlib.jacobian.plan import JacobianPlan
from gradlib.private.modes import enable_grad, grad_is_enabled, nobody_looks_on
from gradlib.private.modules import is_plain_module, own_children, own_parameters

UNSURE = frozenset(("hardswish", "hardtanh"))
"""Functions whose slope at NaN, in torch, depends on the number of entries and their
places in memory."""


class NetForm(NamedTuple):
    """All that plain nets of one form have in common.

    Attributes:
        between: The elementwise layers between the linear layers, in order.
        order: The order in which the Jacobians are multiplied.
        widths: How many entries each linear layer gets, and the last returns.
        own: The attributes of torch that the layers run.
        is_small: Whether all samples go forward at once, and back by rows.
        library: The functions that multiply.
    """

    between: Sequence[list[Layer]]
    order: orders.Order
    widths: tuple[int, ...]
    own: Found
    is_small: bool
    library: Library


class PlainNet(NamedTuple):
    """A plain net and its input.

    Attributes:
        form: Its form.
        x: The input, ``(batch, in)``.
        linears: The parameters of its linear layers.
    """

    form: NetForm
    x: Tensor
    linears: Sequence[Parameters]

    @property
    def chain(self) -> Chain:
        """The net as a chain."""
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
            order.each + sum(widths[1:-1]),
            widths[-1:],
        )

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the Jacobian, ``(batch, out, in)``."""
        return self.chain.shape

    @property
    def may_hide(self) -> list[Tensor]:
        """Tensors whose infinity this hides, but torch's rows may not; mostly none."""
        form, x, linears = self
        bends = [it.pointwise for it in joined.from_iterable(form.between)]
        if not any(it is not None and it.name in UNSURE for it in bends):
            return []
        parameters = joined.from_iterable(linears)
        return [x, *(it for it in parameters if it is not None)]

    def jacobian(self) -> Tensor:
        """Return the Jacobian of a small net, ``(batch, out, in)``."""
        form, x, linears = self
        keep_what_is_freed()
        before = grad_is_enabled()
        try:  # an interrupt may come at any time
            enable_grad(False)
            return by_rows(form.between, x, linears, form.library)
        finally:
            enable_grad(before)

    def planned(self, plan: JacobianPlan) -> JacobianPlan:
        """Return the plan that multiplies the Jacobians of its layers."""
        return planned(plan, self.chain)


def _is_small(
    order: orders.Order, widths: Sequence[int], samples: int, dtype: torch.dtype
) -> bool:
    """Tell whether all samples go forward at once, and back by rows.

    Args:
        order: The order in which the Jacobians of the layers are multiplied.
        widths: How many entries each linear layer gets, and the last returns.
        samples: How many samples there are.
        dtype: The dtype of all tensors.
    """
    inside = samples * (order.each + sum(widths[1:-1]))
    result = samples * widths[0] * widths[-1] * dtype.itemsize
    return inside <= IN_CACHE and result < HUGE and orders.is_by_rows(order.tree)


def _library(widths: Sequence[int], samples: int) -> Library:
    """Return torch alone where no product is large enough for another library."""
    more, rows = max(DONE_TO_ENTRIES.values()), widths[-1]
    products = [
        samples * outs * max(ins * rows, ins + more)
        for ins, outs in pairwise(widths[:-1])
    ]
    return FASTER if max(products) >= LARGE else TORCH


def plain_net(fn: Callable[..., Any], inputs: tuple[Any, ...]) -> PlainNet | None:
    """Return a function as a plain net with its input, or ``None`` if it is none.

    Args:
        fn: The function.
        inputs: Its inputs.
    """
    if type(fn) is not nn.Sequential or len(inputs) != 1:
        return None
    net: Any = fn
    modules: list[Any] = [*own_children(net).values()]
    if not modules or type(modules[0]) is not nn.Linear:  # so for most other functions
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
    # fn, a layer or x is none.
    except (AttributeError, KeyError, RuntimeError, TypeError):
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
    """Return the form of plain nets; ``None`` if these are none.

    Args:
        layers: The classes of the layers.
        classes: The classes of x, and of the weight and bias of each linear layer.
        kinds: The kinds of the same, without those that are ``None``.
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
        shape = next(shapes)
        if shape[1:] != (widths[-1],):
            return None
        if kind is Parameter and next(shapes) != shape[:1]:
            return None
        widths.append(shape[0])
    if not between or 0 in (*size, *widths) or len(biases) > orders.MOST:
        return None
    order = orders.best(tuple(widths), (*[True] * len(between), False), size[0])
    own = joined.from_iterable(map(run_by, {nn.Sequential, *layers}))
    bent = [[Layer(None, it)] for it in between]
    small = _is_small(order, widths, size[0], dtype)
    library = _library(widths, size[0])
    return NetForm(bent, order, tuple(widths), tuple(own), small, library)


def small_net_of(chain: Chain) -> PlainNet | None:
    """Return the small plain net that a chain is, or ``None``."""
    x, order, between = chain.x, chain.order, chain.bends[1:-1]
    if chain.squeezed or x.dim() > 2 or not goes_by_rows(chain):
        return None
    widths = x.shape[1], *[weight.shape[0] for weight, _ in chain.linears]
    if not _is_small(order, widths, x.shape[0], x.dtype):
        return None
    library = _library(widths, x.shape[0])
    form = NetForm(between, order, widths, (), True, library)
    return PlainNet(form, x, chain.linears)
