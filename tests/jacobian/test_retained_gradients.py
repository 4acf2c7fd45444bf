"""Gradients that somebody retains are left as they are."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gradlib
from gradlib.jacobian import retained

from .four_samples import MODES
from .four_samples import x as x  # a fixture


class Retaining(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(3, 4), nn.Linear(4, 2)
        self.hidden: Tensor

    def forward(self, x: Tensor) -> Tensor:
        self.hidden = self.first(x).tanh()
        self.hidden.retain_grad()
        return self.last(self.hidden)


@pytest.mark.parametrize("mode", MODES)
def test_retained_gradients_are_not_filled(x: Tensor, mode: str) -> None:
    model = Retaining().double()
    for argnums in (0, "parameters") if mode != "split" else (0,):
        gradlib.per_sample_jacobian(model, x, mode=mode, argnums=argnums)
        assert model.hidden.retains_grad
        assert model.hidden.grad is None
    gradlib.plan_jacobian(model.forward, x)
    model(x).sum().backward()
    retained = model.hidden.grad
    assert retained is not None
    assert torch.equal(retained, model.last.weight.sum(0).expand(4, 4))


def test_the_class_of_tensors_is_changed_once_only(x: Tensor) -> None:
    gradlib.per_sample_jacobian(torch.sin, x)
    told = vars(Tensor)["retain_grad"]
    gradlib.per_sample_jacobian(torch.sin, x)
    assert vars(Tensor)["retain_grad"] is told


def test_retained_gradients_of_tensors_that_are_there_are_left(x: Tensor) -> None:
    given = x.requires_grad_() * 1
    given.retain_grad()
    y = given.sin()
    y.retain_grad()
    y.sum().backward(retain_graph=True)
    before = given.grad, y.grad
    gradlib.per_sample_jacobian_from_graph(y, given)
    assert (given.grad, y.grad) == before


def one_between(x: Tensor) -> tuple[Tensor, list[Tensor]]:
    h = x.sin()
    h.retain_grad()
    return h.cos(), [h]


def filled_before(x: Tensor) -> tuple[Tensor, list[Tensor]]:
    h = x.sin()
    h.retain_grad()
    h.cos().sum().backward(retain_graph=True)
    return h * h, [h]


def several_between(x: Tensor) -> tuple[Tensor, list[Tensor]]:
    h, between = x, list[Tensor]()
    for _ in range(4):
        h = (1.5 * h).tanh()
        h.retain_grad()
        between.append(h)
    between[1].grad = torch.ones_like(h)
    return h.exp() + between[0], between


def views_between(x: Tensor) -> tuple[Tensor, list[Tensor]]:
    h = x @ x.new_ones(3, 5)
    between = [h, h[:, 1:3], h.mT]
    for it in between:
        it.retain_grad()
    return between[1].sin() + between[2].mT[:, :2], between


def written_between(x: Tensor) -> tuple[Tensor, list[Tensor]]:
    h = x.sin()
    h.retain_grad()
    h.mul_(2)
    return h.cos(), [h]


def cast_between(x: Tensor) -> tuple[Tensor, list[Tensor]]:
    h = x.sin()
    h.retain_grad()
    return h.float().cos(), [h]


@pytest.mark.parametrize("create_graph", [False, True])
@pytest.mark.parametrize("batch", [1, 4])
@pytest.mark.parametrize(
    "make",
    [
        one_between,
        filled_before,
        several_between,
        views_between,
        written_between,
        cast_between,
    ],
)
def test_retained_gradients_between_tensors_that_are_there_are_left(
    x: Tensor,
    make: Callable[[Tensor], tuple[Tensor, list[Tensor]]],
    batch: int,
    create_graph: bool,
) -> None:
    x = x[:batch].clone().requires_grad_()
    elsewhere = x.cos()
    elsewhere.retain_grad()
    y, between = make(x)
    before = [it.grad for it in between]
    values = [None if it is None else it.clone() for it in before]
    gradlib.per_sample_jacobian_from_graph(y, x, create_graph=create_graph)
    for it, grad, value in zip(between, before, values, strict=True):
        assert it.grad is grad
        assert grad is None or (value is not None and torch.equal(grad, value))
        it.grad = None
    y.sum().backward()  # they are still retained
    assert all(it.grad is not None for it in between)
    assert elsewhere.retains_grad
    assert elsewhere.grad is None


def test_a_retained_gradient_of_which_only_the_graph_knows_is_left(x: Tensor) -> None:
    x.requires_grad_()
    h = x.sin()
    h.retain_grad()
    y = h * h
    del h
    gradlib.per_sample_jacobian_from_graph(y, x)
    node: Any = y.grad_fn
    assert node._saved_self.retains_grad
    assert node._saved_self.grad is None


def test_where_none_is_retained_nobody_looks_through_all_tensors(
    x: Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    def look() -> list[Tensor]:
        raise AssertionError("for nothing")

    monkeypatch.setattr(retained, "retaining", look)
    attention = nn.MultiheadAttention(3, 1, batch_first=True).double()
    x = x[:, None].requires_grad_()
    y = attention(x, x, x)[0] + x.sin() * x  # copies and sums on the way
    gradlib.per_sample_jacobian_from_graph(y, x)
    y.retain_grad()
    with pytest.raises(AssertionError, match="for nothing"):
        gradlib.per_sample_jacobian_from_graph(y, x)
