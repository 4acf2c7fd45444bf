"""Where slopes by finite differences are not those by a Jacobian."""

from collections.abc import Iterator, Mapping
from functools import reduce

import torch
from torch import Tensor

from gradlib.jacobian.agreement import closeness
from gradlib.jacobian.differences import HIDING, ROUNDING
from gradlib.jacobian.first_look import Slopes, length
from gradlib.jacobian.graph import Graph
from gradlib.jacobian.pieces import Block

MANY = 16
"""At most one in this many samples is in doubt only because its slopes cancel.

Along a random direction, those of a few samples in thousands do.
"""

SMALL = 100
"""By how many eps of a sample's slopes, taken together, a single one may be off."""

TINY = 1e-150
"""The squares of numbers not much smaller become zero in float64."""


def unclear_entries(
    slopes: Slopes, graph: Graph, blocks: Mapping[Block, Tensor]
) -> dict[int, Tensor]:
    """Return for each output the entries whose slope is not the Jacobian's."""
    every: dict[int, Tensor] = {}
    close = slopes.caller.how.sure or closeness(graph)
    eps = torch.finfo(graph.drawing.narrowest_dtype).eps
    for root, slope in enumerate(slopes.steep):
        known = _known_slope(slopes, graph, blocks, root)
        slope, noise = slope.to(known), slopes.noise(root).to(known)
        unclear = _unclear(known, slope, noise, close, eps)
        if not unclear.any():
            continue
        samples = unclear.any(1)
        if MANY * samples.sum() <= graph.batch:
            rounding = _rounding(slopes, graph, blocks, root, samples)
            noise = noise.index_put((samples,), rounding, accumulate=True)
            unclear = _unclear(known, slope, noise, close, eps)
        if unclear.any():
            every[root] = unclear
    return every


def _known_slope(
    slopes: Slopes, graph: Graph, blocks: Mapping[Block, Tensor], root: int
) -> Tensor:
    """Return the slope of an output by the Jacobian, ``(batch, out)``, in float64."""
    device = graph.points[0].device
    parts = (
        (block @ u).reshape(graph.batch, -1).to(device, torch.float64)
        for block, u in _factors(slopes, graph, blocks, root)
    )
    return reduce(torch.add, parts)


def _rounding(
    slopes: Slopes,
    graph: Graph,
    blocks: Mapping[Block, Tensor],
    root: int,
    samples: Tensor,
) -> Tensor:
    """Return how far rounding of the Jacobian may move some samples' slopes.

    It grows with the terms of a slope's sum, which may cancel.

    Args:
        slopes: The slopes along a direction.
        graph: The graph of the forward pass.
        blocks: The Jacobian.
        root: Which output.
        samples: Which samples, ``(batch,)``.
    """
    total = torch.zeros(1, dtype=torch.float64, device=graph.points[0].device)
    for block, u in _factors(slopes, graph, blocks, root):
        if block.dtype.itemsize < 4:  # their tolerance is wide already
            continue
        in_block = samples.to(block.device)
        terms = block[in_block] * (u if u.dim() == 1 else u[in_block].mT)
        eps = torch.finfo(block.dtype).eps
        total = total + (eps * terms.double()).square().sum((1, 2)).to(total)
    return ROUNDING * total.sqrt()


def _factors(
    slopes: Slopes, graph: Graph, blocks: Mapping[Block, Tensor], root: int
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield each block of an output, ``(batch, out, in)``, and its direction.

    The direction is ``(in,)`` where all samples share the input, else ``(batch, in,
    1)``.
    """
    for point, it in enumerate(slopes.caller.arguments.asked):
        block = blocks[root, point].detach()
        u = slopes.along[it.key].to(block)
        yield (
            block.reshape(graph.batch, graph.rows(root), graph.columns(point)),
            u.flatten() if it.shared else u.reshape(graph.batch, -1, 1),
        )


def _unclear(
    known: Tensor, slope: Tensor, noise: Tensor, close: float, eps: float
) -> Tensor:
    """Return where two slopes differ, or may by rounding, as ``(batch, out)``.

    Each sample is judged as a whole, then each entry, as a wrong one that is small
    beside others would not show. Where all agree, the result may be ``(batch, 1)``, all
    False. In a sample that differs, the entries that do are marked, by their mean
    square: so at least one is. What is infinite or NaN says nothing.

    Args:
        known: The slopes by the Jacobian, ``(batch, out)``.
        slope: The slopes by finite differences, ``(batch, out)``.
        noise: How far rounding may move the latter, ``(batch,)``.
        close: By which part of the larger one they may differ.
        eps: The eps of the Jacobian's dtype.
    """
    size = torch.maximum(length(known), length(slope))
    off = known - slope
    apart = length(off)
    hidden = (noise > HIDING * size) & (size > 0)
    # No entry is off by more than its sample is, up to what underflows in that.
    if not (hidden | (apart + TINY > min(close, SMALL * eps) * size + noise)).any():
        return hidden[:, None]
    samples = (apart > close * size + noise) | hidden
    larger = torch.maximum(known.abs(), slope.abs())
    allowed = close * larger + (noise + SMALL * eps * size)[:, None]
    small = off.abs() > allowed
    if not (samples.any() or small.any()):
        return samples[:, None]
    samples = samples & apart.isfinite()
    own = off.square() > close**2 * (known.square() + slope.square()) / 2
    own_samples = samples[:, None] & (own | hidden[:, None])
    return own_samples | (small & off.isfinite())
