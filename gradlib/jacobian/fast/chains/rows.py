"""The Jacobian of linear layers with elementwise ones between each two, by rows.

This is the commonest chain, and its products need no order: each takes all rows of all
samples back through one layer.
"""

from collections.abc import Sequence

from torch import Tensor

from gradlib.jacobian.fast.chains.bends import Bend, bent, pulled
from gradlib.jacobian.fast.chains.chain import Chain
from gradlib.jacobian.fast.chains.layers import Layer, Parameters
from gradlib.jacobian.fast.chains.order import is_by_rows
from gradlib.jacobian.fast.matmul import Library


def goes_by_rows(chain: Chain) -> bool:
    """Tell whether a chain has such layers only, and rows are the cheapest order."""
    if chain.maps.layers or chain.softmax is not None:
        return False
    first, *between, last = chain.bends
    if first or last or not between or not all(between):
        return False
    return is_by_rows(chain.order.tree)


def by_rows(
    between: Sequence[list[Layer]],
    x: Tensor,
    linears: Sequence[Parameters],
    library: Library,
) -> Tensor:
    """Return the Jacobian, ``(batch, outs, ins)``.

    Args:
        between: The elementwise layers between the linear layers, in order.
        x: The input of the first linear layer, ``(batch, ins)``.
        linears: The parameters of the linear layers.
        library: The functions that multiply.
    """
    linear_then, multiplied = library
    seen: list[list[Bend]] = []
    h, last = x, len(between) - 1
    for place, layers in enumerate(between):
        known = layers[0].pointwise
        assert known is not None, "a convolution is not elementwise"
        h, begun = linear_then(h, *linears[place], known.name)
        bends, h = bent(layers, h, ours=True, last=place == last, begun=begun)
        seen.append(bends)
    v = linears[-1][0].contiguous()  # or torch may multiply sample by sample
    while seen:
        v = pulled(v, seen.pop())
        v = multiplied(v, linears[len(seen)][0])
    return v
