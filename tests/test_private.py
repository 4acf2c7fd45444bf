"""What stands for torch's own insides."""

import threading
import warnings
import weakref

import pytest
import torch
from torch import Tensor

from gradlib.private.modes import for_several
from gradlib.private.tensors import referent


def test_a_tensor_found_by_a_weak_reference_outlives_its_graph() -> None:
    x = torch.ones(3, requires_grad=True)
    h = x * 2
    reference = weakref.ref(h)
    y = h.sin()  # which saves h
    del h
    found = referent(reference)
    del y
    assert found is not None
    assert found.sum().item() == 6


def test_a_tensor_that_is_gone_is_not_found() -> None:
    reference = weakref.ref(torch.ones(3))
    assert referent(reference) is None


def looped(x: Tensor) -> list[Tensor]:
    """Return what vmap has no rule for, so that it loops over the values and warns."""
    return [torch.nn.functional.pdist(x)]


def test_a_batched_pass_is_silent_though_another_thread_has_ended_one() -> None:
    values = torch.randn(2, 3, 1)

    def around(x: Tensor) -> list[Tensor]:
        other = threading.Thread(target=for_several, args=(looped, values))
        other.start()
        other.join()
        return looped(x)

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        (found,) = for_several(around, values)
    assert torch.equal(found, torch.stack([looped(it)[0] for it in values]))
    with pytest.warns(UserWarning, match="There is a performance drop"):
        torch.func.vmap(looped)(values)
