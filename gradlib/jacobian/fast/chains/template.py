"""Takes the modules and tensors out of a chain, and fills them in again."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, cast

from torch import Tensor, nn

from gradlib.jacobian.fast.chains.chain import Chain
from gradlib.jacobian.fast.chains.layers import Joined, Layer, Linear, Woven
from gradlib.jacobian.fast.chains.mapped import Maps
from gradlib.private.modules import own_parameters


class Slot(NamedTuple):
    """The place of a module, or of a weight, in a chain without them.

    Attributes:
        number: The number of the module, or of the weight.
    """

    number: int


def emptied(
    chain: Chain, layers: Sequence[Any], number_of: Callable[[Any], int | None]
) -> Chain:
    """Return a chain with slots for the user's modules and weights.

    Args:
        chain: The chain.
        layers: The layers that it is made of.
        number_of: A function from a module, or weight, to its number; ``None`` if it
            was made for the chain.
    """

    def place(module: Any) -> Any:
        if type(module) is Linear:
            return Linear(*map(place, module))
        number = number_of(module)
        return module if number is None else Slot(number)

    linears: list[Any] = chain.linears
    given = [it for it in layers if type(it) in (nn.Linear, Linear)]
    # The last may have been made for the chain: for the rows of maps, or for a sum.
    is_made = not given or _parameters(given[-1]).weight is not linears[-1].weight
    count = len(linears) - is_made
    linears = [*map(place, given[len(given) - count :]), *linears[count:]]
    nothing: Any = None
    return _changed(chain, place, linears, nothing)


def filled(chain: Chain, modules: Sequence[Any], x: Tensor) -> Chain:
    """Return a chain with modules and weights in its slots.

    Args:
        chain: The result of `emptied`.
        modules: The modules and weights, by their numbers.
        x: The input, ``(batch, *in)``.
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
    """Return a chain with each module and tensor changed by `change`."""

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
