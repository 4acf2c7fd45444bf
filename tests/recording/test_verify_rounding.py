"""`verify(numerical=True)` tells a wrong gradient from rounding, in each dtype."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gradlib
from gradlib.recording.gaps import gaps_of_shares

REASON = "not what it is in float64, where finite differences agree"


class Sine(torch.autograd.Function):
    """The sine; the factor of its backward is set by each test."""

    factor: Callable[[Tensor], float] = staticmethod(lambda _grad: 1.0)

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.sin()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        factor: Any = Sine.factor
        return factor(grads[0]) * grads[0] * x.cos()


class Apply(nn.Module):
    def __init__(self, fn: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.fn = fn

    def forward(self, x: Tensor) -> Tensor:
        return self.fn(x)


def model(fn: Callable[[Tensor], Tensor]) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), Apply(fn), nn.Linear(6, 3))


def verified(model: nn.Module, **options: Any) -> gradlib.Verification:
    torch.manual_seed(1)
    dtype = next(model.parameters()).dtype
    x = torch.randn(5, 4, dtype=dtype, requires_grad=True)
    with gradlib.record(model) as recording:
        model(x).sin().sum().backward()
    assert recording.verify().ok
    return recording.verify(numerical=True, **options)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_backward_that_is_wrong_in_one_dtype_alone(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Sine, "factor", lambda grad: 2.0 if grad.dtype == dtype else 1)
    found = verified(model(Sine.apply).to(dtype))
    (wrong,) = found.disagreements
    assert (wrong.name, wrong.field, wrong.reason) == ("1", "grad_input[0]", REASON)
    assert wrong.error == pytest.approx(0.5, abs=0.05)


def test_a_backward_that_is_wrong_for_an_expanded_gradient(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Sine, "factor", lambda grad: 1.0 + (grad.stride() == (0, 0)))
    with gradlib.record(net := nn.Sequential(nn.Linear(4, 6), Apply(Sine.apply))) as it:
        net(torch.randn(5, 4)).sum().backward()
    (wrong,) = it.verify(numerical=True).disagreements
    assert (wrong.name, wrong.field, wrong.reason) == ("1", "grad_input[0]", REASON)


def test_what_is_allowed_in_another_dtype(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Sine, "factor", lambda grad: 1 + 0.25 * (grad.itemsize == 4))
    net = model(Sine.apply)
    assert not verified(net).ok
    assert verified(net, rtol=0.3).ok


def test_a_call_that_computes_something_else_in_float64() -> None:
    """As with another mask of a dropout, the two results cannot be compared."""

    def masked(x: Tensor) -> Tensor:
        return x * (2 if x.dtype == torch.float32 else 3)

    assert verified(model(masked)).ok


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_norm_of_padding_is_not_accused(dtype: torch.dtype) -> None:
    """Its eps comes from the dtype, and the gradient of a row of zeros from the eps."""
    torch.manual_seed(0)
    embedding, norm = nn.Embedding(7, 4, padding_idx=0), nn.RMSNorm(4)
    net = nn.Sequential(embedding, norm, nn.Linear(4, 1)).to(dtype)
    tokens = torch.tensor([[3, 1, 5, 0], [2, 0, 0, 0]])
    with gradlib.record(net) as recording:
        net(tokens).sum().backward()
    assert recording.verify(numerical=True).ok


def test_a_backward_that_is_wrong_in_one_dtype_alone_at_zeros(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    wrong = staticmethod(lambda grad: 2.0 if grad.dtype == torch.float32 else 1.0)
    monkeypatch.setattr(Sine, "factor", wrong)
    net, x = Apply(Sine.apply), torch.zeros(3, 4, requires_grad=True)
    with gradlib.record(net) as recording:
        net(x).sum().backward()
    (found,) = recording.verify(numerical=True).disagreements
    assert found.reason == REASON


class DropPath(nn.Module):
    """A residual branch, scaled to almost nothing, that some samples skip."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.scale = nn.Parameter(torch.full((4,), 1e-6))

    def forward(self, x: Tensor) -> Tensor:
        mask = torch.rand((len(x), 1), dtype=x.dtype).add(0.5).floor()
        return x + mask * self.scale * self.linear(x)


def test_another_mask_that_hardly_shows_in_the_output_is_not_accused() -> None:
    """In float64 the mask is another one."""
    torch.manual_seed(0)
    net, x = DropPath(), torch.randn(8, 4, requires_grad=True)
    with gradlib.record(net) as recording:
        net(x).square().sum().backward()
    assert recording.verify(numerical=True).ok


# The exact gradient of each is zero, so the computed one is rounding.
CANCEL: list[Callable[[Tensor], Tensor]] = [
    lambda x: x.softmax(1).sum(1, keepdim=True).expand(-1, 6),
    lambda x: (
        x.logsumexp(1, keepdim=True).expand(-1, 6) - x.exp().sum(1).log()[:, None]
    ),
    lambda x: nn.functional.layer_norm(x, [6]).sum(1, keepdim=True).expand(-1, 6),
    lambda x: (20 * x).exp().log() / 20 - x,
    lambda x: 0.1 * x + 0.2 * x - 0.3 * x,
    lambda x: nn.functional.batch_norm(0 * x + 3, None, None, training=True),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("fn", CANCEL)
def test_gradients_that_cancel_out_are_not_accused(
    fn: Callable[[Tensor], Tensor], dtype: torch.dtype
) -> None:
    found = verified(model(fn).to(dtype))
    assert not found.disagreements
    assert found.agreed == 4


def test_a_gradient_that_rounds_to_zero_in_its_own_dtype_is_not_accused() -> None:
    weights = torch.tensor([1.0, 2.0, 4.0], requires_grad=True)

    def centred(x: Tensor) -> Tensor:
        return x / 8 * 3 * weights.sum() - 0.1 * x * weights.sum() - 0.275 * x * 7

    x = torch.ones(1, 3, requires_grad=True)
    with gradlib.record(net := Apply(centred)) as recording:
        net(x).sum().backward()
    assert recording[""].grad_input[0].count_nonzero() == 0
    assert recording.verify(numerical=True).ok


def test_rounding_under_autocast_is_not_accused() -> None:
    torch.manual_seed(0)
    layers = [(nn.Linear(16, 16), nn.BatchNorm1d(16), nn.Tanh()) for _ in range(9)]
    net = nn.Sequential(*(it for three in layers for it in three))
    x = torch.randn(32, 16, requires_grad=True)
    with gradlib.record(net) as recording, torch.autocast("cpu"):
        net(x).sum().backward()
    assert recording.verify(numerical=True).ok


def test_what_float16_does_not_hold_is_not_accused() -> None:
    torch.manual_seed(0)
    layers = [(nn.Linear(16, 16), nn.ReLU()) for _ in range(15)]
    net = nn.Sequential(*(it for two in layers for it in two)).half()
    x = torch.randn(8, 16, requires_grad=True, dtype=torch.float16)
    with gradlib.record(net) as recording:
        net(x).mul(1e-4).sum().backward()
    smallest = recording["1"].grad_input
    assert smallest[0].abs().max() < torch.finfo(torch.float16).tiny
    assert recording.verify(numerical=True).ok


@pytest.mark.cpu
def test_what_is_moved_a_little_stays_on_its_device(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(
        Sine, "factor", lambda grad: 2.0 if grad.dtype == torch.float32 else 1
    )
    with gradlib.record(net := model(Sine.apply)) as recording:
        net(torch.randn(5, 4)).sin().sum().backward()
    wanted = recording.verify(numerical=True)
    with torch.device("meta"):
        found = recording.verify(numerical=True)
    assert not wanted.ok
    assert found == wanted


def test_what_a_weight_gets_is_measured_by_what_the_others_get() -> None:
    got = {0: 1.0, "weight": 1e9, "bias": 1e-9}
    some: dict[Any, Tensor] = {key: torch.full((2,), it) for key, it in got.items()}
    found = gaps_of_shares(some, some | {"bias": torch.zeros(2)})
    sizes = {key: it.size for key, it in found}
    assert len(found) == 3
    assert sizes == pytest.approx({0: 1.0, "weight": 1e9, "bias": 1e9})
