"""Shapes of tensors."""

from collections.abc import Sequence


def broadcasts(shape: Sequence[int], wanted: Sequence[int]) -> bool:
    """Tell whether a tensor of a shape can be expanded to the `wanted` one."""
    sizes = zip(reversed(shape), reversed(wanted), strict=False)
    return len(shape) <= len(wanted) and all(a in (1, b) for a, b in sizes)
