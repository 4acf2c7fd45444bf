"""What the entries of a v are: all ones, one-hot, and so on."""

from dataclasses import dataclass
from enum import Enum

import torch
from torch import Tensor

from gradlib.plain_tensors import wide
from gradlib.private.tensors import has_values

DIGITS = 4  # at most, of a factor


class Kind(Enum):
    """What the entries of a v are; the value says it in words."""

    UNKNOWN = "without values"
    EMPTY = "no entries"
    ZEROS = "all zeros"
    SINGLE = "one entry"
    MEAN = "one over the number of entries, everywhere"
    CONSTANT = "all the same"
    ONE_HOT = "one-hot"
    MIXED = "a weight for each entry"
    COMPLEX = "a complex weight for each entry"


@dataclass(frozen=True)
class Weights:
    """The entries of one output's v.

    Attributes:
        kind: What they are.
        factor: The only value besides 0, in few digits; ``""`` for 1.
        exact: Whether `factor` is exactly that value.
        index: Where the nonzero entry of a one-hot v is.
    """

    kind: Kind
    factor: str = ""
    exact: bool = True
    index: tuple[int, ...] = ()

    def __str__(self) -> str:
        """Say what they are, as ``"one-hot at [0, 2]"``."""
        match self.kind:
            case Kind.SINGLE:
                return self.factor or "1"
            case Kind.CONSTANT | Kind.MEAN:
                return f"all {self.factor}" if self.factor else "all ones"
            case Kind.ONE_HOT:
                value = f", {self.factor}" if self.factor else ""
                return f"one-hot at {list(self.index)}{value}"
            case kind:
                return kind.value


def weights_in(v: Tensor) -> Weights:
    """Return what the entries of `v` are."""
    if not has_values(v):
        return Weights(Kind.UNKNOWN)
    entries = wide(v).flatten()  # on a GPU nonzero() takes 25 axes at most
    places = entries.nonzero()[:, 0]
    if not len(places):
        return Weights(Kind.ZEROS if len(entries) else Kind.EMPTY)
    if v.is_complex():
        return Weights(Kind.COMPLEX)
    value = entries[places[0]].item()
    factor, exact = _written(value, v.dtype)
    if v.is_nested:  # it has no shape, so no entry has an index
        if (entries == value).all():
            return Weights(Kind.CONSTANT, factor, exact)
        return Weights(Kind.MIXED)
    index = tuple(int(it) for it in torch.unravel_index(places[0], v.shape))
    if v.numel() == 1:
        return Weights(Kind.SINGLE, factor, exact)
    if len(places) == 1:
        return Weights(Kind.ONE_HOT, factor, exact, index)
    if (entries != value).any():
        return Weights(Kind.MIXED)
    if value == _rounded(1 / v.numel(), v.dtype):
        return Weights(Kind.MEAN, f"1/{v.numel()}")
    return Weights(Kind.CONSTANT, factor, exact)


def _written(value: float, dtype: torch.dtype) -> tuple[str, bool]:
    """Return a number in few digits, ``""`` for 1, and whether they are exact."""
    if value == 1:
        return "", True
    texts = [f"{value:.{digits}g}" for digits in range(1, DIGITS + 1)]
    exact = [it for it in texts if _rounded(float(it), dtype) == value]
    return (min(exact, key=len), True) if exact else (texts[-1], False)


def _rounded(value: float, dtype: torch.dtype) -> float:
    """Return a number rounded to a dtype."""
    return torch.tensor(value, dtype=dtype, device="cpu").item()
