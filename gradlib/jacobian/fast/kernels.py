"""torch's kernels, and the calls of them that several files share."""

from typing import Any, cast

import torch

aten = cast(Any, torch.ops.aten)

DTYPES = (torch.float32, torch.float64)
"""In narrower dtypes another order of operations would change the result visibly."""

INPUT_ALONE = [True, False, False]
"""The output mask of a backward kernel: the gradient of the input, none of weights."""
