"""Where numbers are infinite or NaN, "auto" says what "loop" does, if it is checked."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gradlib
from gradlib.jacobian.finite import are_finite

Make = Callable[[float], Callable[[Tensor], Tensor]]

X = torch.linspace(0.5, 1.5, 9, dtype=torch.float64).view(3, 3)


def linear(ins: int, outs: int, value: float) -> nn.Linear:
    """Return a layer that has `value` among its weights."""
    layer = nn.Linear(ins, outs, dtype=torch.float64)
    with torch.no_grad():
        layer.weight.copy_(torch.linspace(-1, 1, ins * outs).view(outs, ins))
        layer.weight[1, 0] = value
    return layer


def net(value: float) -> nn.Sequential:
    return nn.Sequential(linear(3, 4, 0), nn.Tanh(), linear(4, 2, value))


def chain(value: float) -> nn.Sequential:
    return nn.Sequential(*net(value), nn.Tanh())


def flat_at_the_end(value: float) -> nn.Sequential:
    """Return what cuts an infinite row of its weights off, if it is negative."""
    return nn.Sequential(linear(3, 4, value), nn.ReLU())


def images(value: float) -> nn.Sequential:
    conv = nn.Conv2d(1, 2, 1, bias=False, dtype=torch.float64)
    nn.init.ones_(conv.weight)
    return nn.Sequential(conv, nn.Tanh(), nn.Flatten(), linear(6, 2, value))


def chain_in_a_graph(value: float) -> Callable[[Tensor], Tensor]:
    inner = net(value)
    return lambda x: inner(x).exp()


def columns(value: float) -> Callable[[Tensor], Tensor]:
    inner = net(value)
    # More rows than a GPU takes in one pass anyway.
    return lambda x: inner(x).sin().repeat(1, 40)


KINDS: list[Make] = [net, chain, flat_at_the_end, images, chain_in_a_graph, columns]
VALUES = [math.nan, math.inf, -math.inf]


def inputs_of(make: Make) -> Tensor:
    return X.view(3, 1, 1, 3) if make is images else X


def loop(fn: Callable[[Tensor], Tensor], x: Tensor = X, **options: Any) -> Tensor:
    return gradlib.per_sample_jacobian(fn, x, mode="loop", check=False, **options)


def assert_same(one: Tensor, other: Tensor) -> None:
    torch.testing.assert_close(one, other, equal_nan=True)


@pytest.mark.parametrize("value", VALUES)
@pytest.mark.parametrize("make", KINDS)
def test_auto_is_loop(
    make: Make, value: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gradlib.jacobian.choice.LITTLE", 0)
    fn, x = make(value), inputs_of(make)
    assert_same(gradlib.per_sample_jacobian(fn, x), loop(fn, x))


@pytest.mark.of_fast
@pytest.mark.parametrize("make", KINDS)
def test_they_would_differ(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """Or the test above would not tell anything."""
    monkeypatch.setattr("gradlib.jacobian.choice.LITTLE", 0)
    fn, x = make(-math.inf), inputs_of(make)
    found = gradlib.per_sample_jacobian(fn, x, check=False)
    assert not torch.equal(found.isnan(), loop(fn, x).isnan())


@pytest.mark.parametrize("make", [net, chain, columns])
def test_into_memory_that_is_brought(make: Make) -> None:
    fn = make(math.nan)
    want = loop(fn)
    out = torch.zeros_like(want)
    assert gradlib.per_sample_jacobian(fn, X, out=out) is out
    assert_same(out, want)


@pytest.mark.parametrize("make", [net, chain, chain_in_a_graph])
def test_in_a_loss(make: Make) -> None:
    fn = make(math.nan)
    found = gradlib.per_sample_jacobian(fn, X, create_graph=True)
    assert found.requires_grad
    assert_same(found, loop(fn, create_graph=True))


@pytest.mark.parametrize("kind", [nn.ReLU6, nn.Hardtanh, nn.Hardswish])
def test_slopes_at_nan_of_which_torch_is_unsure(kind: type[nn.Module]) -> None:
    torch.manual_seed(0)
    fn = nn.Sequential(nn.Linear(4, 6), kind(), nn.Linear(6, 2))
    x = torch.randn(4, 4)
    x[0, 1] = math.nan
    want = gradlib.per_sample_jacobian(fn, x, mode="loop", check=False)
    assert_same(gradlib.per_sample_jacobian(fn, x), want)


def test_fn_is_called_once_for_both() -> None:
    """What it computes the second time may be something else."""
    inner, drawn = net(math.nan), nn.Dropout()

    def fn(x: Tensor) -> Tensor:
        return drawn(inner(x).exp())

    torch.manual_seed(0)
    found = gradlib.per_sample_jacobian(fn, X)
    torch.manual_seed(0)
    assert_same(found, loop(fn))


def test_what_is_finite() -> None:
    assert are_finite([])
    assert are_finite([X, torch.arange(3), X[:0]])
    for value in VALUES:
        assert not are_finite([X, X.new_tensor([1, value, 1])])
    assert not are_finite([X.new_tensor([math.inf, -math.inf])])
