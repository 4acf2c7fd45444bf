"""How far slopes by finite differences and by the VJP are apart."""

import math
from dataclasses import dataclass
from typing import NamedTuple

HIDING = 0.1
"""Rounding of more than this part of the slopes may hide an error."""


class Apart(NamedTuple):
    """How far slopes by the two ways are apart."""

    error: float  # as a part of their size
    is_clear: bool  # whether rounding is too small to hide more


@dataclass(slots=True)
class Slope:
    """The slope of L along one step, times the length of that."""

    seen: float  # by finite differences
    noise: float  # how far rounding may have moved that
    known: float = 0.0  # by the VJP


def apart(
    slopes: list[Slope], size: float = 0.0, hiding: float = HIDING
) -> Apart | None:
    """Return how far the slopes by the two ways are apart.

    Args:
        slopes: Some slopes.
        size: Their size; by default the larger of the two norms.
        hiding: Rounding of more than this part of the size may hide an error.

    Returns:
        ``None`` where a finite difference is not finite.
    """
    seen, known = [it.seen for it in slopes], [it.known for it in slopes]
    if not all(map(math.isfinite, seen)):
        return None
    if not all(map(math.isfinite, known)):
        return Apart(math.inf, is_clear=True)
    errors = [max(abs(it.seen - it.known) - it.noise, 0.0) for it in slopes]
    size = size or max(math.hypot(*seen), math.hypot(*known))
    is_clear = math.hypot(*(it.noise for it in slopes)) <= hiding * size
    return Apart(math.hypot(*errors) / size if any(errors) else 0.0, is_clear)
