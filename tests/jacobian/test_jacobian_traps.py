"""What once gave another Jacobian, refused a good call, or left something behind."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import gradlib
from gradlib import DetachedPathError, JacobianArgumentError

Function = Callable[[Tensor], Tensor]
MODES = ("auto", "reverse", "forward", "split", "loop")


@pytest.fixture
def x() -> Tensor:
    torch.manual_seed(0)
    return torch.randn(4, 3, dtype=torch.float64)


def diagonal(values: Tensor) -> Tensor:
    return torch.diag_embed(values)


# The graph is that of the arguments, and of nothing else.


@pytest.mark.parametrize("create_graph", [True, False])
@pytest.mark.parametrize("check", [True, False])
def test_one_tensor_as_two_inputs(x: Tensor, create_graph: bool, check: bool) -> None:
    x.requires_grad_()
    how: dict[str, Any] = {"create_graph": create_graph, "check": check}
    assert torch.equal(gradlib.per_sample_jacobian(torch.mul, x, x, **how), diagonal(x))
    found = gradlib.per_sample_jacobian(torch.mul, x, 2 * x, **how)
    assert torch.equal(found, diagonal(2 * x))


def test_an_input_that_is_also_in_the_closure(x: Tensor) -> None:
    x.requires_grad_()
    found = gradlib.per_sample_jacobian(
        lambda it: it * x, x, create_graph=True, check=False
    )
    assert torch.equal(found, diagonal(x))


def test_an_input_made_of_the_parameters(x: Tensor) -> None:
    model = nn.Linear(3, 3).double()
    made = model(x)
    expected = gradlib.per_sample_jacobian(model, made.detach(), argnums="parameters")
    for check in (True, False):
        found = gradlib.per_sample_jacobian(
            model, made, argnums="parameters", check=check
        )
        assert torch.equal(found["weight"], expected["weight"])
    with pytest.raises(JacobianArgumentError, match=r"inputs\[0\] was computed from"):
        gradlib.per_sample_jacobian(
            model, made, argnums="parameters", create_graph=True
        )


def test_hooks_on_what_is_differentiated_for_change_nothing(x: Tensor) -> None:
    model = nn.Linear(3, 2).double()
    expected = gradlib.per_sample_jacobian(model, x, argnums="parameters")["weight"]
    model.weight.register_hook(lambda grad: grad / 2)
    found = gradlib.per_sample_jacobian(model, x, argnums="parameters")["weight"]
    assert torch.equal(found, expected)
    model(x).sum().backward()  # the hook is there again
    weight = model.weight.grad
    assert weight is not None
    assert torch.allclose(weight, expected.sum((0, 1)) / 2)


def test_hooks_inside_are_in_the_rows_and_never_in_columns_alone(x: Tensor) -> None:
    first, last = nn.Linear(3, 32).double(), nn.Linear(32, 64).double()

    def clipped(x: Tensor) -> Tensor:
        h = first(x)
        h.register_hook(lambda grad: grad.clamp(-0.01, 0.01))
        return last(h.tanh())

    rows = gradlib.per_sample_jacobian(clipped, x, mode="loop", check=False)
    auto = gradlib.per_sample_jacobian(clipped, x, check=False)
    assert gradlib.plan_jacobian(clipped, x).mode == "forward"
    assert torch.equal(auto, rows)
    with pytest.raises(DetachedPathError):
        gradlib.per_sample_jacobian(clipped, x)


def test_a_complex_tensor_inside_is_no_place_to_split() -> None:
    x = torch.randn(3, 64, dtype=torch.float64)

    def filtered(x: Tensor) -> Tensor:
        h = torch.fft.rfft(x)[:, :4]
        return torch.fft.irfft(h * torch.arange(1.0, 5.0), n=64)

    expected = gradlib.per_sample_jacobian(filtered, x, mode="loop")
    assert torch.allclose(gradlib.per_sample_jacobian(filtered, x), expected)


# Good calls.

SCALES = torch.tensor([1e6, 1e-2, 30.0], dtype=torch.float64)
GOOD: dict[str, Function] = {
    "features of very different size": lambda x: (
        (x * SCALES)[:, 0] * torch.exp(-(x * SCALES)[:, 1] * 0.1)
    ),
    "a softmax's sum": lambda x: x.softmax(1).sum(1),
    "a sure softmax": lambda x: (100 * x).softmax(1),
    "a norm's norm": lambda x: F.normalize(x).norm(dim=1),
    "saturated": lambda x: (30 + x).sigmoid(),
    "a large constant": lambda x: 1e6 + x.sin(),
    "rounded inside": lambda x: (x + 1e8) - 1e8,
    "through complex numbers": lambda x: (x.to(torch.cfloat) * 1j).exp().real,
}


@pytest.mark.parametrize("name", GOOD)
def test_a_good_call_passes(x: Tensor, name: str) -> None:
    assert gradlib.per_sample_jacobian(GOOD[name], x).isfinite().all()


def test_inputs_of_very_different_size(x: Tensor) -> None:
    x[:, 0] = 1.7e9 + 1e5 * x[:, 0]
    gradlib.per_sample_jacobian(
        lambda x: torch.stack([x[:, 1].sin(), x[:, 0] / 1e9 * x[:, 1].cos()], 1), x
    )


@pytest.mark.parametrize("argnums", [0, "parameters"])
def test_under_autocast(argnums: Any) -> None:
    model = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 8))
    x = torch.randn(6, 16)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        for mode in ("auto", "loop", "forward"):
            gradlib.per_sample_jacobian(model, x, argnums=argnums, mode=mode)


def test_not_a_number_in_one_sample_and_a_kink_in_another(x: Tensor) -> None:
    x[0, 0], x[1, 1] = float("nan"), 0
    found = gradlib.per_sample_jacobian(torch.relu, x)
    assert torch.equal(found[1:], diagonal((x > 0).double())[1:])


def test_zero_times_infinity_takes_rows() -> None:
    x = torch.randn(3, 1, dtype=torch.float64)

    def masked(x: Tensor) -> Tensor:
        repeated = torch.cat([x * k for k in range(1, 9)], 1)
        hidden = torch.arange(8) % 2 == 0
        return repeated.masked_fill(hidden, float("-inf")).logcumsumexp(1)

    rows = gradlib.per_sample_jacobian(masked, x, mode="loop", check=False)
    auto = gradlib.per_sample_jacobian(masked, x, check=False)
    assert torch.equal(rows.isnan(), auto.isnan())


def test_a_sparse_embedding() -> None:
    class Bag(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(6, 4, sparse=True)

        def forward(self, tokens: Tensor) -> Tensor:
            return self.table(tokens).sin().sum(1)

    tokens = torch.tensor([[1, 2], [3, 3]])
    found = gradlib.per_sample_jacobian(Bag().double(), tokens, argnums="parameters")
    assert found["table.weight"].shape == (2, 4, 6, 4)


@pytest.mark.parametrize("constant", [0.0, 1e5, 1e9])
def test_a_constant_hides_no_cut_path(x: Tensor, constant: float) -> None:
    with pytest.raises(DetachedPathError):
        gradlib.per_sample_jacobian(lambda x: constant + x.sin() + x.detach().cos(), x)


def test_a_padding_row_is_named() -> None:
    class Tag(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.out = nn.Embedding(6, 4, padding_idx=0), nn.Linear(4, 2)

        def forward(self, tokens: Tensor) -> Tensor:
            return self.out(self.table(tokens).mean(1))

    tokens = torch.tensor([[1, 2, 0], [3, 0, 0]])
    with pytest.raises(DetachedPathError, match="padding_idx"):
        gradlib.per_sample_jacobian(Tag(), tokens, argnums="parameters")


def test_what_cannot_be_told_is_said(x: Tensor) -> None:
    def chaotic(x: Tensor) -> Tensor:
        x = x.sigmoid()
        for _ in range(60):
            x = 3.9 * x * (1 - x)
        return x

    with pytest.warns(UserWarning, match="cannot tell whether output changes"):
        gradlib.per_sample_jacobian(chaotic, x)


# Nothing is left behind.


class Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 2).double()
        self.calls: Tensor
        self.register_buffer("calls", torch.zeros(()))

    def encode(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.linear(x).tanh()


@pytest.mark.parametrize("how", ["method", "lambda"])
def test_a_method_changes_its_module_once(x: Tensor, how: str) -> None:
    model = Counting()
    encode: Function = model.encode if how == "method" else lambda x: model.encode(x)
    gradlib.plan_jacobian(encode, x)
    assert model.calls == 0
    gradlib.per_sample_jacobian(encode, x)
    assert model.calls == 1


def test_a_plan_leaves_written_weights(x: Tensor) -> None:
    class Clamped(nn.Linear):
        def forward(self, input: Tensor) -> Tensor:  # noqa: A002 (its name)
            self.weight.data.clamp_(-0.1, 0.1)
            return super().forward(input)

    model = Clamped(3, 2).double()
    before = model.weight.clone()
    gradlib.plan_jacobian(model, x)
    assert torch.equal(model.weight, before)


def test_the_default_device_is_not_used(x: Tensor) -> None:
    with torch.device("meta"):  # as "cuda" would, where there is one
        found = gradlib.per_sample_jacobian(torch.sin, x)
    assert torch.equal(found, diagonal(x.cos()))


def test_a_result_in_a_buffer_is_refused(x: Tensor) -> None:
    model = nn.BatchNorm1d(3).double().eval()
    model.register_buffer("mine", torch.empty(4, 3, 3, dtype=torch.float64))
    with pytest.raises(JacobianArgumentError, match="shares memory with mine"):
        gradlib.per_sample_jacobian(model, x, out=model.mine)


@pytest.mark.parametrize("mode", MODES)
def test_gradients_of_gradients_of_it(mode: str) -> None:
    torch.manual_seed(0)
    first, last = nn.Linear(3, 2).double(), nn.Linear(2, 3).double()
    x = torch.randn(2, 3, dtype=torch.float64, requires_grad=True)

    def jacobian(x: Tensor, weight: Tensor) -> Tensor:
        def fn(x: Tensor) -> Tensor:
            return last(torch.tanh(F.linear(x, weight)))

        return gradlib.per_sample_jacobian(
            fn, x, mode=mode, create_graph=True, check=False
        )

    assert torch.autograd.gradcheck(jacobian, (x, first.weight))
    assert torch.autograd.gradgradcheck(jacobian, (x, first.weight))
