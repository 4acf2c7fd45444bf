"""A call changes what one forward changes, once, and a plan changes nothing."""

import gc
import random
import weakref
from collections.abc import Callable, Iterator
from functools import partial
from itertools import pairwise
from typing import Any, cast

import numpy
import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.parametrizations import spectral_norm
from torch.testing import assert_close

import gradlib
from gradlib import CoupledSamplesError, JacobianArgumentError

from .four_samples import diagonal
from .four_samples import x as x  # a fixture
from .samples_alone import MODES, smooth_net


@pytest.mark.parametrize("argnums", [0, "parameters"])
@pytest.mark.parametrize("mode", MODES)
def test_forwards(mode: str, argnums: int | str) -> None:
    calls: list[int] = []

    class Counted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = smooth_net(3, 2, 4)

        def forward(self, x: Tensor) -> Tensor:
            calls.append(len(x))
            return self.inner(x)

    model, x = Counted(), torch.randn(4, 3, dtype=torch.float64)
    if (mode, argnums) == ("split", "parameters"):
        return
    gradlib.per_sample_jacobian(model, x, mode=mode, argnums=argnums, check=False)
    assert calls == [4]
    calls.clear()
    gradlib.per_sample_jacobian(model, x, mode=mode, argnums=argnums, check=True)
    assert calls == [4, 4, 4]
    calls.clear()
    gradlib.plan_jacobian(model, x, mode=mode, argnums=argnums)
    assert calls == [4]


@pytest.mark.parametrize("check", [False, True])
@pytest.mark.parametrize("mode", MODES)
def test_nothing_of_a_call_stays(mode: str, check: bool) -> None:
    narrow = nn.Linear(4, 1).double()
    made: list[weakref.ref[Tensor]] = []

    def fn(x: Tensor) -> Tensor:
        y = narrow(x).cumsum(1).expand(-1, 3).tanh()
        made.append(weakref.ref(y))
        return y

    gc.collect()
    gc.disable()  # which finds what refers to itself, sooner or later
    try:
        x = torch.randn(5, 4, dtype=torch.float64)
        gradlib.per_sample_jacobian(fn, x, mode=mode, check=check)
        assert made
        assert not any(it() is not None for it in made)
    finally:
        gc.enable()


class Everything(nn.Module):
    """What a call changes: statistics, random states, attributes."""

    def __init__(self) -> None:
        super().__init__()
        self.first = spectral_norm(nn.Linear(3, 4))
        self.norm = nn.BatchNorm1d(4)
        self.drop = nn.Dropout(0.5)
        self.last = nn.Linear(4, 2)
        self.register_buffer("total", torch.zeros(()))
        self.calls = 0
        self.seen: list[float] = []
        self.total: Tensor

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.seen.append(float(self.calls))
        self.total += 1
        return self.last(self.drop(self.norm(self.first(x)).tanh()))


def everything(*, train: bool) -> Everything:
    torch.manual_seed(0)
    model = Everything()
    model(torch.randn(8, 3)).sum().backward()  # statistics and .grad
    model.train(train)
    model.drop.train()
    model.first.register_forward_hook(lambda *_: None)
    model.last.register_full_backward_pre_hook(lambda *_: None)
    return model


def seeds(number: int) -> None:
    torch.manual_seed(number)
    random.seed(number)
    numpy.random.seed(number)


def values(model: nn.Module) -> list[Any]:
    """Return all that two models made alike have in common, and the random states."""
    found: list[Any] = []
    for tensor in (*model.parameters(), *model.buffers()):
        found += [tensor.detach().clone(), tensor.requires_grad]
        found.append(None if tensor.grad is None else tensor.grad.clone())
    for module in model.modules():
        found += [module.training, list(vars(module))]
        found += [
            value[:] if isinstance(value, list) else value
            for name, value in vars(module).items()
            if not name.startswith("_") and not callable(value)
        ]
    numpys: Any = numpy.random.get_state()
    return [*found, torch.get_rng_state(), random.getstate(), *map(str, numpys)]


def identities(model: nn.Module) -> list[Any]:
    """Return which objects a model consists of: tensors, gradients, hooks."""
    tensors = [*model.parameters(), *model.buffers()]
    found: list[Any] = [id(it) for it in tensors] + [id(it.grad) for it in tensors]
    for module in model.modules():
        for name, value in vars(module).items():
            found.append((name, id(value)) if isinstance(value, dict) else name)
            if isinstance(value, dict):
                found.append([(key, id(it)) for key, it in value.items()])
    return found


def same(one: list[Any], other: list[Any]) -> bool:
    return len(one) == len(other) and all(
        torch.equal(a, b) if isinstance(a, Tensor) and isinstance(b, Tensor) else a == b
        for a, b in zip(one, other, strict=True)
    )


@pytest.fixture
def _random_states_kept() -> Iterator[None]:
    states = random.getstate(), numpy.random.get_state()
    yield
    random.setstate(states[0])
    numpy.random.set_state(states[1])


@pytest.mark.usefixtures("_random_states_kept")
@pytest.mark.parametrize("argnums", [0, "parameters"])
@pytest.mark.parametrize("check", [True, False])
@pytest.mark.parametrize("mode", MODES)
def test_the_model_is_left_as_one_forward_leaves_it(
    mode: str, check: bool, argnums: int | str
) -> None:
    if (mode, argnums) == ("split", "parameters"):
        return
    model, other = everything(train=False), everything(train=False)
    x = torch.randn(5, 3)
    before = identities(model)
    seeds(1)
    gradlib.per_sample_jacobian(model, x, mode=mode, check=check, argnums=argnums)
    after = values(model)
    assert identities(model) == before
    seeds(1)
    other(x)
    assert same(after, values(other))
    assert model.calls == other.calls == 2


@pytest.mark.usefixtures("_random_states_kept")
def test_a_plan_changes_nothing() -> None:
    model, x = everything(train=True), torch.randn(5, 3)
    seeds(1)
    before = values(model), identities(model)
    gradlib.plan_jacobian(model, x)
    gradlib.plan_jacobian(model, x, argnums="parameters")
    assert same(values(model), before[0])
    assert identities(model) == before[1]


def test_a_plan_names_some_of_many_outputs() -> None:
    def fn(x: Tensor) -> list[Tensor]:
        return [x.sin()[:, :size] for size in range(1, 6)]

    shown = str(gradlib.plan_jacobian(fn, torch.randn(4, 6)))
    assert "[4, 1, 6], [4, 2, 6], [4, 3, 6] and 2 more" in " ".join(shown.split())


@pytest.mark.parametrize("check", [True, False])
def test_running_statistics_change_once(check: bool) -> None:
    model, once = nn.BatchNorm1d(3), nn.BatchNorm1d(3)
    x = torch.randn(5, 3)
    if check:
        with pytest.raises(CoupledSamplesError):
            gradlib.per_sample_jacobian(model, x)
    else:
        gradlib.per_sample_jacobian(model, x, check=False)
    once(x)
    assert model.num_batches_tracked == 1
    for ours, theirs in zip(model.buffers(), once.buffers(), strict=True):
        assert torch.equal(ours, theirs)


def test_inputs_are_left_as_they_were() -> None:
    x = torch.randn(3, 2, requires_grad=True)
    x.sin().sum().backward()
    before, grad = x.detach().clone(), x.grad
    ours = gradlib.per_sample_jacobian(lambda x: x.mul_(2).sin(), x)
    assert torch.equal(x, before)
    assert x.grad is grad
    assert x.requires_grad
    assert x.is_leaf
    assert not ours.requires_grad


class _Cache:
    def __init__(self) -> None:
        self.kept: list[Tensor] = []


def test_caches_that_a_function_is_given(x: Tensor) -> None:
    def noting(x: Tensor, *caches: Any) -> Tensor:
        for cache in caches:
            if isinstance(cache, dict):
                cache["x"] = x
            else:
                getattr(cache, "kept", cache).append(x)
        return x.cumsum(1)

    by_name, listed, own = dict[str, Tensor](), list[Tensor](), _Cache()
    gradlib.per_sample_jacobian(noting, x.float(), by_name, listed, own)
    assert not by_name  # it got copies
    assert not listed
    assert [it.dtype for it in own.kept][:2] == [torch.float32, torch.float64]
    own = _Cache()
    gradlib.per_sample_jacobian(noting, x.float(), own, check=False)
    assert [it.dtype for it in own.kept] == [torch.float32]


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
def test_inside_no_grad(context: Callable[[], Any]) -> None:
    model = smooth_net(3, 2, 4)
    x = torch.randn(4, 3, dtype=torch.float64)
    reference = gradlib.per_sample_jacobian(model, x)
    with context():
        torch.testing.assert_close(gradlib.per_sample_jacobian(model, x), reference)
        found = gradlib.per_sample_jacobian(model, x.clone())
        torch.testing.assert_close(found, reference)
        assert not found.is_inference()


Function = Callable[[Tensor], Tensor]


class Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 2).double()
        self.calls: Tensor
        self.register_buffer("calls", torch.zeros(()))

    def encode(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.linear(x).tanh()


def ensemble(members: list[Counting]) -> Function:
    return lambda x: torch.stack([it.encode(x) for it in members], 1)


def by_name(members: dict[str, Counting]) -> Function:
    return lambda x: torch.stack([it.encode(x) for it in members.values()], 1)


METHODS: dict[str, Callable[[Counting], Function]] = {
    "method": lambda model: model.encode,
    "lambda": lambda model: lambda x: model.encode(x),
    "partial": lambda model: partial(model.encode),
    "partial of a function": lambda model: partial(Counting.encode, model),
    "partial of a lambda": lambda model: partial(lambda x: model.encode(x)),
    "member of a list": lambda model: ensemble([model]),
    "member of a dict": lambda model: by_name({"a": model}),
}


@pytest.mark.parametrize("how", METHODS)
def test_a_method_changes_its_module_once(x: Tensor, how: str) -> None:
    model = Counting()
    encode = METHODS[how](model)
    gradlib.plan_jacobian(encode, x)
    assert model.calls == 0
    gradlib.per_sample_jacobian(encode, x)
    assert model.calls == 1


class Rebuilds(nn.Module):
    """Makes a layer anew at each call, takes the next of several, and sets hooks."""

    def __init__(self) -> None:
        super().__init__()
        self.norm: nn.Module = nn.Identity()
        self.pool = nn.ModuleList([nn.Tanh(), nn.Tanh(), nn.Tanh()])
        self.now: nn.Module = self.pool[2]
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.norm = nn.LayerNorm(x.shape[-1], device=x.device)
        self.norm.to(torch.float32)
        self.now = self.pool[self.calls]
        self.calls += 1
        self.register_full_backward_hook(lambda *_: None)
        return self.now(self.norm(x.float()).to(x))


@pytest.mark.parametrize("check", [True, False])
def test_children_and_hooks_that_a_call_sets_are_those_of_one(
    x: Tensor, check: bool
) -> None:
    model = Rebuilds()
    gradlib.plan_jacobian(model, x)
    assert (type(model.norm), model.now, model.calls) == (nn.Identity, model.pool[2], 0)
    assert not model._backward_hooks
    gradlib.per_sample_jacobian(model, x, check=check)
    assert (model.now, model.calls) == (model.pool[0], 1)
    assert (len(model._backward_hooks), len(model._modules)) == (1, 3)
    assert cast(Any, model.norm).weight.dtype == torch.float32


class Slotted(nn.Module):
    """Keeps what it counts in slots."""

    __slots__ = ("calls", "log", "seen")

    def __init__(self) -> None:
        super().__init__()
        self.calls, self.seen = 0, torch.zeros(())
        self.log: list[int] = []

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.log.append(len(x))
        self.seen += 1
        return x.sin()


@pytest.mark.parametrize("check", [True, False])
def test_slots_are_those_of_one_call(x: Tensor, check: bool) -> None:
    model = Slotted()
    gradlib.plan_jacobian(model, x)
    assert (model.calls, model.log, model.seen) == (0, [], 0)
    gradlib.per_sample_jacobian(model, x, check=check)
    assert (model.calls, model.log, model.seen) == (1, [len(x)], 1)


@pytest.mark.parametrize("inside", [False, True])
def test_a_script_changes_its_buffers_once(x: Tensor, inside: bool) -> None:
    class Script(Counting):
        def forward(self, x: Tensor) -> Tensor:
            return self.encode(x)

    script: Any = torch.jit.script(Script())
    model = nn.Sequential(script, nn.Tanh()) if inside else script
    gradlib.plan_jacobian(model, x)
    assert script.calls == 0
    gradlib.per_sample_jacobian(model, x)
    assert script.calls == 1


def test_a_function_with_a_name_that_is_nowhere_yet(x: Tensor) -> None:
    def fn(x: Tensor) -> Tensor:
        return x.sin() if x.dim() else later(x)

    found = gradlib.per_sample_jacobian(fn, x)
    later = fn
    assert torch.equal(found, gradlib.per_sample_jacobian(later, x))


@pytest.mark.parametrize("widths", [(3, 5, 4, 2), (3, 3, 3, 3, 3, 3, 3)])
def test_modules_that_a_function_makes_are_its_own(widths: tuple[int, ...]) -> None:
    """Gone after each call, as the ids of their parameters, which others have then."""

    def fn(x: Tensor) -> Tensor:
        torch.manual_seed(0)
        for before, after in pairwise(widths):
            x = nn.Linear(before, after, dtype=torch.double)(x).tanh()
        return x

    x = torch.linspace(-1, 1, 24, dtype=torch.double).view(8, 3)
    for _ in range(4):
        found = gradlib.per_sample_jacobian(fn, x)
        assert_close(
            found, gradlib.per_sample_jacobian(fn, x, mode="loop", check=False)
        )


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
