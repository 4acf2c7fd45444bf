"""Four samples that many tests are given, and the modes they try."""

import pytest
import torch
from torch import Tensor

from gradlib.random_state import seed_all

MODES = ("auto", "reverse", "forward", "split", "loop")


@pytest.fixture
def x() -> Tensor:
    seed_all(0)
    return torch.randn(4, 3, dtype=torch.float64)


def diagonal(values: Tensor) -> Tensor:
    return torch.diag_embed(values)
