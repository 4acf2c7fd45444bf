"""What stands for torch's own insides."""

import weakref

import torch

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
