"""Four samples that many tests are given, and the modes they try."""

import pytest
import torch
from torch import Tensor

MODES = ("auto", "reverse", "forward", "split", "loop")


@pytest.fixture
def x() -> Tensor:
    torch.manual_seed(0)
    return torch.randn(4, 3, dtype=torch.float64)


def diagonal(values: Tensor) -> Tensor:
    return torch.diag_embed(values)
