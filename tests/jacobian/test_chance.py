"""Chance that is torch's is drawn once, and any other is named."""

import random
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import numpy
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.parametrizations import spectral_norm

import gradlib
from gradlib import DetachedPathError, NotRepeatableError

from .four_samples import x as x  # a fixture
from .points import points, require_close

Function = Callable[[Tensor], Tensor]


@pytest.fixture(autouse=True)
def _seeded() -> Iterator[None]:
    states = random.getstate(), numpy.random.get_state()
    yield
    random.setstate(states[0])
    numpy.random.set_state(states[1])


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


class Rarely:
    """Draws another way in some of its calls only, and counts them all."""

    def __init__(self, *rare: int) -> None:
        self.rare, self.calls = rare, -1

    def __call__(self) -> bool:
        self.calls += 1
        return self.calls in self.rare


def scales(draw: Rarely) -> Function:
    return lambda x: x.sin() * (2 if draw() else 1)


def skips_a_layer(draw: Rarely) -> Function:
    layer = nn.Linear(3, 3).double()
    return lambda x: x.sin() + (0 if draw() else layer.to(x)(x).tanh())


def decodes(draw: Rarely) -> Function:
    """Feeds back its own output in a step, as scheduled sampling does."""
    cell = nn.GRUCell(1, 3)

    def fn(x: Tensor) -> Tensor:
        h = x.sin()
        cell.to(x)
        for step in range(3):
            fed = h[:, :1] if step == 1 and draw() else x[:, step : step + 1]
            h = cell(fed, h)
        return h

    return fn


@pytest.mark.filterwarnings("error:check=True cannot tell")
@pytest.mark.parametrize("rare", [(0,), (1,), (2,), (1, 2), (1, 3), (2, 4), (0, 2, 3)])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("make", [scales, skips_a_layer, decodes])
def test_chance_of_few_calls(
    make: Callable[[Rarely], Function], dtype: torch.dtype, rare: tuple[int, ...]
) -> None:
    """Neither is it a cut path, nor may one lucky look hide it."""
    torch.manual_seed(0)
    with pytest.raises(NotRepeatableError):
        gradlib.per_sample_jacobian(make(Rarely(*rare)), points(4, 3, dtype=dtype))


def test_chance_of_a_half_is_named_wherever_it_was_met() -> None:
    drawn: list[float] = []

    def fn(x: Tensor) -> Tensor:
        drawn.append(random.choice([1.0, 2.0]))
        return x.sin() * drawn[-1]

    for seed in range(20):
        drawn.clear()
        random.seed(seed)
        torch.manual_seed(seed)
        with suppress(NotRepeatableError):
            gradlib.per_sample_jacobian(fn, points(4, 3))
            assert drawn == [drawn[0]] * 3


class Words(nn.Module):
    def __init__(self, draw: Rarely) -> None:
        super().__init__()
        self.table, self.last = nn.Embedding(9, 4), nn.Linear(4, 2)
        # Not a module's own attribute, which each call would find as it was.
        self.draw = draw.__call__

    def forward(self, tokens: Tensor) -> Tensor:
        return self.last(self.table(tokens).mean(1)) * (2 if self.draw() else 1)


@pytest.mark.parametrize("rare", [(1,), (2,), (4,)])
def test_chance_does_not_couple_samples(rare: tuple[int, ...]) -> None:
    tokens = torch.arange(12).view(4, 3) % 9
    with pytest.raises(NotRepeatableError):
        gradlib.per_sample_jacobian(Words(Rarely(*rare)), tokens, argnums="parameters")


def test_chance_that_becomes_an_integer_is_no_cast_of_the_input() -> None:
    calls: list[float] = []

    def fn(x: Tensor) -> Tensor:
        calls.append(0.7)
        return x.sin() * torch.tensor(sum(calls)).long()

    with pytest.raises(NotRepeatableError):
        gradlib.per_sample_jacobian(fn, points(4, 3))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_other_outputs_in_each_call(dtype: torch.dtype) -> None:
    calls: list[int] = []

    def fn(x: Tensor) -> Tensor:
        calls.append(1)
        return torch.cat([x.sin()] * len(calls), 1)

    said = r"returned \S+ \[4, 3\] at first, and \S+ \[4, \d+\] when"
    with pytest.raises(NotRepeatableError, match=said):
        gradlib.per_sample_jacobian(fn, points(4, 3, dtype=dtype))


def other_numbers(graph: Any, _: object) -> Function:
    """Compile so that other numbers are drawn than by what is compiled."""

    def compiled(*given: Any) -> Any:
        torch.rand(())
        return graph(*given)

    return compiled


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # which Dynamo looks at
def test_torchs_chance_that_the_check_does_not_meet_again_is_named() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 8), nn.Dropout(), nn.Softplus()).double()
    compiled: Any = torch.compile(model, backend=other_numbers)
    with pytest.raises(NotRepeatableError, match=r"torch\.compile .*model\._orig_mod"):
        gradlib.per_sample_jacobian(compiled, points(4, 3))
    gradlib.per_sample_jacobian(compiled._orig_mod, points(4, 3))
    lazy = nn.Sequential(nn.LazyLinear(8), nn.Dropout(), nn.Softplus()).double()
    with pytest.raises(NotRepeatableError, match=r"lazy .* call fn once before"):
        gradlib.per_sample_jacobian(lazy, points(4, 3))
    gradlib.per_sample_jacobian(lazy, points(4, 3))


class Averages(nn.Module):
    """Follows what it has seen before."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(3))

    def forward(self, x: Tensor) -> Tensor:
        self.mean = 0.9 * self.mean + 0.1
        return x.sin() * self.mean


class Initialises(nn.Module):
    """Looks at the first batch that it meets, and keeps what it saw."""

    def __init__(self) -> None:
        super().__init__()
        self.mean: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.mean is None:
            self.mean = x.detach().mean(0)
        return (x - self.mean.to(x)).sin()


FOLLOWING: dict[str, Callable[[], nn.Module]] = {
    "a mean of all calls": Averages,
    "the first batch": Initialises,
    "a power iteration": lambda: spectral_norm(nn.Linear(3, 3)),
    "a power iteration that is nearly done": lambda: settled(
        spectral_norm(nn.Linear(3, 3))
    ),
    "a generator of its own": lambda: Noisy(),
    "dropout": lambda: nn.Sequential(nn.Linear(3, 3), nn.Dropout(0.5), nn.Tanh()),
}


def settled(module: nn.Module) -> nn.Module:
    for _ in range(6):
        module(torch.randn(2, 3))
    return module


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", FOLLOWING)
def test_what_a_module_keeps_is_no_chance(name: str, dtype: torch.dtype) -> None:
    """Neither where kinks at the point itself leave doubt."""
    torch.manual_seed(0)
    model = FOLLOWING[name]().to(dtype)
    x = points(4, 3, dtype=dtype)
    x[0, 0] = x[2] = 0
    ours = gradlib.per_sample_jacobian(lambda x: model(x) + x.relu(), x)
    assert ours.isfinite().all()


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


class Noisy(nn.Module):
    """Draws from a generator of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = torch.Generator("cpu").manual_seed(3)

    def forward(self, x: Tensor) -> Tensor:
        noise = torch.rand(x.shape, generator=self.generator, device="cpu").to(x)
        return (x * noise).sin()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("mode", ["auto", "loop", "forward"])
def test_a_generator_of_its_own_draws_once(
    x: Tensor, mode: str, dtype: torch.dtype
) -> None:
    model, once = Noisy(), Noisy()
    x = x.to(dtype)
    gradlib.plan_jacobian(model, x)
    found = gradlib.per_sample_jacobian(model, x, mode=mode)
    given = x.clone().requires_grad_()
    [grad] = torch.autograd.grad(once(given).sum(), given)
    assert torch.allclose(found.sum(1), grad, 0.02)
    assert torch.equal(model.generator.get_state(), once.generator.get_state())


def test_a_generator_of_its_own_hides_no_cut_path(x: Tensor) -> None:
    model = Noisy()
    with pytest.raises(DetachedPathError):
        gradlib.per_sample_jacobian(lambda x: model(x) * x.detach(), x)


def seeded(x: Tensor) -> Tensor:
    torch.manual_seed(5)
    return x * torch.randn(3)


@pytest.mark.parametrize("check", [True, False])
@pytest.mark.parametrize("mode", ["auto", "loop", "forward", "split"])
@pytest.mark.parametrize("fn", [seeded, F.dropout], ids=["seeded", "dropout"])
def test_random_state_is_left_as_one_call_leaves_it(
    x: Tensor, fn: Function, mode: str, check: bool
) -> None:
    torch.manual_seed(2)
    fn(x)
    expected = torch.get_rng_state()
    torch.manual_seed(2)
    gradlib.per_sample_jacobian(fn, x, mode=mode, check=check)
    assert torch.equal(torch.get_rng_state(), expected)


def test_the_default_generator_by_name_is_replayed(x: Tensor) -> None:
    generator, calls = torch.default_generator, list[int]()

    def fn(x: Tensor) -> Tensor:
        calls.append(1)
        how: dict[str, Any] = {"dtype": torch.float64, "device": "cpu"}
        noise = torch.rand(x.shape, **how)
        return x * (noise * torch.rand(x.shape, generator=generator, **how)).to(x)

    before = generator.get_state()
    found = gradlib.per_sample_jacobian(fn, x)
    after = generator.get_state()
    assert len(calls) == 3  # no second look
    generator.set_state(before)
    assert torch.equal(found.sum(1), fn(torch.ones_like(x)))
    assert torch.equal(generator.get_state(), after)
