"""The part of a gradient that belongs to a view."""

import torch

from gradlib.recorder.views import base_of, watch


def test_the_region_of_a_view() -> None:
    base = (torch.arange(12.0, requires_grad=True) * 1).view(3, 4)
    view = base[1:, ::2].T
    found = base_of(view)
    assert found is not None
    real_base, region = found
    gradient = torch.randn(real_base.shape)
    expected = gradient.view(3, 4)[1:, ::2].T
    assert torch.equal(region.of(gradient), expected)


def test_gradients_of_another_layout_and_place() -> None:
    base = torch.zeros(3, 4, requires_grad=True) * 1
    found = base_of(base[1:, 1:3])
    assert found is not None
    gradient = torch.randn(4, 3).T  # of the base's shape, with other strides
    assert torch.equal(found[1].of(gradient), gradient[1:, 1:3])
    inside = torch.randn(24)[6:18].view(3, 4)  # the base's strides, elsewhere in memory
    assert torch.equal(found[1].of(inside), inside[1:, 1:3])
    assert torch.equal(found[1].of(torch.ones(1).expand(3, 4)), torch.ones(2, 2))


def test_a_base_that_is_itself_elsewhere_in_memory() -> None:
    base = torch.zeros(24)[6:18].view(3, 4).detach().requires_grad_()
    found = base_of(base[1:, 1:3])
    assert found is not None
    assert found[0] is base
    gradient = torch.randn(3, 4)
    assert torch.equal(found[1].of(gradient), gradient[1:, 1:3])
    found = base_of(torch.view_as_complex(base.view(3, 2, 2))[1:])
    assert found is not None
    expected = torch.view_as_complex(gradient.view(3, 2, 2))[1:]
    assert torch.equal(found[1].of(gradient), expected)


def test_a_tensor_that_is_no_view() -> None:
    assert base_of(torch.ones(3, requires_grad=True)) is None
    assert base_of(torch.ones(3)[1:]) is None


def test_watching_a_tensor() -> None:
    tensor = torch.zeros(3)
    overwritten = watch(tensor)
    assert not overwritten()
    tensor[:1].add_(1)
    assert overwritten()
