"""A chain found in the graph of a forward pass: right, or not taken."""

import random
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import gradlib
from gradlib.jacobian import planning
from gradlib.jacobian.arguments import read
from gradlib.jacobian.fast.chains import straight
from gradlib.jacobian.fast.chains.straight import Straight, find_straight
from gradlib.jacobian.run import run
from gradlib.random_state import seed_all

from .operations import looks_asked

Function = Callable[[Tensor], Tensor]


@pytest.fixture(autouse=True)
def no_line_in_code(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have them looked for in the graph, with few rows on a GPU too."""
    monkeypatch.setattr("gradlib.jacobian.fast.door.find_chain", lambda *_: None)
    monkeypatch.setattr("gradlib.jacobian.choice.FEW", 0)


def straight_of(fn: Function, x: Tensor) -> Straight | None:
    """Look for a chain in the graph of a call."""
    graph, _ = run(read(fn, (x,), 0, 0))
    return find_straight(graph, planning.make(graph, "loop", "auto", None))


def require_same(fn: Function, x: Tensor) -> None:
    """Hold a chain's Jacobian against that of the loop."""
    assert straight_of(fn, x) is not None, "this is not a chain"
    found = gradlib.per_sample_jacobian(fn, x)
    reference = gradlib.per_sample_jacobian(fn, x, mode="loop", check=False)
    torch.testing.assert_close(found, reference, rtol=1e-12, atol=1e-12)


def weights(*widths: int) -> list[Tensor]:
    """Return a matrix for each pair of neighbours."""
    return [
        torch.randn(widths[i + 1], widths[i], dtype=torch.float64) / widths[i] ** 0.5
        for i in range(len(widths) - 1)
    ]


def double(*shape: int) -> Tensor:
    """Return random numbers."""
    seed_all(0)
    return torch.randn(*shape, dtype=torch.float64)


SLOPES: list[Function] = [
    torch.tanh,
    F.silu,
    F.gelu,
    F.softplus,
    torch.sin,
    lambda x: F.elu(x, 0.7),
    lambda x: F.leaky_relu(x, 0.3),
    lambda x: F.hardtanh(x, -0.4, 0.6),
    torch.exp,
    torch.cos,
    torch.relu,
    torch.sigmoid,
    F.mish,
    lambda x: 3 * x / 2,
    lambda x: torch.where(x > 0, x, 0.0),
    lambda x: x.clamp(-0.4, 0.6),
]


@pytest.mark.parametrize("seed", range(30))
def test_random_functions(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    chance = random.Random(seed)
    seed_all(seed)
    widths = [chance.choice([2, 3, 20]) for _ in range(chance.randint(1, 4))]
    layers = weights(4, *widths, 9)
    biases = [torch.randn(len(it), dtype=torch.float64) for it in layers]
    bends = [
        chance.choices(
            [it for it in SLOPES if it is not torch.exp], k=chance.randint(0, 2)
        )
        for _ in layers
    ]

    def fn(x: Tensor) -> Tensor:
        for weight, bias, slopes in zip(layers, biases, bends, strict=True):
            x = F.linear(x, weight, bias)
            for slope in slopes:
                x = slope(x)
        return x

    require_same(fn, double(1 + seed % 4, 4))
    if seed % 2:
        monkeypatch.setattr(straight, "in_caches", lambda _: 1)
        require_same(fn, double(5, 4))


@pytest.mark.parametrize("slope", SLOPES)
def test_every_slope(slope: Function) -> None:
    first, second = weights(3, 5, 9)
    require_same(lambda x: slope(slope(x @ first.t()) @ second.t()), double(4, 3))


def test_a_view_that_keeps_samples_together() -> None:
    require_same(lambda x: (x @ A).view(4, 3, 3).flatten(1).tanh() @ B, double(4, 9))


def test_a_module_of_ones_own_and_what_is_flattened() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Sequential(nn.Linear(12, 3), nn.Tanh())
            self.outer = nn.Linear(3, 12, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            return torch.sigmoid(self.outer(self.inner(x.flatten(1))))

    require_same(Net().double(), double(5, 3, 4))
    out = torch.full((5, 12, 3, 4), torch.nan, dtype=torch.float64)
    net = Net().double()
    assert gradlib.per_sample_jacobian(net, double(5, 3, 4), out=out) is out
    reference = gradlib.per_sample_jacobian(net, double(5, 3, 4), mode="loop")
    torch.testing.assert_close(out, reference)
    plan = gradlib.plan_jacobian(net, double(5, 3, 4))
    assert plan.mode == "chain"
    assert "in the order 2 1" in str(plan)


A, B = weights(9, 9, 9)


def _many_times(x: Tensor) -> Tensor:
    for _ in range(33):
        x = x @ A
    return x


NOT_STRAIGHT: dict[str, Function] = {
    "a way around": lambda x: x + (x @ A).tanh() @ B,
    "a weight made of the input": lambda x: x @ (A + x.sum()),
    "a bias made of the input": lambda x: torch.addmm(x.sum(0), x, A),
    "a bias made of the input, for each sample": lambda x: torch.addmm(x, x, A),
    "scaled": lambda x: torch.addmm(B[0], x, A, alpha=2.0),
    "from the left": lambda x: A @ x,
    "from the left, by a weight": lambda x: A.clone().requires_grad_() @ x,
    "transposed": lambda x: (x @ A).t(),
    "samples in another order": lambda x: (x @ A).flip(0),
    "reshaped": lambda x: (x @ A).t().reshape(9, 9),
    "viewed": lambda x: (x @ A).tanh().view(3, 27).view(9, 9) @ B,
    "a mean of the batch": lambda x: (x - x.mean(0)) @ A,
    "softmax": lambda x: (x @ A).softmax(1),
    "repeated": lambda x: x[:, :1] @ A[:1] * A[0],
    "spread": lambda x: (x @ A[:, :1]) * A[0],
    "no vectors": lambda x: (x @ A).view(9, 3, 3).sin().view(9, 9) @ B,
    "no matrix": torch.tanh,
    "more matrices than there are orders for": _many_times,
}


@pytest.mark.parametrize("name", NOT_STRAIGHT)
def test_what_is_not_straight(name: str) -> None:
    fn, x = NOT_STRAIGHT[name], double(9, 9)
    assert straight_of(fn, x) is None
    found = gradlib.per_sample_jacobian(fn, x, check=False)
    reference = gradlib.per_sample_jacobian(fn, x, mode="loop", check=False)
    torch.testing.assert_close(found, reference, rtol=1e-12, atol=1e-12)


def test_products_are_not_taken_where_they_do_not_fit() -> None:
    def fn(x: Tensor) -> Tensor:
        return (((x @ A).tanh() @ B).tanh() @ A).tanh() @ B

    graph, _ = run(read(fn, (double(4, 9),), 0, 0))
    plan = planning.make(graph, "loop", "auto", None)
    found = find_straight(graph, plan)
    assert found is not None
    needed = plan.result_bytes + found.bytes
    assert find_straight(graph, replace(plan, max_bytes=needed)) is not None
    assert find_straight(graph, replace(plan, max_bytes=needed - 1)) is None


def test_an_overwritten_matrix_is_seen() -> None:
    def fn(x: Tensor) -> Tensor:
        matrix = A.clone()
        y = x @ matrix
        matrix.add_(1)
        return y

    with pytest.raises(gradlib.NoSuchWayError, match="inplace operation"):
        gradlib.per_sample_jacobian(fn, double(4, 9))


def test_too_few_rows_and_other_dtypes() -> None:
    few = weights(9, 3)[0]
    assert straight_of(lambda x: x @ few.t(), double(4, 9)) is None
    half = double(4, 9).bfloat16()
    assert straight_of(lambda x: x @ A.bfloat16(), half) is None
    assert straight_of(lambda x: x @ A, double(4, 9)) is not None


def test_a_hook_on_the_way_is_followed() -> None:
    def fn(x: Tensor) -> Tensor:
        h = x @ A
        if h.requires_grad:
            h.register_hook(lambda grad: 2 * grad)
        return h.tanh() @ B

    x = double(4, 9)
    assert straight_of(fn, x) is not None
    found = gradlib.per_sample_jacobian(fn, x, check=False)
    reference = gradlib.per_sample_jacobian(fn, x, mode="loop", check=False)
    torch.testing.assert_close(found, reference)
    without = gradlib.per_sample_jacobian(lambda x: (x @ A).tanh() @ B, x)
    torch.testing.assert_close(found, 2 * without)


@pytest.mark.parametrize(("entry", "proven"), [(0.5, False), (1e3, True)])
def test_it_is_proven_where_it_is_not_finite(
    entry: float, proven: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = looks_asked(monkeypatch)
    x = double(4, 9)
    x[2, 3] = entry

    def fn(x: Tensor) -> Tensor:
        return x.exp() @ A @ B

    assert straight_of(fn, x) is not None
    gradlib.per_sample_jacobian(fn, x, check=False)
    assert len(asked) == (proven or x.device.type != "cpu")


def test_a_saved_value_that_was_overwritten() -> None:
    def fn(x: Tensor) -> Tensor:
        h = (x @ A).tanh()
        y = h @ B
        h.data.zero_()  # nobody can see this: the loop has it, too
        return y

    x = double(4, 9)
    found = gradlib.per_sample_jacobian(fn, x, check=False)
    reference = gradlib.per_sample_jacobian(fn, x, mode="loop", check=False)
    torch.testing.assert_close(found, reference)
