"""A vector-Jacobian product as an einsum."""

from string import ascii_lowercase, ascii_uppercase

from torch import Tensor

# Axes are called i, j, k, ...
_LETTERS = ascii_lowercase[8:] + ascii_lowercase[:8] + ascii_uppercase


def equation(v: Tensor, result: Tensor) -> str | None:
    """Return the einsum of v and J that gives vᵀJ, as ``"jk,jki->i"``.

    Args:
        v: The vector, of the output's shape: the first axes of J.
        result: vᵀJ, of the input's shape: the last axes of J.

    Returns:
        ``None`` where there is no such einsum: for nested tensors, for too many axes,
        and for a complex v, each entry of which has two rows in J.
    """
    if v.is_complex() or v.is_nested or result.is_nested:
        return None
    if v.ndim + result.ndim > len(_LETTERS):
        return None
    i, j = _LETTERS[: result.ndim], _LETTERS[result.ndim :][: v.ndim]
    return f"{j},{j}{i}->{i}"
