"""What a release of torch can tell of a graph."""

from typing import Any, cast

import pytest
import torch

_is_shown = hasattr(cast(Any, torch)._C._autograd.SavedTensor, "data")

where_shown = pytest.mark.skipif(
    not _is_shown, reason="what is saved does not show before torch 2.10"
)
"""Marks a test that looks at what a graph has saved."""
