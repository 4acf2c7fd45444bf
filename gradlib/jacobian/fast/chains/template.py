"""Takes the modules and tensors out of a chain, and makes it again with others."""

from collections.abc import Callable, Iterable, Sequence
from operator import itemgetter
from typing import Any, TypeAlias, cast

from torch import Tensor, nn

from gradlib.jacobian.fast.chains.chain import Chain
from gradlib.jacobian.fast.chains.layers import Joined, Layer, Linear, Stage, Woven
from gradlib.jacobian.fast.chains.mapped import Maps
from gradlib.private.modules import own_parameters

Make: TypeAlias = Callable[[Sequence[Any]], Any]
"""Makes a part of a chain of the user's modules and weights, by their numbers.

``None`` in its place says that the part has none of them, and is kept as it is.
"""

NumberOf: TypeAlias = Callable[[Any], int | None]
"""Gives the number of a module or weight; ``None`` if it was made for the chain."""


def maker(
    chain: Chain, layers: Sequence[Any], number_of: NumberOf
) -> Callable[[Sequence[Any], Tensor], Chain]:
    """Return a function that makes a chain again; it keeps nothing of the user's.

    Args:
        chain: The chain.
        layers: The layers that it is made of.
        number_of: Gives the numbers of modules and weights.

    Returns:
        A function of modules and weights, by their numbers, and the input.
    """
    _, maps, linears, bends, softmax, *rest = chain
    given = [it for it in layers if type(it) in (nn.Linear, Linear)]
    # The last may have been made for the chain: for the rows of maps, or for a sum.
    is_made = not given or _parameters(given[-1]).weight is not linears[-1].weight
    count = len(linears) - is_made
    given = [*given[len(given) - count :], *linears[count:]]
    in_linears = _all(linears, (_linear(it, number_of) for it in given))
    of_maps = _or_kept(_layers(maps.layers, number_of), maps.layers)
    rest_of_maps = maps[1:]
    of_linears = _or_kept(in_linears, linears)
    of_bends = _or_kept(_all(bends, (_layers(it, number_of) for it in bends)), bends)
    of_softmax = _or_kept(_module(softmax, number_of), softmax)

    def make(values: Sequence[Any], x: Tensor) -> Chain:
        return Chain(
            x,
            Maps(of_maps(values), *rest_of_maps),
            of_linears(values),
            of_bends(values),
            of_softmax(values),
            *cast(Any, rest),
        )

    return make


def _or_kept(make: Make | None, part: Any) -> Make:
    return (lambda _: part) if make is None else make


def _all(parts: Iterable[Any], makes: Iterable[Make | None]) -> Make | None:
    """Return what makes a list, of which some parts may be kept."""
    pairs = [
        (make, None if make else it) for it, make in zip(parts, makes, strict=True)
    ]
    if not any(make for make, _ in pairs):
        return None
    return lambda values: [make(values) if make else it for make, it in pairs]


def _layers(layers: Sequence[Any], number_of: NumberOf) -> Make | None:
    return _all(layers, (_layer(it, number_of) for it in layers))


def _layer(layer: Any, number_of: NumberOf) -> Make | None:
    if type(layer) is Joined:
        _, by, inplace = layer
        ways = _all(layer.ways, (_layers(it, number_of) for it in layer.ways))
        return ways and (lambda values: Joined(tuple(ways(values)), by, inplace))
    if type(layer) is Woven:
        stages = _all(layer.stages, (_stage(it, number_of) for it in layer.stages))
        return stages and (lambda values: Woven(stages(values)))
    module, pointwise = _module(layer.module, number_of), layer.pointwise
    return module and (lambda values: Layer(module(values), pointwise))


def _stage(stage: Stage, number_of: NumberOf) -> Make | None:
    layers, (_, *rest) = _layers(stage.layers, number_of), stage
    return layers and (lambda values: Stage(layers(values), *cast(Any, rest)))


def _module(module: Any, number_of: NumberOf) -> Make | None:
    if type(module) is Linear:
        makes = [_module(it, number_of) for it in module]
        if not any(makes):
            return None
        weight, bias = map(_or_kept, makes, module)
        return lambda values: Linear(weight(values), bias(values))
    number = number_of(module)
    return None if number is None else itemgetter(number)


def _linear(layer: nn.Linear | Linear, number_of: NumberOf) -> Make | None:
    module = _module(layer, number_of)
    if module is None or type(layer) is Linear:
        return module
    return lambda values: _parameters(module(values))


def _parameters(layer: nn.Module | Linear) -> Linear:
    if type(layer) is Linear:
        return layer
    own: Any = own_parameters(cast(nn.Module, layer))
    return Linear(own["weight"], own.get("bias"))
