"""What other ways to a Jacobian stumble over, and what must not be answered."""

import logging
import random
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from typing import Any, cast

import numpy
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.parametrizations import spectral_norm, weight_norm
from torch.utils.checkpoint import checkpoint

import gradlib
from gradlib import (
    CoupledSamplesError,
    DetachedPathError,
    IndependentOutputError,
    NoSuchWayError,
    NotRepeatableError,
)
from gradlib.jacobian import coupling, per_sample

from ..one_way import one_way

Function = Callable[[Tensor], Tensor]

ROWS = ("reverse", "loop", "auto")
"""The modes that no operation refuses."""


@pytest.fixture(autouse=True)
def _seeded() -> Iterator[None]:
    states = random.getstate(), numpy.random.get_state()
    yield
    random.setstate(states[0])
    numpy.random.set_state(states[1])


def points(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    """Return the same numbers on every device, near to no step of what is cut."""
    drawn = torch.randn(*shape, dtype=dtype, device="cpu")
    return drawn.to(torch.get_default_device())


def alone(fn: Callable[..., Any], x: Tensor) -> Tensor:
    """Return the Jacobian of each sample alone, by torch."""
    blocks: list[Tensor] = []
    for row in x.detach().split(1):
        block = torch.autograd.functional.jacobian(lambda x: fn(x.clone()), row.clone())
        block = cast(Tensor, block)
        blocks.append(block.squeeze(block.dim() - x.dim()).squeeze(0))
    return torch.stack(blocks)


def require_close(ours: Tensor, reference: Tensor, tolerance: float = 1e-12) -> None:
    assert ours.shape == reference.shape
    apart = (ours.double() - reference.double()).abs().max()
    assert apart <= tolerance * reference.double().abs().max()


# Samples that influence each other.


class Centred(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x - x.mean(0)


def contrastive(x: Tensor) -> Tensor:
    z = F.normalize(x)
    return F.cross_entropy(z @ z.T, torch.arange(len(x)), reduction="none")


def with_batch_norm() -> nn.Module:
    return nn.Sequential(
        nn.Linear(3, 4), nn.Tanh(), nn.BatchNorm1d(4), nn.Linear(4, 2)
    ).double()


@pytest.mark.parametrize("argnums", [0, "parameters"])
@pytest.mark.parametrize("mode", ["reverse", "forward", "loop", "auto"])
def test_batch_norm_in_training_is_named(mode: str, argnums: int | str) -> None:
    with pytest.raises(CoupledSamplesError, match='"2", a BatchNorm1d') as caught:
        gradlib.per_sample_jacobian(
            with_batch_norm(), points(5, 3), mode=mode, argnums=argnums
        )
    assert ".eval()" in str(caught.value)


@pytest.mark.parametrize("training", [True, False])
def test_batch_norm_without_statistics_is_not_sent_to_eval(training: bool) -> None:
    norm = nn.BatchNorm1d(4, track_running_stats=False)
    model = nn.Sequential(nn.Linear(3, 4), norm, nn.Tanh()).train(training)
    with pytest.raises(CoupledSamplesError, match="make it with track_running_stats"):
        gradlib.per_sample_jacobian(model, torch.randn(5, 3))


class Learning(nn.BatchNorm1d):
    """Uses the batch in evaluation too."""

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 (torch's name)
        return F.batch_norm(input, None, None, self.weight, self.bias, training=True)


def test_batch_norm_that_is_in_evaluation_is_not_sent_there() -> None:
    model = nn.Sequential(nn.Linear(3, 4), Learning(4)).double().eval()
    with pytest.raises(CoupledSamplesError, match='"1", a Learning') as caught:
        gradlib.per_sample_jacobian(model, points(5, 3))
    assert ".eval()" not in str(caught.value)


@pytest.mark.parametrize("argnums", [0, "parameters"])
def test_batch_norm_deep_inside_is_named(argnums: int | str) -> None:
    model = nn.Sequential(nn.Sequential(nn.Linear(3, 3).double(), with_batch_norm()))
    with pytest.raises(CoupledSamplesError, match=r'"0\.1\.2", a BatchNorm1d'):
        gradlib.per_sample_jacobian(model, points(5, 3), argnums=argnums)


@pytest.mark.parametrize("argnums", [0, "parameters"])
def test_batch_norm_in_evaluation_works(argnums: int | str) -> None:
    model = with_batch_norm()
    model(points(9, 3))
    model.eval()
    x = points(5, 3)
    buffers = [it.clone() for it in model.buffers()]
    ours = gradlib.per_sample_jacobian(model, x, argnums=argnums)
    if argnums == 0:
        require_close(ours, alone(model, x))
    for buffer, before in zip(model.buffers(), buffers, strict=True):
        assert torch.equal(buffer, before)


@pytest.mark.parametrize("batch", [2, 3, 5])
def test_a_mean_over_the_batch_by_hand_is_named(batch: int) -> None:
    model = nn.Sequential(nn.Linear(3, 3), Centred(), nn.Linear(3, 2)).double()
    for argnums in (0, "parameters"):
        with pytest.raises(CoupledSamplesError, match='"1", a Centred'):
            gradlib.per_sample_jacobian(model, points(batch, 3), argnums=argnums)


COUPLED: dict[str, Function] = {
    "contrastive": contrastive,
    "standardized": lambda x: (x - x.mean(0)) / x.std(0),
    "a weak part of the mean": lambda x: x.sin() + 1e-6 * x.mean(0),
    "a cumulative sum": lambda x: x.cumsum(0),
    "the sample before": lambda x: x.roll(1, 0) * x,
    "one pair": lambda x: torch.cat([x[:1] + x[1:2], x[1:]]),
    "the samples turned around": lambda x: x.flip(0).sin(),
    "attention across samples": lambda x: torch.softmax(x @ x.T, 1) @ x,
    "the largest of the batch": lambda x: x / x.abs().max(),
}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("fn", COUPLED.values(), ids=list(COUPLED))
def test_samples_that_look_at_each_other(fn: Function, dtype: torch.dtype) -> None:
    with pytest.raises(CoupledSamplesError):
        gradlib.per_sample_jacobian(fn, points(4, 3, dtype=dtype))


@pytest.mark.parametrize("fn", COUPLED.values(), ids=list(COUPLED))
def test_samples_that_look_at_each_other_and_are_there_already(fn: Function) -> None:
    x = points(4, 3).requires_grad_()
    with pytest.raises(CoupledSamplesError):
        gradlib.per_sample_jacobian_from_graph(fn(x), x)


def test_a_large_output_hides_no_coupling_of_a_small_one() -> None:
    def fn(x: Tensor) -> Tensor:
        small = 1e-3 * (x - x.mean(0)).sin()
        return torch.stack([1e9 * x.sin(), small], 1)

    with pytest.raises(CoupledSamplesError):
        gradlib.per_sample_jacobian(fn, points(4, 3))


def partners(x: Tensor) -> Tensor:
    """Give each sample the one that is half a batch away: two views of each thing."""
    a, b = x.chunk(2)
    return torch.cat([b, a])


# Of four samples one half is drawn that has both views of one thing.
@pytest.mark.parametrize("batch", [2, 3, 4, 6, 8])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_two_views_that_look_at_each_other(batch: int, dtype: torch.dtype) -> None:
    def fn(x: Tensor) -> Tensor:
        return x.sin() + 0.02 * (partners(x) if batch != 3 else x.roll(1, 0))

    with pytest.raises(CoupledSamplesError):
        gradlib.per_sample_jacobian(fn, points(batch, 5, dtype=dtype))


@pytest.mark.parametrize("few", [0, 4])
def test_large_entries_hide_no_small_one_that_couples(
    few: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(coupling, "FEW_SAMPLES", few)

    def fn(x: Tensor) -> Tensor:
        h = x.tanh()
        return torch.cat([3e3 * h, (h * partners(h)).sum(1, keepdim=True)], 1)

    with pytest.raises(CoupledSamplesError):
        gradlib.per_sample_jacobian(fn, points(4, 5, dtype=torch.float32))


def test_a_jacobian_that_is_not_autograds_is_seen(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Differences and autograd agree; what was computed is something else."""
    real: Any = per_sample.compute

    def wrong(*args: Any, **options: Any) -> Any:
        blocks = real(*args, **options)
        for block in blocks.values():
            block[0, 0] *= -1
        return blocks

    x = points(3, 4)
    gradlib.per_sample_jacobian(torch.sin, x)
    monkeypatch.setattr(per_sample, "compute", wrong)
    with pytest.raises(NoSuchWayError, match="not what a backward pass gives"):
        gradlib.per_sample_jacobian(torch.sin, x)


@pytest.mark.parametrize("outputs", [2, 3])
def test_a_sample_without_a_batch_is_told_what_it_lacks(outputs: int) -> None:
    model, x = nn.Linear(3, outputs), torch.ones(3)
    with pytest.raises(gradlib.GradlibError, match=r"single sample.* x\[None\]"):
        gradlib.per_sample_jacobian(model, x)
    ours = gradlib.per_sample_jacobian(model, x[None])
    torch.testing.assert_close(ours, model.weight[None])


def test_only_what_takes_a_single_sample_is_told_of_a_batch_of_one() -> None:
    model, x = nn.Conv2d(3, 3, 1).double(), points(3, 5, 5)
    with pytest.raises(CoupledSamplesError, match=r"a Conv2d.* x\[None\]"):
        gradlib.per_sample_jacobian(model, x)
    with pytest.raises(CoupledSamplesError, match="a Centred") as caught:
        gradlib.per_sample_jacobian(Centred(), points(4, 3))
    assert "x[None]" not in str(caught.value)


def test_a_second_input_that_couples_is_named() -> None:
    with pytest.raises(CoupledSamplesError, match=r"inputs\[1\]") as caught:
        gradlib.per_sample_jacobian(
            lambda x, y: x * y.mean(0), points(4, 3), points(4, 3)
        )
    assert "module" not in str(caught.value)  # there is none


def test_integers_that_couple_are_seen() -> None:
    table = nn.Embedding(5, 3).double()

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = table

        def forward(self, ids: Tensor) -> Tensor:
            return self.table(ids) - self.table(ids).mean(0)

    with pytest.raises(CoupledSamplesError):
        gradlib.per_sample_jacobian(
            Model(), torch.tensor([0, 1, 4]), argnums="parameters"
        )


@pytest.mark.parametrize("couples", [True, False])
def test_integers_that_couple_in_float32_alone_are_seen(couples: bool) -> None:
    class Model(nn.Embedding):
        def forward(self, input: Tensor) -> Tensor:  # noqa: A002 (its name)
            h = super().forward(input)
            if h.dtype != torch.float32:
                raise TypeError("float32 only")
            return h - h.mean(0) if couples else h.sin()

    find = partial(
        gradlib.per_sample_jacobian,
        Model(5, 3),
        torch.tensor([0, 1, 4]),
        argnums="parameters",
    )
    if couples:
        with pytest.raises(CoupledSamplesError, match="a Model"):
            find()
    else:
        assert find()["weight"].shape == (3, 3, 5, 3)


class LooksAtOne(nn.Module):
    """Every sample, or one alone, looks at one of the others."""

    def __init__(self, layer: nn.Module, one: int, who: slice) -> None:
        super().__init__()
        self.layer, self.one, self.who = layer, one, who

    def forward(self, x: Tensor) -> Tensor:
        h = self.layer(x)
        looks = torch.zeros(len(h), 1)
        looks[self.who] = 1
        return h * (1 - looks) + h * h[self.one] * looks


def every_case(batch: int) -> list[tuple[int, slice]]:
    """Return who is looked at, and by whom."""
    places = {0, 1, batch // 2, batch - 1} & {*range(batch)}
    pairs = [(i, slice(j, j + 1)) for i in places for j in places if i != j]
    return [*((i, slice(None)) for i in places), *pairs]


@pytest.mark.parametrize("batch", [2, 3, 5, 8, 16, 33])
def test_who_looks_at_one_sample_is_seen_whoever_it_is(batch: int) -> None:
    x, z, w = torch.randn(batch, 4), torch.randn(batch, 4), torch.randn(4)
    tokens = torch.arange(batch)
    for one, who in every_case(batch):
        linear = LooksAtOne(nn.Linear(4, 3), one, who)
        embedding = LooksAtOne(nn.Embedding(batch, 3), one, who)
        looks = torch.zeros(batch, 1)
        looks[who] = 1

        def other(a: Tensor, b: Tensor, one: int = one, looks: Any = looks) -> Tensor:
            return a.square() * (b[one] * looks + 1)

        def common(a: Tensor, w: Tensor, one: int = one, looks: Any = looks) -> Tensor:
            return torch.tanh(a * w) * (a[one] * looks + 1)

        calls: list[Callable[[], Any]] = [
            partial(gradlib.per_sample_jacobian, linear, x),
            partial(gradlib.per_sample_jacobian, linear, x, argnums="parameters"),
            partial(
                gradlib.per_sample_jacobian, embedding, tokens, argnums="parameters"
            ),
            partial(gradlib.per_sample_jacobian, other, x, z),
            partial(
                gradlib.per_sample_jacobian, common, x, w, argnums=1, in_dims=(0, None)
            ),
        ]
        for call in calls:
            with pytest.raises(CoupledSamplesError):
                call()


def test_what_goes_by_the_place_in_the_batch_is_no_coupling() -> None:
    weights, tokens = torch.rand(5, 1), torch.tensor([0, 1, 1, 3, 2])
    model = nn.Sequential(nn.Embedding(4, 3), nn.Dropout(0.5))
    model.register_forward_hook(lambda *_: _[-1] * weights)
    assert gradlib.per_sample_jacobian(model, tokens, argnums="parameters")


def test_without_check_coupled_samples_give_the_sum() -> None:
    x = points(4, 3)
    ours = gradlib.per_sample_jacobian(lambda x: x - x.mean(0), x, check=False)
    assert ours.abs().max() < 1e-12


@pytest.mark.parametrize(
    ("norm", "columns"),
    [
        (nn.BatchNorm1d(8), "NativeBatchNormBackward0 mixes the samples"),
        (nn.BatchNorm1d(8).eval(), 3),
        (nn.InstanceNorm1d(8), 3),  # of each sample, by the same kernel
    ],
    ids=["over samples", "in evaluation", "of a sample"],
)
def test_columns_are_planned_where_no_norm_mixes_samples(
    norm: nn.Module, columns: int | str
) -> None:
    def fn(x: Tensor) -> Tensor:
        h = torch.tanh(x) @ x.new_ones(3, 8)
        return norm.double()(h.unsqueeze(2).expand(-1, -1, 5)).flatten(1)

    plan = gradlib.plan_jacobian(fn, points(4, 3), check=False)
    assert plan.counts["forward"] == columns


def test_without_check_coupled_samples_that_are_there_already_give_the_sum() -> None:
    x = points(4, 3).requires_grad_()
    y = x - x.mean(0)
    ours = gradlib.per_sample_jacobian_from_graph(y, x, check=False)
    assert ours.abs().max() < 1e-12


# Programs that other ways stumble over.


class OldStyle(torch.autograd.Function):
    """Cubes: forward(ctx, ...), without setup_context."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return 3 * x**2 * grads[0]


class OnceOnly(torch.autograd.Function):
    """Doubles; its backward says that it has no graph of its own."""

    @staticmethod
    def forward(_ctx: Any, x: Tensor) -> Tensor:
        return 2 * x

    backward: Any = staticmethod(
        torch.autograd.function.once_differentiable(lambda _ctx, grad: 2 * grad)
    )


class ByNumpy(torch.autograd.Function):
    """Doubles; its backward has no graph of its own, and does not say so."""

    @staticmethod
    def forward(_ctx: Any, x: Tensor) -> Tensor:
        return 2 * x

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        del ctx
        return torch.from_numpy(2 * grads[0].detach().cpu().numpy()).to(grads[0])


class Calls(nn.Module):
    """A module of one function."""

    def __init__(self, function: Function) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


class WithHooks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(3, 2)
        self.inner.register_full_backward_hook(lambda *_: None)
        self.inner.register_full_backward_pre_hook(lambda *_: None)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x).tanh()


def test_a_backward_that_nothing_can_flow_through_is_named() -> None:
    """What torch advises, to detach what is handed to NumPy, would make it wrong."""

    class Doubles(torch.autograd.Function):
        forward: Any = staticmethod(lambda _, x: 2 * x)
        backward: Any = staticmethod(lambda _, g: torch.from_numpy(2 * g.numpy()))

    double: Any = Doubles.apply
    x = torch.randn(4, 3, device="cpu")
    with pytest.raises(NoSuchWayError, match=r'\.numpy\(\).* mode="reverse"'):
        gradlib.per_sample_jacobian(double, x, mode="forward")
    found = gradlib.per_sample_jacobian(double, x)
    torch.testing.assert_close(found, 2 * torch.eye(3, device="cpu").expand(4, 3, 3))


def branching(x: Tensor) -> Tensor:
    h = x.sin()
    for _ in range(3):
        h = h * 2 if h.abs().sum() < 1e3 else h / 2
    return h


def item_in_a_condition(x: Tensor) -> Tensor:
    return x.square() if x.abs().max().item() < 100 else x


def with_nonzero(x: Tensor) -> Tensor:
    out = x.square()
    sample, place = (x > 0).nonzero(as_tuple=True)
    return out.index_put((sample, place), x[sample, place].sin())


def with_a_mask(x: Tensor) -> Tensor:
    out = torch.zeros_like(x)
    out[x > 0] = x[x > 0] ** 3
    return out


def written_into_zeros(x: Tensor) -> Tensor:
    out = torch.zeros(x.shape, dtype=x.dtype)
    for i in range(x.shape[1]):
        out[:, i] = x[:, : i + 1].sin().sum(1)
    return out


def overwriting(x: Tensor) -> Tensor:
    x.mul_(2).add_(1)
    x[:, 0] = x[:, 1].clone()
    return x.sin()


def gradient_inside(x: Tensor) -> Tensor:
    """A force: minus the gradient of an energy."""
    with torch.enable_grad():
        x = x if x.requires_grad else x.requires_grad_()
        energy = (x.square().sum(1) ** 2).sum()
        return -torch.autograd.grad(energy, x, create_graph=True)[0]


def with_func_inside(x: Tensor) -> Tensor:
    return torch.func.vmap(torch.func.grad(lambda row: row.sin().prod()))(x)


def checkpointed(x: Tensor) -> Tensor:
    weight = torch.eye(3, dtype=x.dtype) + 0.5
    inner = checkpoint(lambda x: (x @ weight).tanh(), x, use_reentrant=False)
    return cast(Tensor, inner).square()


class Both(nn.Module):
    """An LSTM over tokens; only what it says at last counts."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.LSTM(3, 4, num_layers=2, batch_first=True, bidirectional=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)[0][:, -1]


class Heads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.MultiheadAttention(4, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x, x, x, need_weights=False)[0]


def attending(x: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(x.sin(), x, x, is_causal=True)


def in_float32(x: Tensor) -> Tensor:
    return x.float().sin().to(x.dtype)


PROGRAMS: dict[str, tuple[Callable[[], Callable[..., Any]], tuple[int, ...]]] = {
    "custom Function of the old form": (lambda: OldStyle.apply, (3,)),
    "full backward hooks": (WithHooks, (3,)),
    "control flow by values": (lambda: branching, (3,)),
    "item in a condition": (lambda: item_in_a_condition, (3,)),
    "nonzero": (lambda: with_nonzero, (3,)),
    "a mask": (lambda: with_a_mask, (3,)),
    "writes into zeros": (lambda: written_into_zeros, (3,)),
    "overwrites its input": (lambda: overwriting, (3,)),
    "scaled_dot_product_attention": (lambda: attending, (3, 4)),
    "TransformerEncoderLayer": (
        lambda: nn.TransformerEncoderLayer(4, 2, 8, 0.0, batch_first=True),
        (3, 4),
    ),
    "TransformerEncoderLayer in evaluation": (
        lambda: nn.TransformerEncoderLayer(4, 2, 8, batch_first=True).eval(),
        (3, 4),
    ),
    "MultiheadAttention": (Heads, (3, 4)),
    "LSTM": (Both, (5, 3)),
    "checkpoint": (lambda: checkpointed, (3,)),
    "weight_norm": (lambda: weight_norm(nn.Linear(3, 2)), (3,)),
    "spectral_norm": (lambda: spectral_norm(nn.Linear(3, 2)).eval(), (3,)),
    "a gradient inside": (lambda: gradient_inside, (3,)),
    "torch.func inside": (lambda: with_func_inside, (3,)),
    "cumprod": (lambda: lambda x: x.cumprod(1), (3,)),
    "sort": (lambda: lambda x: x.sort(1).values, (4,)),
    "interpolate": (lambda: lambda x: F.interpolate(x, scale_factor=2), (1, 3)),
    "max_pool2d": (lambda: nn.MaxPool2d(2), (1, 4, 4)),
    "a solved equation": (
        lambda: lambda x: torch.linalg.solve(x @ x.mT + torch.eye(2), x),
        (2, 2),
    ),
}


class Kernel(torch.autograd.Function):
    """Stands for one that is written for float32, and has a wrong backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, slope: float) -> Tensor:
        if x.dtype != torch.float32:
            raise TypeError("float32 only")
        ctx.save_for_backward(x)
        ctx.slope = slope
        return x.exp()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        (x,) = ctx.saved_tensors
        return ctx.slope * grads[0] * x.exp(), None


@pytest.mark.parametrize("slope", [1.0, 0.93, 1.09])
@pytest.mark.parametrize("seed", range(4))
def test_where_float64_is_not_to_be_had_a_twentieth_is_seen(
    slope: float, seed: int
) -> None:
    torch.manual_seed(seed)

    def fn(x: Tensor) -> Any:
        return Kernel.apply(x, slope)

    with nullcontext() if slope == 1 else pytest.raises(gradlib.DetachedPathError):
        gradlib.per_sample_jacobian(fn, points(5, 6, dtype=torch.float32))


@pytest.mark.parametrize("seed", range(4))
def test_nets_for_float32_alone_leave_no_doubt(seed: int) -> None:
    torch.manual_seed(seed)
    model = nn.Sequential(
        nn.Conv2d(1, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(72, 16), nn.ReLU()
    )

    def fn(x: Tensor) -> Tensor:
        if x.dtype != torch.float32:
            raise TypeError("float32 only")
        y: Tensor = model(x)
        return y

    gradlib.per_sample_jacobian(fn, torch.randn(8, 1, 5, 5))  # or it would warn


@pytest.mark.parametrize("mode", ROWS)
@pytest.mark.parametrize("name", PROGRAMS)
def test_programs_that_other_ways_stumble_over(name: str, mode: str) -> None:
    make, shape = PROGRAMS[name]
    fn = make()
    if isinstance(fn, nn.Module):
        fn = fn.double()
    x = points(4, *shape)
    before = x.clone()
    ours = gradlib.per_sample_jacobian(fn, x, mode=mode)
    assert torch.equal(x, before)
    assert not x.requires_grad
    require_close(ours, alone(fn, x))


@pytest.mark.parametrize("mode", ["forward", "split"])
@pytest.mark.parametrize("name", PROGRAMS)
def test_the_other_modes_give_the_same_or_refuse(name: str, mode: str) -> None:
    make, shape = PROGRAMS[name]
    fn = make()
    if isinstance(fn, nn.Module):
        fn = fn.double()
    x = points(4, *shape)
    try:
        ours = gradlib.per_sample_jacobian(fn, x, mode=mode)
    except NoSuchWayError:
        return
    require_close(ours, alone(fn, x), 1e-11)


def test_a_refusal_quotes_torch_in_a_sentence_of_its_own() -> None:
    with pytest.raises(NoSuchWayError, match=r"is not implemented\. Use mode="):
        gradlib.per_sample_jacobian(
            lambda x, y: F.multi_margin_loss(x, y, reduction="none"),
            torch.randn(3, 4),
            torch.tensor([0, 1, 3]),
            mode="forward",
        )


WITHOUT_A_GRAPH: dict[str, Function] = {
    "once differentiable": cast(Any, OnceOnly.apply),
    "NumPy": cast(Any, ByNumpy.apply),
    "once differentiable, and another way": lambda x: x + cast(Any, OnceOnly.apply)(x),
    "NumPy, and another way": lambda x: x + cast(Any, ByNumpy.apply)(x),
    "once differentiable, deep": lambda x: (
        x.tanh() + cast(Any, OnceOnly.apply)(x)
    ).sin(),
}


@pytest.mark.parametrize("check", [True, False])
@pytest.mark.parametrize("mode", ROWS)
@pytest.mark.parametrize("name", WITHOUT_A_GRAPH)
def test_rows_through_a_backward_without_a_graph(
    name: str, mode: str, check: bool
) -> None:
    fn, x = WITHOUT_A_GRAPH[name], points(4, 3)
    ours = gradlib.per_sample_jacobian(fn, x, mode=mode, check=check)
    require_close(ours, alone(fn, x))


@pytest.mark.parametrize("check", [True, False])
@pytest.mark.parametrize("mode", ["forward", "split"])
@pytest.mark.parametrize("name", WITHOUT_A_GRAPH)
def test_columns_through_a_backward_without_a_graph(
    name: str, mode: str, check: bool
) -> None:
    fn, x = WITHOUT_A_GRAPH[name], points(4, 3)
    try:
        ours = gradlib.per_sample_jacobian(fn, x, mode=mode, check=check)
    except NoSuchWayError:
        return
    require_close(ours, alone(fn, x))


@pytest.mark.parametrize("name", WITHOUT_A_GRAPH)
def test_columns_without_a_graph_beside_integers(name: str) -> None:
    ids = torch.tensor([0, 1, 2, 0])
    with pytest.raises(NoSuchWayError, match='Use mode="reverse"'):
        gradlib.per_sample_jacobian(
            lambda x, ids: WITHOUT_A_GRAPH[name](x) * (ids[:, None] + 1),
            *(points(4, 3), ids),
            mode="forward",
        )


@pytest.mark.parametrize("argnums", [0, "parameters"])
@pytest.mark.parametrize("mode", [*ROWS, "forward", "split"])
def test_a_loss_of_a_jacobian_through_a_backward_marked_once_differentiable(
    mode: Any, argnums: Any
) -> None:
    model = nn.Sequential(nn.Linear(3, 2), Calls(cast(Any, OnceOnly.apply))).double()
    with pytest.raises(NoSuchWayError, match="OnceOnlyBackward, whose"):
        gradlib.per_sample_jacobian(
            model, points(4, 3), argnums=argnums, mode=mode, create_graph=True
        )


class Cubes(torch.autograd.Function):
    """Cubes, and divides by its second input, in whatever way its backward is told."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, by: Tensor, how: Function) -> Tensor:
        ctx.save_for_backward(x, by)
        ctx.how = how
        return x**3 / by

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, by = ctx.saved_tensors
        # A divisor that counts as a constant gets zeros, which need no graph.
        return ctx.how(3 * x**2 / by * grads[0]), torch.zeros_like(by), None


def cubed(x: Tensor, how: Function) -> Tensor:
    by = torch.full((), 2.0, dtype=x.dtype, requires_grad=True)
    return cast(Any, Cubes.apply)(x, by, how)


CUBED: dict[str, Callable[[Tensor, Function], Tensor]] = {
    "all": cubed,
    "inside": lambda x, how: (cubed(x.sin(), how) * x).exp(),
    "beside others": lambda x, how: x.sin() + cubed(x, how),
}


@pytest.mark.parametrize("mode", ROWS)
@pytest.mark.parametrize("name", CUBED)
def test_a_loss_of_a_jacobian_through_a_backward_without_a_graph(
    name: str, mode: Any
) -> None:
    x = points(4, 3)

    def jacobian(how: Function, **options: Any) -> Tensor:
        return gradlib.per_sample_jacobian(
            lambda x: CUBED[name](x, how), x, mode=mode, create_graph=True, **options
        )

    right = jacobian(lambda grad: grad)
    with pytest.raises(NoSuchWayError, match=r"backward of CubesBackward, which"):
        jacobian(Tensor.detach)
    require_close(jacobian(Tensor.detach, check=False).detach(), right.detach())
    assert right.requires_grad
    x.requires_grad_()
    y = CUBED[name](x, Tensor.detach)
    with pytest.raises(NoSuchWayError, match=r"backward of CubesBackward, which"):
        gradlib.per_sample_jacobian_from_graph(y, x, create_graph=True)
    gradlib.per_sample_jacobian_from_graph(y, x)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")  # may change
@pytest.mark.parametrize("check", [True, False])
@pytest.mark.parametrize("layout", [torch.strided, torch.jagged])
def test_nested_tensors_inside_are_refused(layout: torch.layout, check: bool) -> None:
    def fn(x: Tensor) -> Tensor:
        rows: Any = [row.sin() for row in x]
        nested = torch.nested.as_nested_tensor(rows, layout=layout)
        return torch.nested.to_padded_tensor(nested, 0.0)

    for call in (gradlib.per_sample_jacobian, gradlib.plan_jacobian):
        with pytest.raises(NoSuchWayError, match=r"to_padded_tensor"):
            call(fn, torch.randn(3, 4), mode="loop", check=check)


def test_a_parameter_that_is_frozen_in_the_call_is_named() -> None:
    class Freezes(nn.Sequential):
        def forward(self, input: Tensor) -> Tensor:  # noqa: A002 (its name)
            cast(nn.Module, self[0]).requires_grad_(False)
            return super().forward(input)

    model = Freezes(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 2)).double()
    with pytest.raises(
        gradlib.JacobianArgumentError, match=r"froze 0\.weight, 0\.bias in"
    ):
        gradlib.per_sample_jacobian(model, points(4, 3), argnums="parameters")
    found = gradlib.per_sample_jacobian(model, points(4, 3), argnums="parameters")
    assert set(found) == {"2.weight", "2.bias"}


def test_a_loss_of_a_jacobian_beside_a_backward_marked_once_differentiable() -> None:
    weight = torch.ones(3, dtype=torch.double, requires_grad=True)
    beside = cast(Any, OnceOnly.apply)(weight)
    ours = gradlib.per_sample_jacobian(
        lambda x: beside * x.sin(), points(4, 3), create_graph=True
    )
    ours.sum().backward()
    assert weight.grad is not None


def test_hooks_see_a_backward_pass() -> None:
    model, seen = WithHooks().double(), list[int]()
    model.inner.register_full_backward_hook(lambda *_: seen.append(1))
    gradlib.per_sample_jacobian(model, points(4, 3), mode="loop", check=False)
    assert len(seen) == 2


def test_a_reentrant_checkpoint_is_refused() -> None:
    def fn(x: Tensor) -> Tensor:
        return cast(Tensor, checkpoint(torch.sin, x, use_reentrant=True))

    for mode in ROWS:
        with pytest.raises(NoSuchWayError, match="use_reentrant=False"):
            gradlib.per_sample_jacobian(fn, points(4, 3), mode=mode)
    with pytest.raises(NoSuchWayError, match="use_reentrant=False"):
        gradlib.plan_jacobian(fn, points(4, 3))


def test_what_was_overwritten_cannot_be_gone_back_through() -> None:
    def fn(x: Tensor) -> Tensor:
        h = 2 * x
        y = h.sin()
        h.add_(1)
        return y

    for ask in (gradlib.plan_jacobian, gradlib.per_sample_jacobian):
        with pytest.raises(NoSuchWayError, match="modified by an inplace operation"):
            ask(fn, points(4, 3))


@pytest.mark.parametrize("mode", [*ROWS, "forward", "split"])
@pytest.mark.parametrize("check", [True, False])
def test_dropout_has_one_mask_for_each_sample(check: bool, mode: str) -> None:
    masks: list[Tensor] = []

    class Seen(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(3, 8), nn.Linear(8, 4)
            self.drop = nn.Dropout(0.5)

        def forward(self, x: Tensor) -> Tensor:
            h = self.first(x).exp()
            dropped = self.drop(h)
            masks.append((dropped / h).detach())
            return self.last(dropped)

    model, x = Seen().double(), points(6, 3)
    ours = gradlib.per_sample_jacobian(model, x, mode=mode, check=check)
    mask, h = masks[0], model.first(x).exp()
    assert set(mask.unique().tolist()) == {0.0, 2.0}
    assert len(mask.unique(dim=0)) > 1
    inner = (mask * h)[:, :, None] * model.first.weight
    require_close(ours, (model.last.weight @ inner).detach())


# Paths that autograd does not see, beside one that it does.


class StraightThrough(torch.autograd.Function):
    @staticmethod
    def forward(_ctx: Any, x: Tensor) -> Tensor:
        return x.round()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        del ctx
        return grads[0]


class WrongFactor(torch.autograd.Function):
    @staticmethod
    def forward(_ctx: Any, x: Tensor) -> Tensor:
        return 2 * x

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        del ctx
        return 3 * grads[0]


def under_no_grad(x: Tensor) -> Tensor:
    with torch.no_grad():
        factor = x.cos()
    return x * factor


def by_numpy(x: Tensor) -> Tensor:
    return x + torch.from_numpy(numpy.sin(x.detach().double().cpu().numpy())).to(x)


def one_way_only(x: Tensor) -> Tensor:
    return torch.cat([x.sin(), x.detach().cos() + 0 * x], 1)


CUT: dict[str, Callable[..., Any]] = {
    "detach": lambda x: x * x.detach().sin(),
    "data": lambda x: x * x.data.sin(),
    "no_grad": under_no_grad,
    "NumPy": by_numpy,
    "an integer cast": lambda x: x.sin() + (10 * x).long() * 0.1,
    "an integer cast and a product": lambda x: x * (3 * x).int(),
    "integers put where an index says": lambda x: (
        x.sin() + (x * 0).scatter(1, (x > 0).long(), (10 * x).long().to(x) / 10)
    ),
    "integers computed from a cast": lambda x: x.sin() + (1 - (10 * x).long()) * 0.1,
    "item": lambda x: (
        x * torch.stack([r.sum().sin() * 0 + r[0].item() for r in x])[:, None]
    ),
    "tolist": lambda x: x + torch.tensor(x.tolist(), dtype=x.dtype).sin(),
    "a weight cut": lambda x: torch.softmax(x.detach(), 1) * x,
    "half of the outputs": one_way_only,
    "a wrong backward": lambda x: x + cast(Any, WrongFactor.apply)(x),
    "straight through": lambda x: cast(Any, StraightThrough.apply)(5 * x),
    "straight through by detach": lambda x: x.sin() + (5 * x - x.sin()).detach(),
    "the sign of a step": lambda x: x.sin() + (x.tanh() - x).detach(),
}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", CUT)
def test_a_cut_path_is_seen(name: str, dtype: torch.dtype) -> None:
    with pytest.raises(DetachedPathError):
        gradlib.per_sample_jacobian(CUT[name], points(4, 3, dtype=dtype))


@pytest.mark.parametrize("shape", [(3, 4), (16, 64), (64, 256)])
@pytest.mark.parametrize("levels", [1, 10, 127])
def test_rounding_of_many_entries_is_seen(shape: tuple[int, int], levels: int) -> None:
    """One of many steps over an edge wherever a difference is taken."""

    def straight(x: Tensor) -> Tensor:
        return x + ((levels * x).round() / levels - x).detach()

    x = points(*shape, dtype=torch.float32)
    with pytest.raises(DetachedPathError):
        gradlib.per_sample_jacobian(straight, x)
    ours = gradlib.per_sample_jacobian(straight, x, check=False)
    assert torch.equal(ours, torch.eye(shape[1]).expand(shape[0], -1, -1))


@pytest.mark.parametrize("name", CUT)
def test_a_cut_path_of_one_sample_is_seen(name: str) -> None:
    with pytest.raises(DetachedPathError):
        gradlib.per_sample_jacobian(CUT[name], points(1, 3))


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("detach", r"and fn uses \.detach\(\) in test_jacobian_failures\.py:\d+;"),
        ("a wrong backward", r"such as \.detach\(\), .*; a backward of your own"),
    ],
)
def test_what_cuts_a_path_is_named(name: str, hint: str) -> None:
    with pytest.raises(DetachedPathError, match=f"Something cuts a path, {hint}"):
        gradlib.per_sample_jacobian(CUT[name], points(4, 3))


@pytest.mark.parametrize(
    ("batch", "said"),
    [(1, "(sample 0)"), (3, "(samples 0, 1, 2)"), (5, "(samples 0, 1, 2 and 2 more)")],
)
def test_some_of_the_samples_of_a_cut_path_are_listed(batch: int, said: str) -> None:
    with pytest.raises(DetachedPathError) as caught:
        gradlib.per_sample_jacobian(CUT["detach"], points(batch, 3))
    assert said in str(caught.value)


@pytest.mark.parametrize("mode", ["reverse", "forward", "split", "loop"])
def test_a_cut_path_is_seen_in_every_mode(mode: str) -> None:
    with pytest.raises(DetachedPathError, match=r"\.detach\(\) in test_jacobian_fail"):
        gradlib.per_sample_jacobian(CUT["detach"], points(4, 3), mode=mode)


class Gated(nn.Module):
    """A net with a gate that no gradient goes through."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.first = nn.Linear(3, 8, dtype=dtype)
        self.last = nn.Linear(8, 2, dtype=dtype)
        self.cut = True

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        gate = torch.sigmoid(3 * (h.detach() if self.cut else h))
        return self.last(h * gate)


@pytest.mark.parametrize("argnums", [0, "parameters"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_a_cut_path_inside_a_module(dtype: torch.dtype, argnums: int | str) -> None:
    model, x = Gated(dtype), points(5, 3, dtype=dtype)
    with pytest.raises(DetachedPathError):
        gradlib.per_sample_jacobian(model, x, argnums=argnums)
    model.cut = False
    gradlib.per_sample_jacobian(model, x, argnums=argnums)


def test_a_cut_path_of_a_single_sample_of_many() -> None:
    def fn(x: Tensor) -> Tensor:
        kept = torch.tensor([True] * 7 + [False], device=x.device)[:, None]
        return torch.where(kept, x.sin(), x * x.detach().cos())

    with pytest.raises(DetachedPathError, match="sample 7"):
        gradlib.per_sample_jacobian(fn, points(8, 3))


@pytest.mark.parametrize("rest", [0.0, 1.0])
def test_a_cut_path_from_what_is_zero_is_seen(rest: float) -> None:
    def cut(x: Tensor) -> Tensor:
        return x.sin() + x[:, :1].detach()

    x = torch.full((4, 3), rest)
    x[:, 0] = 0
    with pytest.raises(DetachedPathError):
        gradlib.per_sample_jacobian(cut, x)


def test_without_check_a_cut_path_is_let_be() -> None:
    x = points(4, 3)
    ours = gradlib.per_sample_jacobian(CUT["detach"], x, check=False)
    require_close(ours, torch.diag_embed(x.sin()))


def logged(x: Tensor) -> Tensor:
    logging.getLogger(__name__).debug("mean %s", x.detach().mean().item())
    logging.getLogger(__name__).debug("all %s", x.detach().double().cpu().numpy().sum())
    return x.sin()


def taking_the_largest(x: Tensor) -> Tensor:
    return x.gather(1, x.detach().argmax(1, keepdim=True))


def shifted(x: Tensor) -> Tensor:
    top = x.detach().amax(1, keepdim=True)
    return (x - top).exp().sum(1).log() + top[:, 0]


def table(x: Tensor) -> Tensor:
    return torch.arange(1, 28).view(9, 3).to(x)


def rows(x: Tensor) -> Tensor:
    return x.long().sum(1) % 9


def places(x: Tensor) -> Tensor:
    return (10 * x.double()).long().abs() % 9


HARMLESS: dict[str, Function] = {
    "log-sum-exp": shifted,
    "logging": logged,
    "argmax as an index": taking_the_largest,
    "argmax as an integer index": lambda x: x[torch.arange(len(x)), x.argmax(1).long()],
    "a row of a table": lambda x: x * table(x)[rows(x)],
    "a row by index_select": lambda x: x * table(x).index_select(0, rows(x)),
    "a condition on integers": lambda x: torch.where(x.long() > 0, x.sin(), x.cos()),
    "an embedding of integers": lambda x: x * F.embedding(rows(x), table(x)),
    "a bag of rows": lambda x: x * F.embedding_bag(rows(x)[:, None], table(x)),
    "added where an index says": lambda x: torch.zeros(
        (len(x), 9), dtype=x.dtype
    ).scatter_add(1, places(x), x),
    "added there in place": lambda x: x.new_zeros(len(x), 9).scatter_add_(
        1, places(x), x
    ),
    "put where an index says": lambda x: x.new_zeros(len(x), 9).scatter(
        1, places(x), x.sin()
    ),
    "the largest at an index": lambda x: x.new_zeros(len(x), 9).scatter_reduce(
        1, places(x), x.sin(), "amax", include_self=False
    ),
    "put by an index": lambda x: (x * 0).index_put(
        (torch.arange(len(x)), x.long()[:, 0].abs() % 3), x.sin()[:, 1]
    ),
    "one hot": lambda x: x * F.one_hot(rows(x) % 3, 3).to(x),
    "a class": lambda x: F.cross_entropy(x, rows(x) % 3, reduction="none"),
    "a class, by its logarithms": lambda x: F.nll_loss(
        x.sin(), rows(x) % 3, reduction="none"
    ),
    "a detached condition": lambda x: torch.where(x.detach() > 0.1, x.sin(), x.cos()),
    "a mask of a detached value": lambda x: x * (x.detach() > 0),
    "normalised and undone": lambda x: (x / x.detach().norm()) * x.detach().norm(),
    "integers that do not depend": lambda x: x * torch.arange(3).long().to(x),
    "a count": lambda x: x.sin() * x.shape[1],
}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", HARMLESS)
def test_a_detach_that_changes_nothing(name: str, dtype: torch.dtype) -> None:
    fn, x = HARMLESS[name], points(4, 3, dtype=dtype)
    ours = gradlib.per_sample_jacobian(fn, x)
    tolerance = {torch.float64: 1e-9, torch.float32: 1e-5, torch.bfloat16: 0.05}
    require_close(ours, alone(fn, x.double()), tolerance[dtype])


def dead(x: Tensor) -> Tensor:
    return F.relu(x - 100)


ZEROS: dict[str, Function] = {
    "dead ReLU": dead,
    "times zero": lambda x: x * 0,
    "a power of zero": lambda x: x**0,
    "saturated": lambda x: torch.clamp(x, 50, 60),
    "a constant part": lambda x: torch.cat([x * 0, x.new_ones(len(x), 2)], 1),
    "a whole number": lambda x: x.round(),
    "the sign": lambda x: x.sign(),
}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ZEROS)
def test_true_zeros_pass(name: str, dtype: torch.dtype) -> None:
    x = points(4, 3, dtype=dtype)
    assert not gradlib.per_sample_jacobian(ZEROS[name], x).any()


def at_kinks(dtype: torch.dtype) -> Tensor:
    return torch.tensor([[0.0, 0, 1], [2, 2, 2], [-1, 0, 0.5]], dtype=dtype)


KINKS: dict[str, Function] = {
    "relu": F.relu,
    "abs": torch.abs,
    "leaky_relu": F.leaky_relu,
    "hardtanh": lambda x: F.hardtanh(x, -1, 2),
    "the largest": lambda x: x.amax(1),
    "the largest by index": lambda x: x.max(1).values,
    "the larger of two": lambda x: torch.maximum(x[:, 0], x[:, 1]),
    "sorted": lambda x: x.sort(1).values,
    "max_pool1d": lambda x: F.max_pool1d(x[:, None], 3)[:, 0],
    "median": lambda x: x.median(1).values,
    "relu of differences": lambda x: F.relu(x[:, :1] - x) + x.sin(),
    "smooth l1": lambda x: F.smooth_l1_loss(x, x * 0 + 1, reduction="none"),
    "a deep one": lambda x: F.relu(F.relu(x) - 1).abs() + x,
}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", KINKS)
def test_kinks_and_ties_pass(name: str, dtype: torch.dtype) -> None:
    fn, x = KINKS[name], at_kinks(dtype)
    ours = gradlib.per_sample_jacobian(fn, x)
    require_close(ours, alone(fn, x), 0.01)


def test_kinks_beside_the_point_take_a_pair_of_calls_more() -> None:
    calls: list[int] = []

    def fn(x: Tensor) -> tuple[Tensor, Tensor]:
        calls.append(len(x))
        return F.relu(x - 1) + x.square(), x[:, :0]

    x = torch.full((4, 8), 1 + 5e-7)  # nearer than a step, and no kink itself
    ours, _ = gradlib.per_sample_jacobian(fn, x)
    assert len(calls) == 5
    require_close(ours, torch.diag_embed(1 + 2 * x), 1e-6)


def test_a_large_constant_hides_no_cut_path_from_a_shorter_step() -> None:
    def cut(x: Tensor) -> Tensor:
        return x.sin() + (x / 30).detach() + 7e5

    with pytest.raises(DetachedPathError):
        gradlib.per_sample_jacobian(cut, torch.ones(1, 3, dtype=torch.float64))


@pytest.mark.parametrize("name", KINKS)
def test_a_cut_path_at_a_kink_is_seen(name: str) -> None:
    fn = KINKS[name]
    with pytest.raises(DetachedPathError):
        gradlib.per_sample_jacobian(
            lambda x: fn(x) * (x.sum(1) + 0.3).detach().sin().reshape(
                -1, *[1] * (fn(x).dim() - 1)
            ) + fn(x),
            at_kinks(torch.float64),
        )  # fmt: skip


# Functions that cannot be called in float64.


def only_as(dtype: torch.dtype, fn: Function) -> Function:
    def narrow(x: Tensor) -> Tensor:
        if x.dtype != dtype:
            raise TypeError(f"{dtype} only")
        return fn(x)

    return narrow


def test_a_function_of_float32_alone_is_checked_in_it() -> None:
    x = points(4, 3, dtype=torch.float32)
    for fn in (torch.sin, F.relu, *(ZEROS[it] for it in ("dead ReLU", "times zero"))):
        gradlib.per_sample_jacobian(only_as(torch.float32, fn), x)
    for name in ("detach", "no_grad", "a wrong backward"):
        with pytest.raises(DetachedPathError):
            gradlib.per_sample_jacobian(only_as(torch.float32, CUT[name]), x)


@pytest.mark.parametrize("name", COUPLED)
def test_samples_that_look_at_each_other_in_float32_alone(name: str) -> None:
    x = points(4, 3, dtype=torch.float32)
    with pytest.raises(CoupledSamplesError):
        gradlib.per_sample_jacobian(only_as(torch.float32, COUPLED[name]), x)


def test_what_was_not_checked_is_said() -> None:
    x = points(4, 3, dtype=torch.bfloat16)
    with pytest.warns(UserWarning, match="did not look for cut paths") as said:
        gradlib.per_sample_jacobian(only_as(torch.bfloat16, torch.sin), x)
    assert said[0].filename == __file__


# Outputs that do not depend.

APART: dict[str, Callable[[Tensor], Any]] = {
    "detached": lambda x: x.detach().sin(),
    "another one beside it": lambda x: (x.sin(), x.detach()),
    "a constant": lambda x: torch.ones(len(x), 2, requires_grad=True) * 2,
    "a cast to integers": lambda x: x.long().to(x),
    "NumPy": lambda x: torch.from_numpy(x.detach().cpu().numpy()).to(x),
    "item": lambda x: torch.tensor([it.item() for it in x[:, 0]], dtype=x.dtype),
    "a comparison": lambda x: (x > 0).to(x),
}


@pytest.mark.parametrize("check", [True, False])
@pytest.mark.parametrize("name", APART)
def test_an_output_that_does_not_depend(name: str, check: bool) -> None:
    with pytest.raises(IndependentOutputError, match="output"):
        gradlib.per_sample_jacobian(APART[name], points(4, 3), check=check)


def test_an_input_that_nothing_depends_on() -> None:
    with pytest.raises(IndependentOutputError, match=r"inputs\[1\]"):
        gradlib.per_sample_jacobian(
            lambda x, _: x.sin(), points(4, 3), points(4, 2), argnums=(0, 1)
        )


def test_an_output_that_is_there_already_and_does_not_depend() -> None:
    x, y = points(4, 3).requires_grad_(), points(4, 3).requires_grad_()
    with pytest.raises(IndependentOutputError):
        gradlib.per_sample_jacobian_from_graph(x.sin(), y)


@pytest.mark.parametrize("beside", [True, False])
def test_an_output_of_the_other_part_alone(beside: bool) -> None:
    # One node made both parts, so to reach it is not to reach the part asked for.
    ours, other = (points(4, 6).requires_grad_() * 2).chunk(2, 1)
    outputs = (ours.sin(), other.sin()) if beside else other.sin()
    with pytest.raises(IndependentOutputError, match="output"):
        gradlib.per_sample_jacobian_from_graph(outputs, ours)


def test_both_parts_of_one_node() -> None:
    parts = (points(4, 6).requires_grad_() * 2).chunk(2, 1)
    rows = gradlib.per_sample_jacobian_from_graph(parts[1].sin() * 3 + parts[0], parts)
    torch.testing.assert_close(rows[0], torch.eye(3).to(rows[0]).expand(4, 3, 3))
    torch.testing.assert_close(rows[1], (3 * parts[1].cos()).diag_embed())


def test_no_two_blocks_share_memory() -> None:
    # Their gradients do: those of a sum are one tensor.
    x, y = points(4, 3), points(4, 3)
    of_x, of_y = gradlib.per_sample_jacobian(
        lambda x, y: (x + y).sin(), x, y, argnums=(0, 1), mode="reverse"
    )
    of_x.zero_()
    torch.testing.assert_close(of_y, (x + y).cos().diag_embed())


@pytest.mark.parametrize("mode", ["reverse", "loop"])
def test_what_a_backward_returns_is_copied(mode: str) -> None:
    kept = points(1, 3)

    class Same(torch.autograd.Function):
        @staticmethod
        def forward(_ctx: Any, x: Tensor) -> Tensor:
            return (x * kept).sum(1)

        @staticmethod
        def backward(ctx: Any, *_grads: Tensor) -> Tensor:
            del ctx
            return kept

    before = kept.clone()
    rows = gradlib.per_sample_jacobian(
        cast(Any, Same.apply), points(1, 3), mode=mode, check=False
    )
    rows.zero_()
    assert torch.equal(kept, before)


def test_blocks_that_are_zero_beside_others() -> None:
    x, y = points(4, 3), points(4, 2)
    ours = gradlib.per_sample_jacobian(
        lambda x, y: (x.sin(), y.sin()), x, y, argnums=(0, 1)
    )
    assert not ours[0][1].any()
    assert not ours[1][0].any()
    require_close(ours[0][0], torch.diag_embed(x.cos()))
    require_close(ours[1][1], torch.diag_embed(y.cos()))


@pytest.mark.parametrize("create_graph", [False, True])
@pytest.mark.parametrize("mode", ["auto", "reverse", "forward", "split", "loop"])
def test_a_backward_that_gives_nothing(mode: str, create_graph: bool) -> None:
    net = nn.Sequential(nn.Linear(3, 2), nn.Tanh(), nn.Linear(2, 4)).double()
    x, y = points(4, 3), points(4, 3)
    how: dict[str, Any] = {"mode": mode, "create_graph": create_graph}
    by_x, by_y = gradlib.per_sample_jacobian(
        lambda x, y: net(one_way(x, y)),
        *(x, y),
        argnums=(0, 1),
        check=False,
        **how,
    )
    require_close(by_x, alone(net, x * y) * y[:, None])
    assert by_y.shape == (4, 4, 3)
    assert not by_y.any()


# Randomness.


class Counter:
    """Another factor each time."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x * self.calls


def scaled_by(draw: Callable[[], float]) -> Function:
    return lambda x: x * draw()


CHANCE: dict[str, Callable[[], Callable[[Tensor], Any]]] = {
    "Python": lambda: lambda x: x * random.random(),
    "Python's noise": lambda: lambda x: x + random.gauss(0, 1),
    "NumPy": lambda: lambda x: x * float(numpy.random.rand()),
    "NumPy's generator": lambda: scaled_by(numpy.random.default_rng(0).random),
    "in one of two outputs": lambda: lambda x: (x.sin(), x * random.random()),
    "a counter": Counter,
}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", CHANCE)
def test_chance_that_is_not_torchs(name: str, dtype: torch.dtype) -> None:
    with pytest.raises(NotRepeatableError):
        gradlib.per_sample_jacobian(CHANCE[name](), points(4, 3, dtype=dtype))


TORCHS_CHANCE: dict[str, Callable[[Tensor], Tensor]] = {
    "noise": lambda x: (x + torch.randn_like(x)).sin(),
    "factor": lambda x: x * torch.rand(()),
    "dropout": lambda x: F.dropout(x.sin(), 0.5),
    "a permutation": lambda x: x.sin()[:, torch.randperm(3)],
    "bernoulli": lambda x: x.sin() * torch.bernoulli(torch.full((len(x), 3), 0.5)),
    "reparametrised": lambda x: torch.distributions.Normal(x, x.exp()).rsample(),
    "rrelu": lambda x: F.rrelu(x, training=True),
}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", TORCHS_CHANCE)
def test_torchs_chance_passes(name: str, dtype: torch.dtype) -> None:
    fn, x = TORCHS_CHANCE[name], points(4, 3, dtype=dtype)
    torch.manual_seed(5)
    ours = gradlib.per_sample_jacobian(fn, x)
    after = torch.get_rng_state()
    torch.manual_seed(5)
    reference = gradlib.per_sample_jacobian(fn, x, check=False)
    assert torch.equal(ours, reference)
    assert torch.equal(after, torch.get_rng_state())
    torch.manual_seed(5)
    given = x.clone().requires_grad_()
    grad = torch.autograd.grad(fn(given).sum(), given)[0]
    require_close(ours.sum(1), grad, 1e-12 if dtype == torch.float64 else 0.02)


# In bfloat16, as whole modules.

NETS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "chain": (
        lambda: nn.Sequential(nn.Linear(3, 16), nn.ReLU(), nn.Linear(16, 2)),
        (3,),
    ),
    "convolution": (
        lambda: nn.Sequential(nn.Conv2d(1, 4, 3), nn.GroupNorm(2, 4), nn.SiLU()),
        (1, 5, 5),
    ),
    "transformer": (
        lambda: nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True),
        (3, 8),
    ),
    "dropout": (lambda: nn.Sequential(nn.Linear(3, 8), nn.Dropout(), nn.Tanh()), (3,)),
    "LSTM": (Both, (4, 3)),
}


# On a GPU torch calls cuDNN for bfloat16, and does not lay the weights as that wants.
@pytest.mark.filterwarnings("ignore:RNN module weights are not part of single")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", NETS)
def test_nets_in_narrow_dtypes_pass(name: str, dtype: torch.dtype) -> None:
    make, shape = NETS[name]
    model = make().to(dtype)
    ours = gradlib.per_sample_jacobian(model, points(4, *shape, dtype=dtype))
    assert ours.dtype == dtype
    assert ours.any()
    by_name = gradlib.per_sample_jacobian(
        model, points(4, *shape, dtype=dtype), argnums="parameters"
    )
    for key, parameter in model.named_parameters():
        assert by_name[key].dtype == dtype
        assert by_name[key].shape[2:][-parameter.dim() :] == parameter.shape


# Memory that is nobody else's.


class GivesItsWeight(torch.autograd.Function):
    """x · w, whose backward hands out the saved weight itself."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(weight)
        return (x * weight).sum(1)

    @staticmethod
    def backward(ctx: Any, *_grads: Tensor) -> Any:
        return ctx.saved_tensors[0], None


def memory(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


@pytest.mark.parametrize("create_graph", [True, False])
@pytest.mark.parametrize("batch", [1, 4])
def test_the_result_is_no_weight(batch: int, create_graph: bool) -> None:
    weight = points(batch, 3).requires_grad_()
    x = points(batch, 3)

    def fn(x: Tensor) -> Tensor:
        return cast(Any, GivesItsWeight.apply)(x, weight)

    for mode in ("reverse", "loop", "auto"):
        ours = gradlib.per_sample_jacobian(
            fn, x, mode=mode, create_graph=create_graph, check=False
        )
        require_close(ours.detach(), weight.detach())
        assert memory(ours) != memory(weight)


@pytest.mark.parametrize("create_graph", [True, False])
@pytest.mark.parametrize("mode", ["reverse", "forward", "loop", "auto"])
def test_the_result_shares_no_memory(mode: str, create_graph: bool) -> None:
    model = nn.Linear(3, 1, bias=False, dtype=torch.float64)
    x = points(1, 3)
    fns: list[Callable[..., Any]] = [
        model,
        lambda x: x,
        lambda x: x * model.weight,
        lambda x: (x * model.weight).sum(1),
        lambda x: x.view_as(x),
    ]
    for fn in fns:
        before = model.weight.detach().clone()
        ours = gradlib.per_sample_jacobian(fn, x, mode=mode, create_graph=create_graph)
        assert memory(ours) not in {memory(it) for it in (x, model.weight)}
        with torch.no_grad():
            ours.mul_(7)
        assert torch.equal(model.weight, before)


def test_the_result_of_tensors_that_are_there_shares_no_memory() -> None:
    weight = points(1, 3).requires_grad_()
    x = points(1, 3).requires_grad_()
    for y in (cast(Any, GivesItsWeight.apply)(x, weight), (x * weight).sum(1)):
        for create_graph in (True, False):
            ours = gradlib.per_sample_jacobian_from_graph(
                y, x, create_graph=create_graph
            )
            assert memory(ours) not in {memory(it) for it in (x, y, weight)}


def test_blocks_share_no_memory_with_each_other() -> None:
    ours = gradlib.per_sample_jacobian(
        lambda x, y: x + y, points(2, 3), points(2, 3), argnums=(0, 1)
    )
    assert memory(ours[0]) != memory(ours[1])
    assert all(it.is_contiguous() for it in ours)


@pytest.mark.parametrize("where", ["before", "after"])
@pytest.mark.parametrize(("mode", "width"), [("split", 12), ("forward", 2)])
def test_columns_where_samples_change_places(
    mode: Any, width: int, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Or a GPU takes so few rows in one pass.
    monkeypatch.setattr("gradlib.jacobian.planning.FEW", 0)
    x, into, out_of = torch.randn(4, width), torch.randn(width, 2), torch.randn(2, 12)

    def fn(x: Tensor) -> Tensor:
        h = ((x.flip(0) if where == "before" else x) @ into).tanh()
        y = (h @ out_of).tanh()
        return y if where == "before" else y.flip(0)

    # It differs by more than rounding, also where that is looked at.
    with pytest.raises(gradlib.NoSuchWayError, match="samples influence each other"):
        gradlib.per_sample_jacobian(fn, x, mode=mode, check=False)
    rows = gradlib.per_sample_jacobian(fn, x, mode="loop", check=False)
    auto = gradlib.per_sample_jacobian(fn, x, check=False)
    assert gradlib.plan_jacobian(fn, x).mode == mode
    torch.testing.assert_close(auto, rows)


@pytest.mark.parametrize("check", [True, False])
def test_a_split_at_what_has_another_axis_first(check: bool) -> None:
    encode, decode = nn.Linear(64, 2), nn.Linear(2, 64)

    def fn(x: Tensor) -> Tensor:
        h = encode(x).transpose(0, 1).contiguous()  # the steps, and then the samples
        return decode((h + h.roll(1, 0)).tanh()).transpose(0, 1)

    for samples in (3, 4, 5):
        x = torch.randn(samples, 4, 64)
        assert gradlib.plan_jacobian(fn, x).mode == "split"
        rows = gradlib.per_sample_jacobian(fn, x, mode="loop", check=False)
        torch.testing.assert_close(
            gradlib.per_sample_jacobian(fn, x, check=check), rows
        )
    with pytest.raises(gradlib.NoSuchWayError, match="another first axis"):
        gradlib.per_sample_jacobian(fn, x[:4], mode="split", check=check)


NESTED_FOR: dict[str, Any] = {
    "a function": torch.sin,
    "a layer": nn.Linear(3, 2),
    "a small net": nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2)),
    "a transformer": nn.TransformerEncoderLayer(3, 1, 4, batch_first=True),
}


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("fn", NESTED_FOR.values(), ids=NESTED_FOR.keys())
def test_a_nested_tensor_of_strided_parts(fn: Any) -> None:
    x = torch.nested.nested_tensor([torch.randn(2, 3), torch.randn(4, 3)])
    with pytest.raises(gradlib.JacobianArgumentError, match="is a nested tensor"):
        gradlib.per_sample_jacobian(fn, x)


class Shrinks(nn.Linear):
    """Writes to its weight at each call."""

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 (torch's name)
        with torch.no_grad():
            self.weight.mul_(0.5)
        return super().forward(input).sin()


def test_a_weight_that_each_call_overwrites_is_as_it_was_for_the_next() -> None:
    model, x = Shrinks(3, 2).double(), points(4, 3)
    before = model.weight.detach().clone()
    ours = gradlib.per_sample_jacobian(model, x)
    halved = nn.Linear(3, 2).double()
    halved.load_state_dict({"weight": before / 2, "bias": model.bias.detach()})
    require_close(ours, alone(lambda x: halved(x).sin(), x))


@pytest.mark.cpu  # a GPU forgets the padding, and that is said
def test_means_that_are_right_are_not_named() -> None:
    images = points(3, 2, 4, 4).to(memory_format=torch.channels_last)

    def fn(x: Tensor) -> Tensor:
        means = F.avg_pool2d(x.to(memory_format=torch.channels_last), 2, padding=1)
        return means * x.detach().sum((1, 2, 3), keepdim=True)

    with pytest.raises(DetachedPathError, match="Something cuts a path") as caught:
        gradlib.per_sample_jacobian(fn, images)
    assert "padding" not in str(caught.value)


@pytest.mark.cpu  # with other draws, as of a GPU, another step may leave its domain
def test_a_cut_path_where_a_function_ends_is_in_doubt() -> None:
    x = torch.full((2, 3), 0.9999, dtype=torch.float64)
    with pytest.warns(UserWarning, match="cannot tell whether output changes"):
        gradlib.per_sample_jacobian(lambda x: (2 * x - x.detach()).asin(), x)


def test_a_constant_beside_a_jump_has_no_slope() -> None:
    """There autograd follows nothing."""

    def fn(x: Tensor) -> Tensor:
        return 2 * x if x.max() <= 0 else torch.zeros_like(x)

    x = torch.zeros(3, 1, dtype=torch.float64)
    require_close(gradlib.per_sample_jacobian(fn, x), alone(fn, x))


def test_a_constant_may_be_written_into_memory_of_ones_own() -> None:
    factor, memory = torch.randn(3), torch.zeros(3)

    def fn(x: Tensor) -> Tensor:
        torch.mul(factor, 2, out=memory.zero_())
        return x.sin() * memory

    x = points(4, 3, dtype=torch.float32)
    require_close(gradlib.per_sample_jacobian(fn, x), alone(fn, x), 1e-6)
    assert torch.equal(memory, 2 * factor)
    with pytest.raises(DetachedPathError):
        gradlib.per_sample_jacobian(lambda x: fn(x) + x.detach() * memory, x)


def test_a_folder_of_ones_own_may_be_called_torch() -> None:
    space: dict[str, Any] = {}
    code = "def fn(x):\n    return x * x.detach()"
    exec(compile(code, "/somebody/torch/gradlib/jacobian/own.py", "exec"), space)
    with pytest.raises(DetachedPathError, match=r"\.detach\(\) in own\.py:2"):
        gradlib.per_sample_jacobian(space["fn"], points(4, 3))


class TimeFirst(nn.Module):
    """A recurrent net that has the time before the batch, with a narrow middle."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn, self.out = nn.LSTM(60, 4), nn.Linear(4, 40)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.rnn(x.transpose(0, 1))[0]).transpose(0, 1).flatten(1)


@pytest.mark.parametrize("scale", [1, 0.1, 1e-4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("check", [True, False])
def test_an_axis_as_long_as_the_batch_is_not_taken_for_it(
    scale: float, dtype: torch.dtype, check: bool
) -> None:
    net, x = TimeFirst().to(dtype), torch.randn(6, 6, 60, dtype=dtype)
    with torch.no_grad():
        for it in net.parameters():
            it.mul_(scale)
    expected = gradlib.per_sample_jacobian(net, x, mode="loop")
    found = gradlib.per_sample_jacobian(net, x, check=check)
    largest = expected.abs().max().item()
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4 * largest)
    with pytest.raises(gradlib.NoSuchWayError, match="another first axis"):
        gradlib.per_sample_jacobian(net, x, mode="split", check=check)
