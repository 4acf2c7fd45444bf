"""What the installed release of torch supports."""

from typing import Any, cast

import pytest
import torch

_is_shown = hasattr(cast(Any, torch)._C._autograd.SavedTensor, "data")

where_shown = pytest.mark.skipif(
    not _is_shown, reason="what is saved does not show before torch 2.10"
)
"""Marks a test that looks at what a graph has saved."""


def older_than_dicts() -> bool:
    """Tell whether this torch takes no dict of inputs."""
    return "dict" not in (torch.autograd.grad.__doc__ or "")
