"""Vectors times a matrix, by either library."""

import itertools
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import gradlib
from gradlib.jacobian.fast import matmul
from gradlib.private import products

pytestmark = pytest.mark.cpu  # both are libraries of a CPU

are_close = partial(torch.testing.assert_close, rtol=1e-4, atol=1e-4)

LARGE = 256  # 256 x 256 x 256 multiply-adds are worth a choice


@pytest.fixture(params=[True, False], ids=["oneDNN", "MKL"])
def faster(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Have one of the two be the faster one, whichever is so on this machine."""
    is_onednn: bool = request.param
    monkeypatch.setattr(matmul, "_onednn_is_faster", lambda *_: is_onednn)
    return is_onednn


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[torch.Size]:
    """What oneDNN was given."""
    made: list[torch.Size] = []
    real = products.onednn_linear

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
    "few": lambda: (torch.randn(16, LARGE), torch.randn(LARGE, LARGE)),
    "small": lambda: (torch.randn(16, 16), torch.randn(16, 16)),
    "double": lambda: (
        torch.randn(LARGE, LARGE).double(),
        torch.randn(LARGE, LARGE).double(),
    ),
    "strided": lambda: (torch.randn(8, LARGE, 32).mT, torch.randn(LARGE, LARGE)),
    "narrow": lambda: (torch.randn(LARGE * LARGE, LARGE), torch.randn(LARGE, 2)),
    "another matrix for each": lambda: (
        torch.randn(16, LARGE, LARGE),
        torch.randn(16, LARGE, LARGE),
    ),
}


@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_it_leaves_to_torch(
    kind: str, calls: list[torch.Size], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(matmul, "_onednn_is_faster", lambda *_: True)
    v, matrix = KINDS[kind]()
    are_close(matmul.multiplied(v, matrix), v @ matrix)
    assert not calls


def _by_torch(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    return F.linear(x, weight, bias)


def _by_us(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    if bias is None:
        return matmul.multiplied(x, weight.mT)
    return matmul.linear(x, weight, bias)


@pytest.mark.usefixtures("faster")
@pytest.mark.parametrize("shape", [(LARGE,), (32, 8)])
@pytest.mark.parametrize("asked", [*itertools.product([True, False], repeat=3)])
def test_gradients_and_theirs(shape: tuple[int, ...], asked: tuple[bool, ...]) -> None:
    chance = torch.Generator().manual_seed(0)
    draw = partial(torch.randn, generator=chance)
    given = draw(*shape, LARGE), draw(LARGE, LARGE) / LARGE, draw(LARGE)
    rows = draw(2, *shape, LARGE)

    def of(function: Callable[..., Tensor], count: int) -> list[Tensor]:
        """Return a product, its gradients, and gradients of these."""
        pairs = zip(given[:count], asked, strict=False)
        tensors = [it.clone().requires_grad_(is_asked) for it, is_asked in pairs]
        wanted = [it for it in tensors if it.requires_grad]
        y = function(*tensors)
        found = [y]
        if wanted:
            found += torch.autograd.grad(y.sin().sum(), wanted, create_graph=True)
            loss = torch.stack([it.square().sum() for it in found[1:]]).sum()
            found += torch.autograd.grad(loss, wanted, retain_graph=True)
            for create_graph in (True, False):
                found += torch.autograd.grad(
                    y, wanted, rows, is_grads_batched=True, create_graph=create_graph
                )
        return found

    for count in (2, 3):
        for found, true in zip(of(_by_us, count), of(_by_torch, count), strict=True):
            are_close(found, true, atol=1e-4 * true.abs().max().item())


BIASES: dict[str, Callable[[], Tensor]] = {
    "a column": lambda: torch.randn(LARGE, 3)[:, 1],
    "every other": lambda: torch.randn(2 * LARGE)[::2],
    "one for all": lambda: torch.randn(1).expand(LARGE),
}


@pytest.mark.parametrize("name", BIASES)
@torch.no_grad()
def test_biases_in_any_order(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(matmul, "_onednn_is_faster", lambda *_: True)
    x, weight, bias = (
        torch.randn(LARGE, LARGE),
        torch.randn(LARGE, LARGE),
        BIASES[name](),
    )
    are_close(matmul.linear(x, weight, bias), F.linear(x, weight, bias), atol=1e-3)
    found, is_done = matmul.linear_then(x, weight, bias, "tanh")
    assert is_done
    are_close(found, F.linear(x, weight, bias).tanh(), atol=1e-3)
    asked = bias.clone().requires_grad_().expand(LARGE)[:]
    with torch.enable_grad():
        found = matmul.linear(x, weight, asked)
    are_close(found, F.linear(x, weight, asked), atol=1e-3)


@torch.no_grad()
def test_entries_that_overlap(
    calls: list[torch.Size], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(matmul, "_onednn_is_faster", lambda *_: True)
    v = torch.randn(LARGE, LARGE)
    matrix = torch.randn(2 * LARGE).as_strided((LARGE, LARGE), (1, 1))
    are_close(matmul.multiplied(v, matrix), v @ matrix, atol=1e-3)
    assert not calls


def test_it_is_onednn_that_has_gradients(
    calls: list[torch.Size], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(matmul, "_onednn_is_faster", lambda *_: True)
    x, weight = torch.randn(2, LARGE, LARGE).requires_grad_().unbind()
    y = matmul.linear(x, weight, None)
    assert len(calls) == 1
    torch.autograd.grad(y.sum(), (x, weight))
    assert len(calls) == 3
    torch.autograd.grad(matmul.linear(x, weight.detach(), None).sum(), x)
    assert len(calls) == 5


def test_other_devices(
    calls: list[torch.Size], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(matmul, "_onednn_is_faster", lambda *_: True)
    v = torch.ones(LARGE, LARGE, device="meta")
    assert matmul.multiplied(v, v).is_meta
    assert not calls


@pytest.mark.filterwarnings("ignore:TF32 acceleration")  # torch asks for all flags
@torch.no_grad()
def test_somebody_has_switched_onednn_off(
    calls: list[torch.Size], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(matmul, "_onednn_is_faster", lambda *_: True)
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
    for ins, outs in itertools.pairwise(widths):
        layers += [nn.Linear(ins, outs), nn.Tanh(), nn.Sigmoid()]
    model = nn.Sequential(*layers).requires_grad_(False)
    x = torch.randn(64, widths[0])
    true = gradlib.per_sample_jacobian(model.double(), x.double(), check=False)
    model.float()
    out = torch.empty(true.shape)
    with torch.inference_mode(is_inference):
        given = x.clone()
        found = gradlib.per_sample_jacobian(model, given)
        gradlib.per_sample_jacobian(model, given, out=out)
    for it in (found, out):
        are_close(it.double(), true)


def test_what_is_timed_is_not_what_a_default_device_says(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    devices: set[str] = set()

    def linear(x: Tensor, weight: Tensor, *_: Any) -> Tensor:
        devices.update(it.device.type for it in (x, weight))
        return F.linear(x, weight)

    monkeypatch.setattr(matmul, "onednn_linear", linear)
    with torch.device("meta"):
        assert not matmul._onednn_is_faster.__wrapped__(1, "none")
    assert devices == {"cpu"}


@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("ins", [2, LARGE])
@torch.no_grad()
def test_what_follows_is_done_at_once(
    with_bias: bool, ins: int, faster: bool, calls: list[torch.Size]
) -> None:
    layer = nn.Linear(ins, LARGE, bias=with_bias)
    x = torch.randn(LARGE, ins)
    found, is_done = matmul.linear_then(x, layer.weight, layer.bias, "tanh")
    assert is_done == faster
    are_close(found if is_done else found.tanh(), layer(x).tanh())
    found, is_done = matmul.linear_then(x, layer.weight, layer.bias, "relu")
    assert not is_done
    are_close(found, layer(x))
    assert len(calls) == (faster + (faster and ins == LARGE))


@torch.no_grad()
def test_what_follows_is_as_exact_as_torchs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(matmul, "_onednn_is_faster", lambda *_: True)
    one = torch.eye(16)
    for size in (1e-30, 1e-6, 1e-3, 1.0, 10.0, 1e30, torch.inf, torch.nan):
        x = torch.zeros(4096, 16)
        x[:, 0] = size * torch.linspace(-1, 1, 4096)
        for then in matmul.DONE_TO_ENTRIES:
            found, is_done = matmul.linear_then(x, one, None, then)
            assert is_done
            # In the product infinite entries make others NaN.
            true = getattr(x @ one, then)()
            torch.testing.assert_close(found, true, rtol=1e-6, atol=0.0, equal_nan=True)


def test_what_follows_has_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(matmul, "_onednn_is_faster", lambda *_: True)
    x = torch.randn(LARGE, LARGE, requires_grad=True)
    found, is_done = matmul.linear_then(x, torch.eye(LARGE), None, "tanh")
    assert not is_done
    assert found.requires_grad
