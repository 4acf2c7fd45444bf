"""A kept value stays what it was."""

from typing import Any, cast

import numpy as np
import pytest
import torch
from torch import Tensor

from gradlib.values import keep, same_values


@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(6.0).view(2, 3),
        torch.arange(6.0).view(2, 3).T,
        torch.arange(6.0)[1:4],
        torch.arange(6.0).to(torch.complex64),
        torch.arange(6, dtype=torch.bfloat16),
        torch.arange(6),
        torch.from_numpy(np.arange(6.0)),
        torch.ones(3).share_memory_(),
    ],
    ids=["plain", "transposed", "slice", "complex", "half", "int", "numpy", "shared"],
)
def test_it_survives_in_place_changes(tensor: Tensor) -> None:
    expected = tensor.clone()
    kept = keep(tensor)
    tensor.add_(1)
    tensor.view_as(tensor).mul_(3)
    assert torch.equal(kept, expected)


def test_writing_to_the_kept_value_leaves_the_tensor_alone() -> None:
    tensor = torch.ones(3)
    keep(tensor).zero_()
    assert tensor.tolist() == [1, 1, 1]


def test_it_has_no_history() -> None:
    assert not keep(torch.ones(3, requires_grad=True) * 2).requires_grad


def test_nothing_is_copied_until_somebody_writes() -> None:
    tensor = torch.ones(3)
    kept = keep(tensor)
    assert cast(Any, torch._C)._is_cow_tensor(kept)
    assert address(tensor) == address(kept)
    tensor.add_(1)
    assert address(tensor) != address(kept)


def address(tensor: Tensor) -> int:
    # data_ptr() may be written through, so asking for it would make the copy.
    return cast(Any, torch._C)._data_address(tensor)


def test_same_values() -> None:
    x = torch.tensor([1.0, torch.nan, torch.inf])
    assert same_values(x, x.clone())
    assert not same_values(x, torch.tensor([1.0, 2.0, torch.inf]))
    assert same_values(torch.tensor([True, False]), torch.tensor([True, False]))
    assert not same_values(torch.tensor([1, 2]), torch.tensor([1, 3]))
