"""What is given as `out` is written as the result would be, or refused by name."""

from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn

import gradlib
from gradlib import JacobianArgumentError

from .samples_alone import MODES, X, alone, require_close, smooth_net, three


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("strided", [False, True])
def test_out_is_written(strided: bool, mode: str) -> None:
    model, x = smooth_net(5, 3, 2, 4), torch.randn(3, 5, dtype=torch.float64)
    out = torch.full((3, 4, 5), torch.nan, dtype=torch.float64)
    if strided:
        out = torch.full((5, 4, 2, 3), torch.nan, dtype=torch.float64)[:, :, 1].mT
        out = out.permute(1, 2, 0)
        assert out.shape == (3, 4, 5)
        assert not out.is_contiguous()
    ours = gradlib.per_sample_jacobian(model, x, out=out, mode=mode)
    assert ours is out
    require_close(out, alone(model, x)[0][0])


def test_out_is_nested_as_the_result_is() -> None:
    x, y, _ = three()

    def fn(x: Tensor, y: Tensor) -> dict[str, Tensor]:
        return {"a": x.sin(), "b": x[:, :2] * y}

    ours = gradlib.per_sample_jacobian(fn, x, y, argnums=(0, 1))
    out = {
        name: tuple(torch.full_like(it, torch.nan) for it in blocks)
        for name, blocks in ours.items()
    }
    assert gradlib.per_sample_jacobian(fn, x, y, argnums=(0, 1), out=out) is out
    for name, blocks in ours.items():
        for ours_, written in zip(blocks, out[name], strict=True):
            assert torch.equal(ours_, written)


def test_out_of_what_has_no_entries() -> None:
    x = torch.randn(3, 2)
    out = torch.empty(3, 2, 2), torch.empty(3, 0, 2)
    assert gradlib.per_sample_jacobian(lambda x: (x.sin(), x[:, :0]), x, out=out) is out
    assert torch.equal(out[0], torch.diag_embed(x.cos()))


def test_out_for_tensors_that_are_there_already() -> None:
    x = torch.randn(3, 2, requires_grad=True)
    out = torch.empty(3, 2, 2)
    assert gradlib.per_sample_jacobian_from_graph(x.sin(), x, out=out) is out
    assert torch.equal(out, torch.diag_embed(x.detach().cos()))


BAD_OUT: dict[str, Callable[[], Any]] = {
    "shape": lambda: torch.empty(2, 9),
    "dtype": lambda: torch.empty(2, 3, 3, dtype=torch.float64),
    "device": lambda: torch.empty(2, 3, 3, device="meta"),
    "nesting": lambda: (torch.empty(2, 3, 3),),
    "no tensor": lambda: numpy.empty((2, 3, 3)),
    "requires grad": lambda: torch.empty(2, 3, 3, requires_grad=True),
    "inference": torch.inference_mode()(lambda: torch.empty(2, 3, 3)),
    "expanded": lambda: torch.empty(1, 3, 3).expand(2, 3, 3),
    "overlapping": lambda: torch.empty(9).as_strided((2, 3, 3), (1, 1, 1)),
    "overlapping in one entry": lambda: torch.empty(17).as_strided(
        (2, 3, 3), (8, 3, 1)
    ),
    "sparse": lambda: torch.zeros(2, 3, 3).to_sparse(),
    "sparse by rows": lambda: torch.zeros(2, 3, 3).to_sparse_csr(),
    "nested": lambda: torch.nested.nested_tensor([torch.zeros(3, 3)] * 2),
}


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("fn", [torch.sin, nn.Linear(3, 3)])
@pytest.mark.parametrize("make", BAD_OUT.values(), ids=list(BAD_OUT))
def test_out_that_does_not_fit(make: Callable[[], Any], fn: Any) -> None:
    for ask in (gradlib.per_sample_jacobian, gradlib.plan_jacobian):
        with pytest.raises(JacobianArgumentError, match="out"):
            ask(fn, X, out=make())


def test_out_that_is_an_input() -> None:
    x = torch.randn(2, 3)
    before = x.clone()
    for out in (x, x.view(-1).view(2, 3)):
        for ask in (gradlib.per_sample_jacobian, gradlib.plan_jacobian):
            with pytest.raises(JacobianArgumentError, match="shares memory with input"):
                ask(lambda x: (x * 2).sum(1), x, out=out)
    assert torch.equal(x, before)


def test_out_that_is_a_parameter() -> None:
    model, other = nn.Linear(3, 2), nn.Linear(3, 2)
    before = model.weight.detach().clone()
    out = model.weight.detach().view(1, 2, 3)
    for fn in (model, lambda x: model(x), lambda x: model(x) + other(x)):
        with pytest.raises(JacobianArgumentError, match="shares memory with weight"):
            gradlib.per_sample_jacobian(fn, torch.ones(1, 3), out=out)
    assert torch.equal(model.weight, before)


def test_out_beside_a_weight_that_is_sparse() -> None:
    model = nn.Linear(3, 3)
    model.register_buffer("mask", torch.eye(3).to_sparse())
    out = torch.empty(2, 3, 3)
    gradlib.per_sample_jacobian(model, X, mode="loop", out=out)
    assert torch.equal(out, model.weight.detach().expand(2, 3, 3))


def test_out_that_is_an_input_that_is_there_already() -> None:
    x = torch.randn(2, 3, requires_grad=True)
    before = x.detach().clone()
    y = (x * 2).sum(1)
    with pytest.raises(JacobianArgumentError, match="shares memory"):
        gradlib.per_sample_jacobian_from_graph(y, x, out=x.detach())
    assert torch.equal(x, before)


def test_out_twice_in_the_same_memory() -> None:
    one = torch.empty(2, 3, 3)
    with pytest.raises(JacobianArgumentError, match="memory"):
        gradlib.per_sample_jacobian(torch.mul, X, X + 1, argnums=(0, 1), out=(one, one))


def test_out_in_parts_of_one_tensor() -> None:
    both = torch.empty(2, 2, 3, 3)
    gradlib.per_sample_jacobian(
        torch.mul, X, X + 1, argnums=(0, 1), out=(both[0], both[1])
    )
    assert torch.equal(both[0], torch.diag_embed(X + 1))
    assert torch.equal(both[1], torch.diag_embed(X))
