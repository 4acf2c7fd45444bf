"""Elementwise functions have a diagonal Jacobian, from one backward pass."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import gradlib
from gradlib.jacobian import planning
from gradlib.jacobian.arguments import read
from gradlib.jacobian.fast.diagonal import Diagonal, find_diagonal
from gradlib.jacobian.fast.door import find_in_graph
from gradlib.jacobian.run import run

from .lines import double
from .operations import Function, W, by_rows, graph_of


def found_for(fn: Function, x: Tensor) -> Diagonal | None:
    """Look for the way."""
    graph = graph_of(fn, x)
    return find_diagonal(graph, planning.make(graph, "auto", "auto", None))


ELEMENTWISE: dict[str, Function] = {
    "one": torch.tanh,
    "several": lambda x: torch.sin(x) ** 2 + x.cos() * x,
    "with constants": lambda x: (W - x).exp() / (1 + W.square()) - x,
    "where": lambda x: torch.where(x > 0, x.sin(), x * 2).masked_fill(x > 1, 0.0),
    "in place": lambda x: x.clone().sin_().mul_(x).relu_(),
    "dropout": lambda x: F.dropout(x.sin(), 0.4, training=True),
}


@pytest.mark.parametrize("name", ELEMENTWISE)
def test_an_elementwise_function(name: str) -> None:
    torch.manual_seed(0)
    graph = graph_of(ELEMENTWISE[name], double(4, 4, 4))
    found = find_diagonal(graph, planning.make(graph, "auto", "auto", None))
    assert found is not None
    torch.testing.assert_close(found.blocks(graph)[0, 0], by_rows(graph))


OTHERS: dict[str, Function] = {
    "a sum": lambda x: x.sin().sum(1),
    "a sum for all": lambda x: x * x.sum(1, keepdim=True),
    "another shape inside": lambda x: x.flatten(1).sin().view_as(x),
    "repeated": lambda x: x.unsqueeze(1) * W,
    "turned": lambda x: x.mT.exp(),
    "batch norm": lambda x: F.batch_norm(x, None, None, training=True),
    "two dtypes": lambda x: x.float().sin().double(),
    "softmax": lambda x: x.softmax(-1),
}


@pytest.mark.parametrize("name", OTHERS)
def test_others_are_left_to_others(name: str) -> None:
    assert found_for(OTHERS[name], double(4, 4, 4)) is None


def test_what_is_broadcast_is_left_to_others() -> None:
    assert found_for(lambda x: x * W, double(4, 1, 4)) is None


def test_few_rows_single_numbers_and_several_inputs_are_left_to_others() -> None:
    assert found_for(torch.sin, double(4, 7)) is None
    assert found_for(torch.sin, double(4, 8)) is not None
    assert found_for(torch.sin, double(8)) is None
    graph, _ = run(read(torch.mul, (double(4, 8), double(4, 8)), (0, 1), 0))
    plan = planning.make(graph, "auto", "auto", None)
    assert not isinstance(find_in_graph(graph, plan), Diagonal)


@pytest.mark.parametrize("check", [True, False])
def test_it_is_taken_for_layers_and_code_and_written_to_out(check: bool) -> None:
    torch.manual_seed(0)
    # A GPU takes up to `choice.FEW` rows in one pass.
    for fn in (nn.Sequential(nn.Tanh()), lambda x: x.sin() * x):
        x, out = torch.randn(3, 33, 2), torch.randn(3, 33, 2, 33, 2)
        assert gradlib.plan_jacobian(fn, x).mode == "diagonal"
        found = gradlib.per_sample_jacobian(fn, x, check=check)
        torch.testing.assert_close(
            found, gradlib.per_sample_jacobian(fn, x, mode="loop")
        )
        assert gradlib.per_sample_jacobian(fn, x, check=check, out=out) is out
        assert torch.equal(out, found)


def test_a_hook_on_the_way_is_found() -> None:
    def fn(x: Tensor) -> Tensor:
        y = x.sin()
        y.register_hook(lambda grad: grad * grad.abs().sum())
        return y * 2

    x = torch.randn(3, 10)
    found: Any = gradlib.per_sample_jacobian(fn, x, check=False)
    truth = gradlib.per_sample_jacobian(fn, x, mode="loop", check=False)
    torch.testing.assert_close(found, truth)


def test_infinite_slopes_give_what_rows_give() -> None:
    x = torch.randn(3, 10).abs()
    x[1, 2] = 0
    found = gradlib.per_sample_jacobian(torch.sqrt, x)
    truth = gradlib.per_sample_jacobian(torch.sqrt, x, mode="loop")
    torch.testing.assert_close(found, truth, equal_nan=True)
