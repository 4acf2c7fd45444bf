"""Modules that a function first calls in another context, and that nobody named."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, hessian, jvp, vmap

import gradlib
from gradlib.jacobian.known_modules import modules_known_to

Function = Callable[[Tensor], Tensor]


class Holder:
    """Has a module that no name in a function leads to."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.net = nn.Sequential(
            nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 2)
        ).eval()

    def row(self, x: Tensor) -> Tensor:
        return self.net(x[None])[0].sum()


def laplacian(holder: Holder) -> Function:
    return lambda x: vmap(lambda row: hessian(holder.row)(row).diagonal().sum())(x)


def of_gradients(holder: Holder) -> Function:
    return lambda x: vmap(grad(lambda row: grad(holder.row)(row).pow(2).sum()))(x)


def hessian_products(holder: Holder) -> Function:
    rows = vmap(grad(holder.row))
    return lambda x: jvp(rows, (x,), (torch.ones_like(x),))[1]


def gated(holder: Holder) -> Function:
    def fn(x: Tensor) -> Tensor:
        with torch.inference_mode():
            is_large = bool(holder.net(x).abs().max() > 100)
        return holder.net(x).sin() if is_large else holder.net(x).atan()

    return fn


@pytest.mark.parametrize("of", [laplacian, of_gradients, hessian_products, gated])
def test_a_module_met_in_transforms_or_in_inference_mode(
    of: Callable[[Holder], Function],
) -> None:
    fn, x = of(Holder()), torch.randn(4, 3)
    found = gradlib.per_sample_jacobian(fn, x)
    assert torch.equal(found, gradlib.per_sample_jacobian(fn, x, check=False))
    assert gradlib.plan_jacobian(fn, x).mode


PUT_IN: dict[str, Callable[[Tensor], Tensor]] = {
    "tensors": lambda it: it.detach() * 2,
    "computed": lambda it: it * 2,
    "parameters": lambda it: nn.Parameter(it.detach() * 2),
    "its own": lambda it: it,
}


@pytest.mark.parametrize("of", PUT_IN.values(), ids=PUT_IN.keys())
@pytest.mark.parametrize("ask", [gradlib.per_sample_jacobian, gradlib.plan_jacobian])
def test_what_functional_call_puts_in_is_gone_afterwards(
    of: Callable[[Tensor], Tensor], ask: Callable[..., Any]
) -> None:
    holder, x = Holder(), torch.randn(4, 3)
    net = holder.net

    def fn(x: Tensor) -> Tensor:
        put_in = {name: of(it) for name, it in net.named_parameters()}
        put_in |= {name: it + 1 for name, it in net.named_buffers() if it.ndim}
        return functional_call(net, put_in, (x,))

    before = [*net.named_parameters(), *net.named_buffers()]
    values = [it.detach().clone() for _, it in before]
    # An attribute of an object: no name in the function leads to the module.
    unnamed = SimpleNamespace(fn=fn)
    ask(lambda x: unnamed.fn(x), x)
    after = [*net.named_parameters(), *net.named_buffers()]
    assert [(name, id(it)) for name, it in after] == [
        (name, id(it)) for name, it in before
    ]
    for (_, it), value in zip(after, values, strict=True):
        assert torch.equal(it, value)


NET = nn.Linear(3, 2)


def called(x: Tensor) -> Tensor:
    return NET(x)


def calls_it(x: Tensor) -> Tensor:
    return (lambda row: called(row))(x)


def test_modules_are_known_that_called_functions_name() -> None:
    assert modules_known_to(calls_it) == [NET]


@pytest.mark.parametrize("power", [2, 3])
def test_zeros_without_memory_in_the_graph(power: int) -> None:
    def fn(x: Tensor) -> Tensor:
        return vmap(hessian(lambda row: row.pow(power).sum()))(x) * x[:, None]

    x = torch.randn(3, 2, requires_grad=True)
    found = gradlib.per_sample_jacobian_from_graph(fn(x), x)
    torch.testing.assert_close(found, gradlib.per_sample_jacobian(fn, x, mode="loop"))
    assert gradlib.plan_jacobian(fn, x).mode
