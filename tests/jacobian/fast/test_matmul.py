"""Vectors times a matrix, by either library."""

from collections.abc import Callable
from functools import partial
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gradlib
from gradlib import private
from gradlib.jacobian.fast import matmul

are_close = partial(torch.testing.assert_close, rtol=1e-4, atol=1e-4)

LARGE = 256  # 256 x 256 x 256 multiply-adds are worth a choice


@pytest.fixture(params=[True, False], ids=["oneDNN", "MKL"])
def faster(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Have one of the two be the faster one, whichever is so on this machine."""
    is_onednn: bool = request.param
    monkeypatch.setattr(matmul, "_onednn_is_faster", lambda _threads: is_onednn)
    return is_onednn


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[torch.Size]:
    """What oneDNN was given."""
    made: list[torch.Size] = []
    real = private.onednn_linear

    def counted(x: Tensor, *rest: Any) -> Tensor:
        made.append(x.shape)
        return real(x, *rest)

    monkeypatch.setattr(matmul, "onednn_linear", counted)
    return made


@pytest.mark.parametrize("shape", [(LARGE,), (32, 8), (8, 4, 8)])
@pytest.mark.parametrize("by_columns", [False, True])
@torch.no_grad()
def test_it_multiplies(
    shape: tuple[int, ...], by_columns: bool, faster: bool, calls: list[torch.Size]
) -> None:
    v = torch.randn(*shape, LARGE)
    matrix = torch.randn(LARGE, LARGE + 1)
    given = matrix.T.contiguous().T if by_columns else matrix
    are_close(matmul.multiplied(v, given), v @ matrix)
    assert calls == ([v.shape] if faster else [])


@pytest.mark.parametrize("with_bias", [False, True])
@torch.no_grad()
def test_it_is_a_linear_layer(
    with_bias: bool, faster: bool, calls: list[torch.Size]
) -> None:
    layer = nn.Linear(LARGE, LARGE + 1, bias=with_bias)
    x = torch.randn(LARGE, LARGE)
    made = matmul.linear(x, layer.weight, layer.bias)
    are_close(made, layer(x))
    assert calls == ([x.shape] if faster else [])


KINDS: dict[str, Callable[[], tuple[Tensor, Tensor]]] = {
    "small": lambda: (torch.randn(16, 16), torch.randn(16, 16)),
    "double": lambda: (
        torch.randn(LARGE, LARGE).double(),
        torch.randn(LARGE, LARGE).double(),
    ),
    "strided": lambda: (torch.randn(LARGE, LARGE).T, torch.randn(LARGE, LARGE)),
    "narrow": lambda: (torch.randn(LARGE * LARGE, LARGE), torch.randn(LARGE, 2)),
    "another matrix for each": lambda: (
        torch.randn(4, LARGE, LARGE),
        torch.randn(4, LARGE, LARGE),
    ),
}


@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_it_leaves_to_torch(
    kind: str, calls: list[torch.Size], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(matmul, "_onednn_is_faster", lambda _threads: True)
    v, matrix = KINDS[kind]()
    torch.testing.assert_close(matmul.multiplied(v, matrix), v @ matrix)
    assert not calls


def test_it_leaves_to_torch_what_has_a_graph(
    calls: list[torch.Size], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(matmul, "_onednn_is_faster", lambda _threads: True)
    v = torch.randn(LARGE, LARGE, requires_grad=True)
    assert matmul.multiplied(v, torch.randn(LARGE, LARGE)).requires_grad
    assert not calls


@pytest.mark.filterwarnings("ignore:TF32 acceleration")  # torch asks for all flags
@torch.no_grad()
def test_somebody_has_switched_onednn_off(
    calls: list[torch.Size], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(matmul, "_onednn_is_faster", lambda _threads: True)
    v = torch.randn(LARGE, LARGE)
    with torch.backends.mkldnn.flags(enabled=False):
        matmul.multiplied(v, v)
    assert not calls
    matmul.multiplied(v, v)
    assert calls


@pytest.mark.usefixtures("faster")
@pytest.mark.parametrize("is_inference", [False, True])
@pytest.mark.parametrize(
    "widths", [(64, 256, 256, 10), (10, 256, 784), (300, 256, 20, 256, 300)]
)
def test_jacobians_are_the_same(widths: tuple[int, ...], is_inference: bool) -> None:
    layers: list[nn.Module] = []
    for ins, outs in pairwise(widths):
        layers += [nn.Linear(ins, outs), nn.Tanh()]
    model = nn.Sequential(*layers).requires_grad_(False)
    x = torch.randn(64, widths[0])
    true = gradlib.per_sample_jacobian(model.double(), x.double())
    model.float()
    out = torch.empty(true.shape)
    with torch.inference_mode(is_inference):
        given = x.clone()
        found = gradlib.per_sample_jacobian(model, given)
        gradlib.per_sample_jacobian(model, given, out=out)
    for it in (found, out):
        are_close(it.double(), true)


def test_what_is_timed_is_not_what_a_default_device_says() -> None:
    matmul._onednn_is_faster.cache_clear()
    with torch.device("meta"):
        assert matmul._onednn_is_faster(torch.get_num_threads()) in (True, False)
