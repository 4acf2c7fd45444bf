"""What the stand-in for CUDA lacks."""

import os

import pytest

from ..stand_in_cuda.lacking import LACKING


def pytest_runtest_setup(item: pytest.Function) -> None:
    """Skip what needs more, where it stands in."""
    if os.environ.get("GRADLIB_STAND_IN_CUDA") and item.originalname in LACKING:
        pytest.skip(LACKING[item.originalname])
