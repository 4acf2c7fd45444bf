"""Whether a value has NaN, inf or both."""

from math import isnan

import numpy as np
from torch import Tensor

from gradlib.plain_tensors import is_inexact, wide
from gradlib.stats import TensorStats, count_nonfinite
from gradlib.subclasses import UnknownToClassError, if_known
from gradlib.tree import Tree

NAN, INF = 1, 2
"""The bits of what a value has; it may have both."""


def kinds_in(value: object) -> int:
    """Return the bits of what a value has; 0 for what is no number."""
    match value:
        case Tensor():
            return _kinds_of_tensor(value)
        case TensorStats():
            # One NaN makes the norm NaN, whatever else is there.
            return 0 if not value.nonfinite > 0 else NAN if isnan(value.norm) else INF
        case float() | complex() | np.inexact():
            return _bits(np.isnan(value), np.isinf(value))
        case np.ndarray() if value.dtype.kind in "fc":
            return _bits(np.isnan(value).any(), np.isinf(value).any())
        case _:  # a structure, as a function given as `reduce` may return
            inner = [it for it in Tree.of(value).leaves if it is not value]
            found = [*map(kinds_in, inner)]
            return _bits(any(it & NAN for it in found), any(it & INF for it in found))


def _kinds_of_tensor(tensor: Tensor) -> int:
    if tensor.is_meta or not is_inexact(tensor.dtype):
        return 0
    try:
        return if_known(lambda: _kinds_of_numbers(wide(tensor)), [tensor])
    except UnknownToClassError:
        return 0


def _kinds_of_numbers(values: Tensor) -> int:
    if not count_nonfinite(values):
        return 0
    return _bits(values.isnan().any(), values.isinf().any())


def _bits(has_nan: object, has_inf: object) -> int:
    return NAN * bool(has_nan) + INF * bool(has_inf)
