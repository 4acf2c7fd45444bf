"""A chain without its modules and tensors, and with them again."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, cast

from torch import Tensor, nn

from gradlib.jacobian.fast.chains.chain import Chain
from gradlib.jacobian.fast.chains.layers import Joined, Layer, Linear, Woven
from gradlib.jacobian.fast.chains.mapped import Maps
from gradlib.private.modules import own_parameters


class Slot(NamedTuple):
    """Stands where a module was, a weight, or the parameters of a linear layer.

    Attributes:
        number: Of the module, or of the weight.
    """

    number: int


def emptied(
    chain: Chain, layers: Sequence[Any], number_of: Callable[[Any], int | None]
) -> Chain:
    """Return a chain with places for modules, and nothing else of somebody's.

    Args:
        chain: The chain.
        layers: The layers that it was made from.
        number_of: Of a module, or a weight: its number; ``None`` if it was made for
            the chain.
    """

    def place(module: Any) -> Any:
        if type(module) is Linear:
            return Linear(*map(place, module))
        number = number_of(module)
        return module if number is None else Slot(number)

    linears: list[Any] = chain.linears
    found = [it for it in layers if type(it) in (nn.Linear, Linear)]
    # The last may have been made, for the rows of the maps or for a sum.
    is_made = not found or _parameters(found[-1]).weight is not linears[-1].weight
    count = len(linears) - is_made
    linears = [*map(place, found[len(found) - count :]), *linears[count:]]
    nothing: Any = None
    return _changed(chain, place, linears, nothing)


def filled(chain: Chain, modules: Sequence[Any], x: Tensor) -> Chain:
    """Return a chain with modules in their places.

    Args:
        chain: What `emptied` has returned.
        modules: The modules and weights, by their numbers.
        x: What it is given.
    """

    def module(place: Any) -> Any:
        kind = cast(Any, type(place))
        if kind is Slot:
            return modules[place.number]
        if kind is not Linear:
            return place
        weight, bias = place
        return Linear(
            modules[weight.number] if type(weight) is Slot else weight,
            modules[bias.number] if type(bias) is Slot else bias,
        )

    linears: list[Any] = [*map(_parameters, map(module, chain.linears))]
    return _changed(chain, module, linears, x)


def _changed(
    chain: Chain, change: Callable[[Any], Any], linears: list[Linear], x: Tensor
) -> Chain:
    """Return a chain with other modules and tensors."""

    def changed(layers: Sequence[Any]) -> list[Any]:
        return [*map(one, layers)]

    def one(it: Any) -> Any:
        if type(it) is Joined:
            return it._replace(ways=tuple(map(changed, it.ways)))
        if type(it) is Woven:
            return Woven([at._replace(layers=changed(at.layers)) for at in it.stages])
        return Layer(change(it.module), it.pointwise)

    _, maps, _, bends, softmax, *others = chain
    rest: list[Any] = others
    if maps.layers:
        maps = Maps(changed(maps.layers), *maps[1:])
    bends = [changed(it) if it else [] for it in bends]
    return Chain(x, maps, linears, bends, change(softmax), *rest)


def _parameters(layer: nn.Module | Linear) -> Linear:
    if type(layer) is Linear:
        return layer
    own: Any = own_parameters(cast(nn.Module, layer))
    return Linear(own["weight"], own.get("bias"))
