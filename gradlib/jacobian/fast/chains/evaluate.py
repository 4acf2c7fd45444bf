"""Computes the Jacobian of a chain, from one forward pass without a graph."""

import math
from collections.abc import Callable

from torch import Tensor

from gradlib.jacobian.fast.chains import through_maps
from gradlib.jacobian.fast.chains.bends import Bend, bent, pulled
from gradlib.jacobian.fast.chains.chain import Chain
from gradlib.jacobian.fast.chains.product import Factors, is_by_columns, whole_product
from gradlib.jacobian.fast.chains.result import samples_at_once
from gradlib.jacobian.fast.chains.softened import softened
from gradlib.jacobian.fast.chains.steps import Steps, part
from gradlib.jacobian.fast.matmul import linear_then
from gradlib.jacobian.fresh import HUGE, empty, keep_what_is_freed
from gradlib.private.modes import enable_grad, grad_is_enabled


def evaluate(chain: Chain, out: Tensor | None, *, create_graph: bool) -> Tensor:
    """Return the Jacobian of a chain, ``(batch, out, *in)``.

    Args:
        chain: The chain.
        out: A contiguous tensor to write to; ``None`` for new memory.
        create_graph: Whether gradients flow through the Jacobian.
    """
    keep_what_is_freed()
    before = grad_is_enabled()
    enable_grad(bool(create_graph))
    try:
        steps, h = through_maps.forward(chain.maps, chain.x, chain.outs)
        steps, shared = _shared(chain, steps, h)
        at_once = samples_at_once(chain)
        shape = h.shape[0], chain.outs, chain.x.shape[1:].numel()
        # A large result without maps is written to huge pages directly.
        apart = not chain.maps.layers and math.prod(shape) * h.element_size() >= HUGE
        if create_graph or (out is None and at_once >= h.shape[0] and not apart):
            made = _of(chain, steps, h, None, shared)
        else:
            made = in_parts(
                shape,
                h,
                at_once,
                lambda start, stop, into: _of(
                    chain, part(steps, start, stop), h[start:stop], into, shared
                ),
                out,
                columns=is_by_columns(chain.order.tree) and not chain.maps.layers,
            )
        if out is not None:
            return out
        as_it_is = chain.x.dim() == 2 and not chain.squeezed
        return made if as_it_is else made.view(chain.shape)
    finally:
        enable_grad(before)


def in_parts(
    shape: tuple[int, int, int],
    like: Tensor,
    at_once: int,
    part_of: Callable[[int, int, Tensor], Tensor],
    out: Tensor | None,
    *,
    columns: bool,
) -> Tensor:
    """Return the Jacobian, ``(samples, outs, ins)``, written a few samples at a time.

    Args:
        shape: Its shape.
        like: A tensor of its dtype and device.
        at_once: How many samples to compute at a time.
        part_of: A function of the first sample, the one after the last and the tensor
            to write to, that returns their Jacobian, there or in other memory.
        out: A contiguous tensor to write to; ``None`` for new memory.
        columns: Whether new memory is laid out ``(samples, ins, outs)``.
    """
    samples, outs, ins = shape
    if out is not None:
        whole = out.view(shape)
    elif columns:
        whole = empty((samples, ins, outs), like).mT
    else:
        whole = empty(shape, like)
    for start in range(0, samples, at_once):
        stop = min(start + at_once, samples)
        into = whole[start:stop]
        made = part_of(start, stop, into)
        if made is not into:
            into.copy_(made)
    return whole


def _shared(chain: Chain, steps: Steps, h: Tensor) -> tuple[Steps, Tensor | None]:
    """Go back as far as the Jacobian is the same for all samples, once for all.

    Returns:
        The steps left, and the vectors for them, ``(1, outs, ...)``; ``None`` where
        samples differ from the start.
    """
    if not chain.begins_alike:
        return steps, None
    factors, _ = _factors(chain, h)
    made = whole_product(factors, chain.order.tree, None)
    return through_maps.backward_alike(steps, made.view(1, -1, *h.shape[1:]))


def _of(
    chain: Chain,
    steps: Steps,
    h: Tensor,
    into: Tensor | None,
    shared: Tensor | None,
) -> Tensor:
    """Return the Jacobian of some samples, ``(samples, outs, ins)``.

    Args:
        chain: The chain.
        steps: The steps back through its maps.
        h: The output of the maps, ``(samples, ...)``.
        into: A tensor that the result may be written to.
        shared: The vectors that go back through the maps, if the same for all samples.
    """
    if shared is not None:
        v = shared.expand(h.shape[0], *shared.shape[1:])
        # Where no step is left, all samples share memory.
        return through_maps.backward(steps, v).flatten(2).contiguous()
    factors, y = _factors(chain, h)
    into = None if chain.maps.layers else into
    if chain.softmax is None:
        made = whole_product(factors, chain.order.tree, into)
    else:
        made = _softened_product(chain, factors, y, into)
    if chain.maps.layers:
        v = made if made.dim() > 2 else made.expand(h.shape[0], -1, -1)
        if h.dim() > 2:
            v = v.view(h.shape[0], -1, *h.shape[1:])
        return through_maps.backward(steps, v).flatten(2)
    if made.dim() > 2:
        return made
    return made.expand(h.shape[0], -1, -1).clone()  # no view of a weight


def _softened_product(
    chain: Chain, factors: Factors, y: Tensor, into: Tensor | None
) -> Tensor:
    """Return the product of all factors, where a softmax of y comes at the end."""
    softmax, tree = chain.softmax, chain.order.tree
    assert softmax is not None, "there is one"
    if not chain.softens_early:
        return softened(softmax, y, whole_product(factors, tree, into))
    *others, last = factors.matrices
    if after := factors.bends[-1]:
        last = pulled(last.mT, after).mT
    bends = [*factors.bends[:-1], list[Bend]()]
    factors = Factors([*others, softened(softmax, y, last)], bends)
    return whole_product(factors, tree, into)


def _factors(chain: Chain, h: Tensor) -> tuple[Factors, Tensor]:
    """Return the factors at h, and the output that a softmax needs.

    Without a softmax the last layers are not computed, and the second is undefined.
    """
    needless = chain.softmax is None
    if h.dim() > 2:
        h = h.flatten(1)
    bends: list[list[Bend]] = [[] for _ in chain.bends]
    reach = len(bends)
    while needless and reach and not chain.bends[reach - 1]:
        reach -= 1
    for place in range(reach):
        layers, begun = chain.bends[place], False
        if place:
            known = layers[0].pointwise if layers else None
            then = known.name if known else "none"
            h, begun = linear_then(h, *chain.linears[place - 1], then)
        if layers:
            last = needless and place == reach - 1
            bends[place], h = bent(layers, h, ours=place > 0, last=last, begun=begun)
    return Factors([it.weight for it in chain.linears], bends), h
