"""Finds the layers that a function is, and assembles them to a chain."""

from collections.abc import Callable
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn, strided
from torch.nn import Parameter

from gradlib.jacobian.fast.chains import order as orders
from gradlib.jacobian.fast.chains.chain import Chain
from gradlib.jacobian.fast.chains.layers import (
    SOFTMAXES,
    SQUEEZED,
    UNSQUEEZED,
    Joined,
    Layer,
    Linear,
    Summed,
    every,
)
from gradlib.jacobian.fast.chains.line import ERRORS, layers_of
from gradlib.jacobian.fast.chains.mapped import (
    NO_MAPS,
    Maps,
    elementwise,
    maps_of,
    parameters_of,
    scaling,
)
from gradlib.jacobian.fast.chains.own import is_own_function
from gradlib.jacobian.fast.chains.place import is_in_place, is_view
from gradlib.jacobian.fast.chains.pointwise import POINTWISE
from gradlib.jacobian.fast.chains.rebound import UnknownError
from gradlib.jacobian.fast.chains.shapes import flattens, shape_after
from gradlib.jacobian.fast.kernels import DTYPES
from gradlib.jacobian.plan import FORWARD, SPLIT
from gradlib.private.modes import nobody_looks_on

MANY = 2**10
"""With at most this many output entries, rows of convolutions are asked for by an
identity matrix, which has the square of that."""

_ELEMENTWISE = frozenset((nn.Flatten, Layer, *POINTWISE))
_AMONG_MATRICES = _ELEMENTWISE | {nn.Linear, Linear, nn.BatchNorm1d}
"""The types of layers that may stand among matrices, those of matrices included."""


def is_for_chains(inputs: tuple[Any, ...]) -> bool:
    """Tell whether a function of these inputs may be a chain.

    It may where no mode of torch can change what layers do. So a chain mixes no
    samples, is not random, and cuts no path.
    """
    if len(inputs) != 1 or not nobody_looks_on():
        return False
    x = inputs[0]
    if type(x) not in (Tensor, Parameter) or x.dtype not in DTYPES or x.is_nested:
        return False
    return x.dim() > 1 and x.numel() > 0 and x.layout is strided


def found_on(fn: Callable[..., Any], x: Tensor) -> tuple[Chain, list[Any]] | None:
    """Return the chain that a function is, and the layers that it is made of.

    Args:
        fn: The function.
        x: Its input, ``(batch, *in)``.

    Returns:
        Both, or ``None`` if the function is no chain.
    """
    try:
        layers = layers_of(fn, x)
        if Joined in map(type, layers) or any(map(is_in_place, layers)):
            _saves_output(layers, saved=False)
        chain = _assembled(x, layers)
    except ERRORS:
        return None
    return None if chain is None else (chain, layers)


def _saves_output(layers: list[Any], *, saved: bool) -> bool:
    """Tell whether autograd may have saved the output of the last layer.

    Args:
        layers: The layers, in the order of the forward pass.
        saved: Whether it has saved the input of the first.

    Raises:
        UnknownError: A layer overwrites a saved tensor, which torch will refuse.
    """
    for layer in layers:
        overwrites = is_in_place(layer)
        if type(layer) is Joined:
            one, _ = (_saves_output(way, saved=saved) for way in layer.ways)
            saved, overwrites = one, layer.inplace
        if saved and overwrites:
            raise UnknownError("what it overwrites is needed")
        if not is_view(layer):
            saved = type(layer) in POINTWISE or type(layer) is Layer
    return saved


def _assembled(x: Tensor, layers: list[Any]) -> Chain | None:
    """Return the chain that layers are for the input x, or ``None``."""
    last: Any = layers[-1] if layers else None
    softmax = last if type(last) in SOFTMAXES else None
    if softmax is not None and not _is_over_entries(softmax):
        return None
    # Samples that are single numbers are treated as vectors of one entry.
    after = shape_after(layers, x.shape)
    squeezed = after is not None and len(after) == 1
    layers = [it for it in layers if it is not SQUEEZED and it is not UNSQUEEZED]
    parts = _parts_of(x, layers if softmax is None else layers[:-1])
    if parts is None:
        return None
    maps, linears, bends, widths, entries, shape = parts
    if len(shape) > 1 and (squeezed or softmax is not None):  # both need a single axis
        return None
    order = orders.best(tuple(widths), tuple(map(bool, bends[1:])), x.shape[0])
    entries += order.each
    if softmax is not None and widths[-2] < widths[0]:  # the last matrix of each sample
        entries += widths[-1] * widths[-2]
    if maps.layers:  # the vectors that go back are held beside their gradients
        entries += maps.entries + widths[-1] * (maps.outs + maps.live)
    ends = widths[0], widths[-1]
    kept = order, entries, shape
    return Chain(x, maps, linears, bends, softmax, squeezed, *ends, *kept)


class _Parts(NamedTuple):
    """The maps of a chain, its matrices, and the elementwise layers around these.

    Attributes:
        maps: The maps.
        linears: The matrices, at least one.
        bends: The elementwise layers before the first matrix, and after each.
        widths: The widths of the tensors between matrices, both ends included.
        kept: How many entries of a sample are kept for slopes.
        shape: The shape of a sample of the output.
    """

    maps: Maps
    linears: list[Linear]
    bends: list[list[Layer]]
    widths: list[int]
    kept: int
    shape: tuple[int, ...]


def _parts_of(x: Tensor, layers: list[Any]) -> _Parts | None:
    """Return the parts of the chain that layers are for the input x, or ``None``."""
    like, size = (x.dtype, x.device), tuple(x.shape[1:])
    if layers and type(layers[-1]) is Summed:  # the sum is not computed, but a matrix
        layers = [*layers[:-1], Linear(_equal(layers[-1], *like), None)]
    number, maps = _mapped(layers, len(size)), NO_MAPS
    if number or len(size) > 1:
        maps = maps_of(layers[:number], size, like)
        if maps is None:
            return None
        size = (maps.outs,)
    parted = _parted(layers[number:], size, like)
    if parted is None:
        return None
    linears, bends, widths, kept = parted
    if not linears and (len(maps.size) == 1 or _has_few_rows(maps)):
        # The rows of the maps, as vectors to go back with.
        eye = torch.eye(maps.outs, dtype=x.dtype, device=x.device)
        linears, bends = [Linear(eye, None)], [*bends, []]
        widths.append(maps.outs)
    if not 0 < len(linears) <= orders.MOST:
        return None
    if number and _is_narrower(widths, maps, x[0].numel()):
        return None
    is_image = number == len(layers) and len(maps.size) > 1
    shape = maps.size if is_image else (widths[-1],)
    return _Parts(maps, linears, bends, widths, kept, shape)


def _is_over_entries(softmax: Any) -> bool:
    """Tell whether a softmax is torch's own, over the entries of each sample."""
    is_own = is_own_function("softmax") and is_own_function("log_softmax")
    return is_own and type(softmax.dim) is int and softmax.dim in (1, -1)


def _parted(
    layers: list[Any], size: tuple[int, ...], like: tuple[torch.dtype, torch.device]
) -> tuple[list[Linear], list[list[Layer]], list[int], int] | None:
    """Return the linear layers, and the elementwise ones around them.

    Returns:
        Both, the widths of the tensors between, and how many entries of a sample are
        kept for slopes; ``None`` where there is another layer.
    """
    linears: list[Linear] = []
    bends: list[list[Layer]] = [[]]
    widths, kept = [*size], 0
    for layer in layers:
        if type(layer) in (nn.Linear, Linear):
            linear = parameters_of(layer, like)
            if linear is None:
                return None
            outs, ins = linear.weight.shape
            if ins != widths[-1]:
                return None
            widths.append(outs)
            linears.append(linear)
            bends.append([])
        elif bend := elementwise(layer) or scaling(layer, widths[-1], like):
            if not bends[-1]:
                kept += widths[-1]
            bends[-1].append(bend)
        elif not flattens(layer):
            return None
    return linears, bends, widths, kept


@lru_cache(maxsize=64)
@torch.inference_mode(False)
def _equal(sum_: Summed, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return the matrix of a sum, ``(1, count)``."""
    entry = 1 / sum_.of if sum_.averages else 1
    return torch.full((1, sum_.of), entry, dtype=dtype, device=device)


def _has_few_rows(maps: Maps) -> bool:
    """Tell whether convolutions have few enough outputs to go back from each."""
    convolves = any(type(it.module) is nn.Conv2d for it in every(maps.layers))
    return convolves and maps.outs <= MANY


def _is_narrower(widths: list[int], maps: Maps, ins: int) -> bool:
    """Tell whether columns, or a split, would take less than rows."""
    middle = min(maps.narrowest, *widths)
    return min(FORWARD * ins, SPLIT * middle) < widths[-1]


def _mapped(layers: list[Any], axes: int) -> int:
    """Return how many layers, the maps, come before the matrices.

    Args:
        layers: All layers.
        axes: How many axes a sample has.
    """
    if axes > 1:  # up to where samples are flattened
        return next((i for i, it in enumerate(layers) if flattens(it)), len(layers))
    kinds = [*map(type, layers)]
    # Without a matrix beside it, a batch norm is a map.
    among = _AMONG_MATRICES if {nn.Linear, Linear} & {*kinds} else _ELEMENTWISE
    others = [i for i, kind in enumerate(kinds, 1) if kind not in among]
    return others[-1] if others else 0
