"""Whether numbers are finite: zero times infinity or NaN is NaN."""

import math
from collections import defaultdict
from collections.abc import Iterable

import torch
from torch import Tensor


def are_finite(tensors: Iterable[Tensor]) -> bool:
    """Tell whether all entries are finite, by sums, which must not overflow either.

    Args:
        tensors: Of any dtype. This waits for each GPU once.
    """
    sums: dict[torch.device, list[Tensor]] = defaultdict(list)
    for tensor in tensors:
        if tensor.is_cuda:
            sums[tensor.device].append(tensor.sum(dtype=torch.float64))
        elif not math.isfinite(tensor.sum().item()):
            return False
    return all(math.isfinite(torch.stack(it).sum().item()) for it in sums.values())
