"""A replay leaves a module's state unchanged, and runs hooks as they ran."""

from collections.abc import Callable
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import dropout
from torch.nn.modules.lazy import LazyModuleMixin
from torch.nn.utils import parametrizations, parametrize
from torch.utils.checkpoint import checkpoint

import gradlib
from gradlib.recording.past_state import PastState

from .replayed import assert_replays, assert_unchanged, everything, loss_of, replays


def test_modules_of_one_class_of_which_one_has_more() -> None:
    model: Any = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    model[1].scale = 2.0
    model[1].register_forward_hook(lambda module, _, output: module.scale * output)
    recording = replays(model, torch.randn(4, 3, requires_grad=True))
    model[1].scale = 3.0
    assert_replays(recording, model)


class Scaled(nn.Linear):
    """Scales its input and result in ``__call__``, where hooks do not see it."""

    def __call__(self, x: Tensor) -> Tensor:
        return 3 * super().__call__(2 * x) + 1


def test_a_class_with_a_call_of_its_own() -> None:
    model = nn.Sequential(Scaled(3, 2), nn.Tanh())
    recording = replays(model, torch.randn(4, 3, requires_grad=True))
    assert_replays(recording, model)
    assert recording.verify().ok


def test_what_a_module_keeps_in_attributes_stays() -> None:
    class Counts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.calls, self.last = 0, torch.zeros(1)

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            self.last = 2 * x
            self.fresh = 3
            self.register_buffer("new", torch.ones(1))
            return self.last

    model = Counts()
    with gradlib.record(model) as recording:
        model(torch.ones(1, requires_grad=True)).backward()
    last, call = model.last, recording[""]
    del model.new, model.fresh
    call.replay()
    assert model.calls == 1
    assert model.last is last
    assert not hasattr(model, "new")
    assert not hasattr(model, "fresh")


class Keeps(nn.Module):
    """Changes its state in place, of which another module shares a part."""

    def __init__(self, shared: list[Tensor]) -> None:
        super().__init__()
        self.inner = nn.Linear(3, 3)
        self.count, self.memory = torch.zeros(1), torch.zeros(3)
        self.shared = shared
        self.nested = {"seen": [set[int]()], "pair": (torch.zeros(1), [0])}
        self.weights = [self.inner.weight]

    def forward(self, x: Tensor) -> Tensor:
        y = self.inner(x)
        self.count += 1
        self.memory *= 0.5  # leads back to earlier calls
        self.memory += y.sum(0)
        self.shared.append(y.mean())
        seen: Any = self.nested
        seen["seen"][0].add(len(self.shared))
        seen["pair"][0].add_(1)
        seen["pair"][1][0] += 1
        return y + self.memory.detach() - self.memory.detach() + self.weights[0].sum()


class Sums(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.losses: list[Tensor] = []
        self.first, self.second = Keeps(self.losses), Keeps(self.losses)

    def forward(self, x: Tensor) -> Tensor:
        self.losses.clear()
        y = self.second(self.first(x))
        assert len(self.losses) == 2
        return y.sum() + torch.stack(self.losses).sum()


def test_what_is_changed_in_attributes_stays() -> None:
    def kept(module: Any) -> list[tuple[int, str]]:
        held = (module.count, module.memory, module.shared, module.nested)
        return [(id(it), str(it)) for it in held]

    torch.manual_seed(0)
    model = Sums()
    with gradlib.record(model) as recording:
        for _ in range(2):
            model(torch.randn(2, 3)).backward()
    before = kept(model.first), kept(model.second)
    for name in ("", "first", "second"):
        recording[name, 1].replay()
    recording.verify(numerical=True)
    assert (kept(model.first), kept(model.second)) == before
    assert model.losses is model.first.shared


class Holds(nn.Module):
    """Uses its modules and tensors through attributes."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, 3))
        self.register_buffer("shift", torch.zeros(3))
        self.scale = torch.randn(3, requires_grad=True)
        self.table = {"rows": torch.randn(3, 3)}
        self.held = [self.weight, self.shift]

    def forward(self, x: Tensor) -> Tensor:
        self.held[1] += 1
        return x @ self.table["rows"] @ self.held[0] * self.scale + self.shift


def test_attributes_lead_to_parameters_buffers_and_tensors() -> None:
    torch.manual_seed(0)
    model: Any = nn.Sequential(Holds(), Holds())
    with gradlib.record(model) as recording:
        for _ in range(2):
            loss_of(model(torch.randn(2, 3))).backward()
            with torch.no_grad():
                model[0].weight.mul_(2)
        assert_replays(recording, model)
    assert recording.verify(numerical=True).agreed == 6
    model[0].weight.requires_grad_(False)
    with gradlib.record(model[0]) as recording:
        loss_of(model[0](torch.randn(2, 3))).backward()
    recording[""].replay()


def test_own_hooks_run_as_they_did() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2))
    model[0].register_forward_pre_hook(lambda _m, args: (args[0] * 2,))
    model[0].register_forward_hook(lambda _m, _args, output: cast(Tensor, output) * 3)
    model[1].register_full_backward_hook(lambda _m, grads, _out: (grads[0] * 5,))
    model[1].register_full_backward_pre_hook(lambda _m, grads: (grads[0] * 7,))
    x = torch.randn(2, 3, requires_grad=True)
    with gradlib.record(model) as recording:
        loss_of(model(x)).backward()
    assert_replays(recording, model)


def test_a_module_that_calls_one_it_does_not_contain() -> None:
    class Caller(nn.Module):
        def __init__(self, other: nn.Module) -> None:
            super().__init__()
            self.others = [other]

        def forward(self, x: Tensor) -> Tensor:
            return self.others[0](x)

    other = nn.Linear(3, 3)
    model = nn.Sequential(other, Caller(other))
    with gradlib.record(model) as recording:
        loss_of(model(torch.randn(2, 3))).backward()
        with torch.no_grad():
            other.weight.zero_()
        assert_replays(recording, model)
        assert len(recording) == 4


@pytest.mark.parametrize("by", ["hook", "forward"])
def test_a_layer_of_torch_that_was_made_to_call_one_it_does_not_contain(
    by: str,
) -> None:
    other, layer = nn.Linear(3, 3), nn.Sequential(nn.Tanh())
    if by == "hook":
        layer[0].register_forward_hook(lambda _module, _args, output: other(output))
    else:
        vars(layer[0])["forward"] = lambda x: other(x.tanh())
    model = nn.ModuleDict({"other": other, "layer": layer})
    with gradlib.record(model) as recording:
        loss_of(layer(torch.randn(2, 3, requires_grad=True))).backward()
    with torch.no_grad():
        other.weight.zero_()
    assert_replays(recording, model)


def test_a_lazy_module() -> None:
    model = nn.Sequential(nn.LazyLinear(4), nn.Tanh())
    with gradlib.record(model) as recording:
        for _ in range(2):
            loss_of(model(torch.randn(2, 3, requires_grad=True))).backward()
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.mul_(2)
    assert_replays(recording, model)


def test_a_lazy_module_with_hooks_of_others() -> None:
    lazy = nn.LazyLinear(4)
    lazy.register_forward_pre_hook(lambda _, args: (2 * args[0],))
    model = nn.Sequential(lazy, nn.Tanh())
    with gradlib.record(model) as recording:
        loss_of(model(torch.randn(2, 3, requires_grad=True))).backward()
    assert_replays(recording, model)


def test_a_hook_that_draws_after_the_weights_of_a_lazy_module() -> None:
    lazy = nn.LazyLinear(4)
    lazy.register_forward_pre_hook(lambda _, args: (args[0] + torch.rand(2, 3),))
    model = nn.Sequential(lazy, nn.Tanh())
    with gradlib.record(model) as recording:
        loss_of(model(torch.randn(2, 3, requires_grad=True))).backward()
    assert_replays(recording, model)


LazyModule: Any = LazyModuleMixin  # its stubs know no module


class LazyNoise(LazyModule, nn.Module):
    """Draws its weight, and a number, in its first call."""

    def __init__(self) -> None:
        super().__init__()
        self.weight: Any = nn.UninitializedParameter()
        self.shift: Any
        self.register_buffer("shift", nn.UninitializedBuffer())
        self.level = 0.0

    def initialize_parameters(self, x: Tensor) -> None:
        if self.has_uninitialized_params():
            self.weight.materialize(x.shape[1:])
            nn.init.normal_(self.weight)
            self.shift.materialize(x.shape[1:])
            nn.init.normal_(self.shift)
            self.level = torch.rand(()).item()

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight + self.shift + self.level * torch.rand_like(x)


@pytest.mark.parametrize("make", [lambda: nn.LazyLinear(4), LazyNoise])
def test_what_is_drawn_after_the_weights_of_a_lazy_module(
    make: Callable[[], nn.Module],
) -> None:
    model = nn.Sequential(make(), nn.Dropout(0.5), nn.Sequential(make(), nn.Dropout()))
    with gradlib.record(model) as recording:
        for _ in range(2):
            loss_of(model(torch.randn(5, 3, requires_grad=True))).backward()
    before = {name: it.clone() for name, it in model.state_dict().items()}
    classes = [*map(type, model.modules())]
    assert_replays(recording, model)
    assert recording.verify(numerical=True).ok
    assert [*map(type, model.modules())] == classes
    assert all(it.equal(before[name]) for name, it in model.state_dict().items())


class LazyShift(LazyModule, nn.Module):
    """Draws a buffer in its first call, and has no parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.shift: Any
        self.register_buffer("shift", nn.UninitializedBuffer())

    def initialize_parameters(self, x: Tensor) -> None:
        if self.has_uninitialized_params():
            self.shift.materialize(x.shape[1:])
            nn.init.normal_(self.shift)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.shift * torch.rand_like(x)


class LazyGain(LazyModule, nn.Module):
    """Writes to its weight where gradients must be disabled for that."""

    def __init__(self) -> None:
        super().__init__()
        self.weight: Any = nn.UninitializedParameter()

    def initialize_parameters(self, x: Tensor) -> None:
        if self.has_uninitialized_params():
            self.weight.materialize(x.shape[1:])
            self.weight.normal_()

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight


def test_a_lazy_module_whose_weights_a_checkpoint_made() -> None:
    """A reentrant one disables gradients at first."""
    model = nn.Sequential(LazyGain(), nn.Tanh())
    x = torch.randn(5, 3, requires_grad=True)
    with gradlib.record(model) as recording:
        loss_of(checkpoint(model, x, use_reentrant=True)).backward()
    verified = recording.verify()
    assert verified.agreed == len(recording)


def test_a_lazy_module_that_is_called_twice_in_its_first_forward() -> None:
    shift = LazyShift()
    model = nn.Sequential(shift, nn.Sequential(shift, nn.Dropout(0.5)))
    with gradlib.record(model) as recording:
        for _ in range(2):
            loss_of(model(torch.randn(5, 3, requires_grad=True))).backward()
    assert_replays(recording, model)
    assert recording.verify().agreed == len(recording)


def test_a_class_that_changes_after_the_call() -> None:
    model = nn.Sequential(parametrizations.weight_norm(nn.Linear(3, 3)), nn.Tanh())
    with gradlib.record(model) as recording:
        for _ in range(2):
            model(torch.randn(2, 3)).sum().backward()
            if parametrize.is_parametrized(model[0]):
                parametrize.remove_parametrizations(model[0], "weight")
    assert recording["0", 1].replay().param_grads["weight"] is not None
    assert recording["1", 0].replay().grad_output is not None
    for name in ("", "0"):
        with pytest.raises(
            gradlib.CannotReplayError,
            match="was a ParametrizedLinear then and is a Linear now",
        ):
            recording[name, 0].replay()


class Twice(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * x


class Elsewhere(nn.Module):
    """A module that uses another one of the model, which it does not contain."""

    def __init__(self, other: nn.Module, use: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))
        self._use = lambda x: use(other, x)

    def forward(self, x: Tensor) -> Tensor:
        return self._use(x) * self.weight


class Tied(nn.Module):
    """Two modules of which the second has the weight of the first, and uses both."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 3, bias=False)
        self.second = Elsewhere(self.first, lambda first, x: first(x))
        self.own = self.second.own = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.second(x) @ self.own


def stepped(model: nn.Module) -> None:
    torch.optim.SGD(model.parameters(), 0.1).step()


def written_behind_torchs_back(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.data.mul_(2)


def frozen(model: nn.Module) -> None:
    model.requires_grad_(False)


def doubled(_module: nn.Module, _args: object, output: Tensor) -> Tensor:
    return 2 * output


def hooked(model: nn.Module) -> None:
    for module in model.modules():
        module.register_forward_hook(doubled)


def in_evaluation(model: nn.Module) -> None:
    model.eval()


def without_bias(model: nn.Module) -> None:
    for module in model.modules():
        if isinstance(module, nn.Linear):
            module.register_parameter("bias", None)


def replaced(model: nn.Module) -> None:
    for module in [*model.modules()][1:]:
        if isinstance(module, nn.Sequential):
            module[0] = nn.Identity()


def as_it_was(_: nn.Module) -> None:
    pass


@pytest.mark.parametrize(
    "change",
    [
        as_it_was,
        stepped,
        written_behind_torchs_back,
        frozen,
        hooked,
        in_evaluation,
        without_bias,
        replaced,
    ],
)
@pytest.mark.parametrize(
    "make",
    [
        lambda: nn.Linear(3, 3),
        lambda: nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)),
        lambda: nn.Sequential(nn.Linear(3, 3), nn.Dropout()),
    ],
    ids=["linear", "norm", "dropout"],
)
def test_what_was_used_from_elsewhere_has_changed_since(
    make: Callable[[], nn.Module], change: Callable[[nn.Module], None]
) -> None:
    torch.manual_seed(0)
    other = make()
    model = nn.Sequential(other, Elsewhere(other, lambda it, x: it(x).tanh()))
    with gradlib.record(model) as recording:
        model(torch.randn(4, 3)).sum().backward()
    change(model)
    assert_replays(recording, model)
    before = everything(model)
    assert recording.verify().agreed == len(recording)
    assert_unchanged(model, before)


def test_what_was_used_from_elsewhere_has_changed_in_the_block() -> None:
    other = nn.Linear(3, 3)
    model = nn.Sequential(other, Elsewhere(other, lambda it, x: it(x).tanh()))
    with gradlib.record(model) as recording:
        for _ in range(3):
            model(torch.randn(4, 3)).sum().backward()
            stepped(model)
        model(torch.randn(4, 3)).sum().backward()
    assert_replays(recording, model)
    assert recording.verify().agreed == len(recording)


def test_what_was_used_from_elsewhere_had_a_hook() -> None:
    other = nn.Linear(3, 3)
    model = nn.Sequential(other, Elsewhere(other, lambda it, x: it(x)))
    handle = other.register_forward_hook(doubled)
    with gradlib.record(model) as recording:
        model(torch.randn(4, 3)).sum().backward()
    handle.remove()
    assert_replays(recording, model)
    assert recording.verify().agreed == len(recording)


@pytest.mark.parametrize("make", [lambda: nn.LazyLinear(3), LazyNoise])
def test_what_was_used_from_elsewhere_was_lazy(make: Callable[[], nn.Module]) -> None:
    lazy = make()
    model = nn.Sequential(Elsewhere(lazy, lambda it, x: dropout(it(x))), lazy)
    with gradlib.record(model) as recording:
        for _ in range(2):
            loss_of(model(torch.rand(4, 3, requires_grad=True))).backward()
    assert_replays(recording, model)
    assert recording.verify().agreed == len(recording)


def test_only_what_was_used_from_elsewhere_required_grad() -> None:
    other = nn.Linear(3, 3)
    borrows = Elsewhere(other, lambda it, x: it(x).tanh())
    borrows.weight.requires_grad_(False)
    model = nn.ModuleDict({"other": other, "borrows": borrows})
    with gradlib.record(model) as recording:
        borrows(torch.randn(4, 3)).sum().backward()
    frozen(model)
    assert_replays(recording, model)
    assert recording.verify().agreed == len(recording)


def test_a_weight_that_is_used_here_and_elsewhere() -> None:
    with gradlib.record(model := Tied()) as recording:
        model(torch.randn(4, 3)).sum().backward()
    assert recording.verify().agreed == len(recording)
    assert_replays(recording, model)


def test_what_stands_as_it_did_is_not_set_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    many, sizes = 12, list[int]()
    first = Elsewhere(nn.Identity(), lambda it, x: it(x))
    model = nn.Sequential(first, *[Twice() for _ in range(many)])
    with gradlib.record(model) as recording:
        model(torch.randn(4, 3)).sum().backward()
    modules_of = PastState._modules

    def counted(state: PastState) -> Any:
        found = [*modules_of(state)]
        sizes.append(len(found))
        return found

    monkeypatch.setattr(PastState, "_modules", counted)
    assert recording.verify().agreed == len(recording)
    # The first one has an attribute that may be anything, so it is set every time.
    assert sorted(sizes) == [1, *[2] * many, len([*model.modules()])]
