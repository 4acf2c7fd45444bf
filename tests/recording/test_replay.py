"""A replayed call gives what was recorded, and leaves everything as it was."""

import copy
import random
from collections.abc import Callable
from typing import Any, cast

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.lazy import LazyModuleMixin
from torch.nn.utils import parametrizations, parametrize
from torch.testing import assert_close
from torch.utils.checkpoint import checkpoint

import gradlib


def loss_of(output: Tensor) -> Tensor:
    """Weigh the entries differently, so that no two gradients agree by chance."""
    weights = torch.arange(1.0, output.numel() + 1).view_as(output)
    loss = (output * weights).sum()
    return loss.abs() if loss.is_complex() else loss


def everything(model: nn.Module) -> dict[str, Any]:
    """Return all that a replay must leave as it was."""
    state: dict[str, Any] = {
        "random": torch.get_rng_state(),
        "python": random.getstate(),
        "numpy": cast(Any, np.random.get_state())[1],
        "grad mode": torch.is_grad_enabled(),
        "autocast": torch.is_autocast_enabled("cpu"),
        "dtype": torch.get_default_dtype(),
    }
    for name, module in model.named_modules():
        state[f"vars of {name}"] = {
            key: id(value) for key, value in vars(module).items()
        }
        state[f"own of {name}"] = [
            (key, id(value)) for key, value in (*module._parameters.items(),)
        ]
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        state[name] = tensor.detach().clone()
        state[f"version of {name}"] = tensor._version
        state[f"requires_grad of {name}"] = tensor.requires_grad
        grad = tensor.grad
        state[f"grad of {name}"] = None if grad is None else (id(grad), grad.clone())
    return state


def assert_same(a: object, b: object) -> None:
    assert_close(a, b, rtol=0, atol=0, equal_nan=True)


def assert_replays(
    recording: gradlib.Recording, model: nn.Module, **tolerance: Any
) -> None:
    """Assert that each pass comes out again, and that nothing else has changed."""
    before = everything(model)
    kept = copy.deepcopy([call.args for call in recording])
    for call in recording:
        assert call.passes
        for pass_ in call.passes:
            again = pass_.replay()
            assert again.backward == pass_.backward
            assert_close(again.grad_output, pass_.grad_output)
            for field in ("grad_input", "grad_kwargs", "param_grads"):
                assert_close(getattr(again, field), getattr(pass_, field), **tolerance)
            for field in ("grad_input_total", "param_grads_total"):
                assert_close(getattr(again, field), getattr(pass_, field))
    after = everything(model)
    for key, value in before.items():
        if isinstance(value, Tensor):
            assert torch.equal(value, after[key]), key
        elif key == "numpy":
            assert (value == after[key]).all()
        elif key.startswith("grad of") and value is not None:
            assert value[0] == after[key][0], key
            assert torch.equal(value[1], after[key][1]), key
        else:
            assert value == after[key], key
    assert_same([call.args for call in recording], kept)


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.f = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.f(x)


class Thrice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.f = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(3):
            x = torch.tanh(self.f(x))
        return x


class Nested(nn.Module):
    """Keyword tensors, a nested output, of which one part is not used."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x: Tensor, *, scale: Tensor) -> dict[str, Any]:
        h = self.inner(x)
        return {"used": (h * scale, [h + 1]), "not": 2 * h, "name": "kept"}


class Wrapped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.nested = Nested()

    def forward(self, x: Tensor) -> Tensor:
        out = self.nested(x, scale=2 * x)
        return out["used"][0] + out["used"][1][0]


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(4, 2, dropout=0.3, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.attention(x, x, x, need_weights=False)[0]


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(4, 3, num_layers=2, dropout=0.4)
        self.head = nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        output, (hidden, _) = self.lstm(x)
        return self.head(output) + hidden.sum()


class Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(7, 4)
        self.decoder = nn.Linear(4, 7, bias=False)
        self.decoder.weight = self.embedding.weight  # tied

    def forward(self, words: Tensor) -> Tensor:
        return self.decoder(self.embedding(words))


class Checkpointed(nn.Module):
    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.block = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.Tanh())
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        return checkpoint(self.block, h, use_reentrant=self.reentrant)


class Complex(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, dtype=torch.complex64))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight


class Taking(nn.Module):
    """It is given its own parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(2, 4))

    def forward(self, x: Tensor, weight: Tensor) -> Tensor:
        return 5 * x * weight + 7 * self.weight


class Owner(nn.Module):
    """It has a parameter that stands in a module inside too."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4, bias=False)
        self.weight = self.inner.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) + F.linear(x, self.weight).sin()


class GivesWeight(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.taking = Taking()

    def forward(self, x: Tensor) -> Tensor:
        return self.taking(x, self.taking.weight)


class Returning(nn.Module):
    """It returns its input, and another tensor twice."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        y = x.sin()
        return x, y, y


class Sum(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.returning = Returning()

    def forward(self, x: Tensor) -> Tensor:
        a, b, c = self.returning(2 * x)
        return a + 2 * b + 3 * c


def overwriting() -> nn.Module:
    return nn.Sequential(
        nn.Linear(4, 4),
        nn.ReLU(inplace=True),
        nn.Linear(4, 4),
        nn.Dropout(0.5, inplace=True),
    )


def parametrized() -> nn.Module:
    return nn.Sequential(
        parametrizations.weight_norm(nn.Linear(4, 4)),
        parametrizations.spectral_norm(nn.Linear(4, 3)),
    )


MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "residual": (Residual, (2, 4)),
    "one module three times": (Thrice, (2, 4)),
    "in place": (overwriting, (2, 4)),
    "dropout": (lambda: nn.Sequential(nn.Linear(4, 9), nn.Dropout(0.5)), (2, 4)),
    "batch norm": (lambda: nn.Sequential(nn.Linear(4, 9), nn.BatchNorm1d(9)), (5, 4)),
    "nested": (Wrapped, (2, 4)),
    "attention": (Attention, (2, 5, 4)),
    "recurrent": (Recurrent, (5, 2, 4)),
    "non-reentrant checkpoint": (lambda: Checkpointed(False), (2, 4)),
    "parametrizations": (parametrized, (2, 4)),
    "own parameter as argument": (GivesWeight, (2, 4)),
    "returned inputs": (Sum, (2, 4)),
    "two owners": (Owner, (2, 4)),
}


# cuDNN has a random state of its own for dropout: such a call is not replayed.
ON_A_CPU = pytest.param("recurrent", marks=pytest.mark.cpu)


@pytest.mark.parametrize(
    "kind", [ON_A_CPU if it == "recurrent" else it for it in MODELS]
)
def test_what_comes_out_again(kind: str) -> None:
    torch.manual_seed(0)
    make, shape = MODELS[kind]
    model: Any = make()
    with gradlib.record(model) as recording:
        for _ in range(2):  # the weights of the first step are gone in the second
            loss_of(model(torch.randn(shape, requires_grad=True))).backward()
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.sub_(0.1 * parameter.grad)
            model.zero_grad()
        assert_replays(recording, model)  # inside the block
    count = len(recording)
    with torch.no_grad():
        assert_replays(recording, model)
    assert len(recording) == count


@pytest.mark.cpu
@pytest.mark.usefixtures("cudnn_looks_on")
def test_the_weights_of_a_replayed_lstm_lie_together() -> None:
    model = nn.LSTM(4, 3, 2)
    with gradlib.record(model) as recording:
        loss_of(model(torch.randn(5, 2, 4))[0]).backward()
    assert_replays(recording, model)
    assert recording.verify(numerical=True).ok


@pytest.mark.parametrize("before", [True, False])
def test_a_hook_that_draws_random_numbers(before: bool) -> None:
    def noisy(x: Tensor) -> Tensor:
        return x + torch.rand_like(x)

    layer: Any = nn.Tanh()
    model = nn.Sequential(nn.Dropout(0.5))
    if before:
        layer.register_forward_pre_hook(lambda _, args: noisy(args[0]))
    else:
        layer.register_forward_hook(lambda _, _args, output: noisy(output))
    model.append(layer)
    recording = replays(model, torch.randn(4, 3, requires_grad=True))
    assert_replays(recording, model)
    assert recording.verify().agreed == 3


@pytest.mark.cpu
def test_an_lstm_with_dropout_of_cudnns_own(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.LSTM(4, 3, 2, dropout=0.4)
    with gradlib.record(model) as recording:
        for training in (True, False):
            loss_of(model.train(training)(torch.randn(5, 2, 4))[0]).backward()
    monkeypatch.setattr(torch.backends.cudnn, "is_acceptable", lambda _: True)
    with pytest.raises(gradlib.CannotReplayError, match="cuDNN draws from a state"):
        recording["", 0].replay()
    assert recording["", 1].replay().param_grads["weight_ih_l0"] is not None


def test_a_reentrant_checkpoint() -> None:
    model = Checkpointed(reentrant=True)
    with gradlib.record(model) as recording:
        loss_of(model(torch.randn(2, 4, requires_grad=True))).backward()
    assert "computed it again" in recording["block.0"].note
    assert_replays(recording, model)


def test_integer_inputs_and_tied_weights() -> None:
    model = Words()
    with gradlib.record(model) as recording:
        loss_of(model(torch.tensor([[1, 2], [3, 3]]))).backward()
    assert_replays(recording, model)
    shares = [call.replay().param_grads for call in recording]
    total = shares[1]["weight"] + shares[2]["weight"]
    assert_close(total, model.embedding.weight.grad)


@pytest.mark.parametrize("used", [True, False])
def test_a_parameter_with_two_owners(used: bool) -> None:
    """Each call has its own share, both have one total; without a recorder too."""

    class Pair(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(3, 3, bias=False), nn.Linear(3, 3)
            self.b.weight = self.a.weight
            if used:
                self.weight = self.a.weight

        def forward(self, x: Tensor) -> Tensor:
            y = self.b(torch.tanh(self.a(x)))
            return F.linear(y, self.weight) if used else y

    model = Pair()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x, totals = torch.randn(4, 3, requires_grad=True), []
    with gradlib.record(model) as recording:
        for _ in range(2):
            optimizer.zero_grad()
            loss_of(model(x)).backward()
            totals.append(cast(Tensor, model.a.weight.grad).clone())
            optimizer.step()
    owners = ["a", "b", ""] if used else ["a", "b"]
    for forward, total in zip(recording.forwards, totals, strict=True):
        shares = {name: forward[name].param_grads["weight"] for name in owners}
        inner = shares["a"] + shares["b"]
        assert_close(shares.get("", inner), total)
        assert (shares["a"] - shares["b"]).norm() > 0.1
        for name in owners:
            assert_close(forward[name].param_grads_total["weight"], total)
    assert_replays(recording, model)
    assert recording.verify(numerical=True).agreed == len(recording)
    assert recording.compare(recording).ok
    frame = recording.to_frame()
    norms = list(frame[frame["name"] == "a"]["param_grads_total"])
    assert norms == pytest.approx([total.norm().item() for total in totals])


@pytest.mark.parametrize("dtype", [torch.complex64, torch.bfloat16, torch.float64])
def test_other_dtypes(dtype: torch.dtype) -> None:
    model = Complex() if dtype.is_complex else nn.Linear(4, 4, dtype=dtype)
    with gradlib.record(model) as recording:
        loss_of(model(torch.randn(2, 4, dtype=dtype, requires_grad=True))).backward()
    assert_replays(recording, model)


def test_autocast() -> None:
    model = Thrice()
    with gradlib.record(model) as recording:
        with torch.autocast(torch.get_default_device().type, torch.bfloat16):
            output = model(torch.randn(2, 4))
        loss_of(output).backward()
    call = recording["f", 1]
    assert call.output.dtype == torch.bfloat16
    assert_replays(recording, model, rtol=0.02, atol=0.02)
    with torch.autocast(torch.get_default_device().type, torch.float16):
        assert_replays(recording, model, rtol=0.02, atol=0.02)
    with gradlib.record(model) as recording:  # and none where one is around
        loss_of(model(torch.randn(2, 4))).backward()
    with torch.autocast(torch.get_default_device().type, torch.bfloat16):
        assert_replays(recording, model)


def test_the_shares_of_all_calls_add_up() -> None:
    model = Thrice()
    with gradlib.record(model) as recording:
        loss_of(model(torch.randn(2, 4))).backward()
    for name, parameter in model.f.named_parameters():
        shares = [call.replay().param_grads[name] for call in recording.calls("f")]
        assert_close(sum(shares), parameter.grad)


@pytest.mark.cpu
def test_weights_of_each_step_also_where_they_change_behind_torchs_back() -> None:
    model: Any = nn.Linear(3, 2)
    with gradlib.record(model) as recording:
        for _ in range(3):
            model(torch.randn(4, 3, requires_grad=True)).square().sum().backward()
            for parameter in model.parameters():
                parameter.data.sub_(parameter.grad)
                parameter.grad = None
    assert_replays(recording, model)


@pytest.mark.parametrize("shared", [False, True])
def test_a_dtype_that_is_changed_in_the_block(shared: bool) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Tanh())
    if shared:  # then torch cannot share it with what is kept
        model.share_memory()
    x = torch.randn(3, 4)
    with gradlib.record(model) as recording:
        loss_of(model(x)).backward()
        model.zero_grad()
        model.double()
        loss_of(model(x.double())).backward()
    assert recording.verify().agreed == len(recording)
    assert_replays(recording, model)


@pytest.mark.parametrize("shared", [False, True])
def test_weights_that_are_given_other_data(shared: bool) -> None:
    model = nn.Linear(3, 2)
    if shared:  # then nothing tells of it, as on a GPU, but where the data is
        model.share_memory()
    x = torch.randn(4, 3, requires_grad=True)
    with gradlib.record(model) as recording:
        for _ in range(3):
            loss_of(model(x)).backward()
            for parameter in model.parameters():
                parameter.data = parameter.data * 2
    assert recording.verify().agreed == 3
    assert_replays(recording, model)


@pytest.mark.parametrize("shared", [False, True])
def test_weights_of_a_module_that_is_never_called(shared: bool) -> None:
    model = nn.MultiheadAttention(4, 2)  # it has one, and uses its weights
    if shared:
        model.share_memory()
    with gradlib.record(model) as recording:
        for _ in range(3):
            x = torch.randn(2, 3, 4, requires_grad=True)
            loss_of(model(x, x, x)[0]).backward()
            with torch.no_grad():
                model.out_proj.weight.mul_(2)
    assert recording.verify().agreed == len(recording) == 3
    assert_replays(recording, model)


@pytest.mark.cpu  # where NumPy has the same memory
def test_weights_that_numpy_writes_to_after_a_replay() -> None:
    model = nn.Linear(3, 2)
    with gradlib.record(model) as recording:
        for _ in range(3):
            loss_of(model(torch.randn(4, 3, requires_grad=True))).backward()
            assert recording.verify().ok
            model.weight.detach().numpy()[...] *= 2
    assert recording.verify().agreed == len(recording) == 3


@pytest.mark.cpu  # where NumPy has the same memory
def test_plain_tensors_that_numpy_writes_to_stand_in_for_weights() -> None:
    model = nn.Linear(3, 2)
    weights = {"weight": torch.randn(2, 3), "bias": torch.zeros(2)}
    with gradlib.record(model) as recording:
        for _ in range(3):
            x = torch.randn(4, 3, requires_grad=True)
            loss_of(torch.func.functional_call(model, weights, (x,))).backward()
            weights["weight"].numpy()[...] *= 2
    assert recording.verify().agreed == len(recording) == 3


@pytest.mark.parametrize("frozen", [False, True])
def test_weights_that_a_forward_puts_in_for_one_call(frozen: bool) -> None:
    class Borrows(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(3, 3)
            self.fc.bias.requires_grad_(not frozen)

        def forward(self, x: Tensor) -> Tensor:
            others = {"weight": 2 * self.fc.weight, "bias": torch.ones(3)}
            h = torch.func.functional_call(self.fc, others, (x,))
            return self.fc(h)

    model = Borrows()
    with gradlib.record(model) as recording:
        for _ in range(2):
            loss_of(model(torch.randn(4, 3, requires_grad=True))).backward()
    assert recording.verify().agreed == len(recording) == 6
    assert_replays(recording, model)


def test_weights_that_a_forward_puts_into_what_is_in_a_container() -> None:
    class Scales(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
            self.scale = nn.Parameter(torch.tensor(2.0))

        def forward(self, x: Tensor) -> Tensor:
            scaled = {k: v * self.scale for k, v in self.inner.named_parameters()}
            h = torch.func.functional_call(self.inner, scaled, (x,))
            return h + self.inner(x)

    model = Scales()
    with gradlib.record(model) as recording:
        for _ in range(2):
            loss_of(model(torch.randn(4, 3, requires_grad=True))).backward()
    assert recording.verify().agreed == len(recording) == 18
    assert_replays(recording, model)


@pytest.mark.parametrize("reentrant", [False, True])
def test_weights_that_a_forward_puts_in_inside_of_a_checkpoint(reentrant: bool) -> None:
    """What is computed before gradients are enabled requires them later."""

    class Borrows(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(3, 3)

        def twice(self, x: Tensor) -> Tensor:
            others = {name: 2 * it for name, it in self.fc.named_parameters()}
            for _ in range(2):
                x = torch.func.functional_call(self.fc, others, (self.fc(x),))
            return x

        def forward(self, x: Tensor) -> Any:
            return checkpoint(self.twice, x, use_reentrant=reentrant)

    model = Borrows().double()
    with gradlib.record(model) as recording:
        for _ in range(2):
            x = torch.randn(4, 3, dtype=torch.double, requires_grad=True)
            loss_of(model(x)).backward()
    assert recording.verify(numerical=True).agreed == len(recording) == 10


def test_buffers_of_each_call() -> None:
    seen: list[Tensor] = []

    class Reads(nn.Module):
        def __init__(self, norm: Any) -> None:
            super().__init__()
            self.norm = norm

        def forward(self, x: Tensor) -> Tensor:
            mean = self.norm.running_mean.clone()
            seen.append(mean)
            return self.norm(x) * mean

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(4)
            self.reads = Reads(self.norm)

        def forward(self, x: Tensor) -> Tensor:
            return self.reads(self.norm(x)) + self.reads(x)

    model = Model()
    with gradlib.record(model) as recording:
        loss_of(model(torch.randn(5, 4, requires_grad=True) + 3)).backward()
    assert not torch.equal(seen[0], seen[1])
    assert_replays(recording, model)


def test_frozen_and_thawed_parameters() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(3, 3)

        def forward(self, x: Tensor) -> Tensor:
            # What it computes depends on it.
            return self.fc(x) * (2 if self.fc.weight.requires_grad else 3)

    model = Model()
    with gradlib.record(model) as recording:
        for frozen in (True, False):
            model.fc.weight.requires_grad_(not frozen)
            loss_of(model(torch.randn(2, 3, requires_grad=True))).backward()
    assert_replays(recording, model)
    assert recording["fc", 0].replay().param_grads["weight"] is None
    assert recording["fc", 1].replay().param_grads["weight"] is not None


def test_modes_of_each_forward() -> None:
    model = nn.Sequential(nn.Linear(3, 8), nn.Dropout(0.5))
    with gradlib.record(model) as recording:
        for training in (True, False):
            model.train(training)
            loss_of(model(torch.ones(2, 3))).backward()
    assert_replays(recording, model)
    assert not model.training


def test_modules_of_one_class_with_settings_of_their_own() -> None:
    model = nn.Sequential(nn.Linear(3, 8), nn.Dropout(0.1), nn.Dropout(0.9))
    recording = replays(model, torch.randn(4, 3, requires_grad=True))
    assert_replays(recording, model)
    assert recording.verify().agreed == 4


def test_modules_of_one_class_of_which_one_has_more() -> None:
    model: Any = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    model[1].scale = 2.0
    model[1].register_forward_hook(lambda module, _, output: module.scale * output)
    recording = replays(model, torch.randn(4, 3, requires_grad=True))
    model[1].scale = 3.0
    assert_replays(recording, model)


class Scaled(nn.Linear):
    """Changes what it is given and returns, outside of what hooks see."""

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
    """It changes in place what it keeps, and what another module keeps too."""

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
    """It uses what it has by way of its attributes."""

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


def test_no_recording_sees_a_replay() -> None:
    model = Residual()
    with gradlib.record(model) as recording:
        loss_of(model(torch.randn(2, 4))).backward()
    with gradlib.record(model) as other, gradlib.record(nn.Sequential(model)) as outer:
        recording[""].replay()
    assert len(other) == len(outer) == 0


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


def test_several_passes() -> None:
    model = Residual()
    with gradlib.record(model) as recording:
        output = model(torch.randn(2, 4, requires_grad=True))
        output.sum().backward(retain_graph=True)
        loss_of(output).backward()
    assert_replays(recording, model)
    with pytest.raises(
        gradlib.AmbiguousCallError, match=r"call.passes\[i\].replay\(\), i from 0 to 1"
    ):
        recording["f"].replay()


def test_grad_output_of_which_parts_are_none() -> None:
    class Parts(nn.Module):
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return 2 * x, 3 * x

    with gradlib.record(model := Parts()) as recording:
        model(torch.ones(2, requires_grad=True))[1].sum().backward()
    assert recording[""].grad_output[0] is None
    assert_close(recording[""].replay().grad_input, (torch.full((2,), 3.0),))
    assert_replays(recording, model)


@pytest.mark.parametrize("wakes", [True, False])
def test_a_forward_that_goes_backward_itself(wakes: bool) -> None:
    """As for forces: what that pass gives is no part of what a later one does."""

    class Forces(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.tensor([1.0, 2.0]))

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            energy = (x.requires_grad_().tanh() @ self.w).sum()
            (slope,) = torch.autograd.grad(energy, x, create_graph=True)
            return energy, -slope

    with gradlib.record(model := Forces()) as recording:
        x = torch.tensor([[0.3, -0.2]]).requires_grad_(not wakes)
        energy, forces = model(x)
        (energy + forces.square().sum()).backward()
    last = recording[""].passes[-1]
    assert_close(last.grad_input, (x.grad,))
    assert_close(last.replay().grad_input, (x.grad,))
    assert recording.verify().ok
    assert recording.verify(numerical=True).ok


def test_one_tensor_in_two_places_stays_one() -> None:
    class Same(nn.Module):
        def forward(self, a: Tensor, b: Tensor) -> Tensor:
            assert a is b
            return a * b

    x = torch.randn(3, requires_grad=True)
    with gradlib.record(model := Same()) as recording:
        model(x, x).sum().backward()
    assert_replays(recording, model)


@pytest.mark.cpu
def test_kept_elsewhere() -> None:
    model = Residual()
    with gradlib.record(model, device="cpu", modules="f") as recording:
        loss_of(model(torch.randn(2, 4, requires_grad=True))).backward()
    assert_replays(recording, model)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")
def test_a_compiled_model() -> None:
    model = Residual()
    compiled = torch.compile(model, backend="eager")
    with gradlib.record(model) as recording:
        loss_of(compiled(torch.randn(2, 4, requires_grad=True))).backward()
    assert_replays(recording, model)


def test_a_copied_value_is_not_changed() -> None:
    class Halves(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.full((3,), 4.0))

        def forward(self, x: Tensor) -> Tensor:
            self.weight.data.mul_(0.5)
            return x.mul_(self.weight)

    model = Halves()
    with gradlib.record(model) as recording:
        loss_of(model(2 * torch.ones(3, requires_grad=True))).backward()
    with torch.no_grad():
        model.weight.fill_(4)
    for _ in range(2):
        assert_close(recording[""].replay().grad_input[0], torch.tensor([2.0, 4, 6]))
    assert model.weight.tolist() == [4, 4, 4]
    assert recording[""].args[0].tolist() == [2, 2, 2]


# Where it cannot


def replays(model: nn.Module, x: Tensor, **options: Any) -> gradlib.Recording:
    with gradlib.record(model, **options) as recording:
        model(x).sum().backward()
    return recording


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"reduce": gradlib.tensor_stats}, "Replay where you record, without reduce="),
        ({"keep": ["grad_output", "output"]}, 'A replay needs "args"'),
        ({"keep": ["args", "grad_input"]}, 'A replay needs "grad_output"'),
    ],
)
def test_what_a_replay_needs(options: dict[str, Any], message: str) -> None:
    recording = replays(nn.Linear(2, 2), torch.ones(1, 2), **options)
    with pytest.raises(gradlib.CannotReplayError) as caught:
        recording[""].replay()
    assert message in str(caught.value)
    assert caught.value.code == "GL207"
    assert isinstance(caught.value, RuntimeError)


def test_a_loaded_recording(tmp_path: Any) -> None:
    recording = replays(nn.Linear(2, 2), torch.ones(1, 2))
    recording.save(tmp_path / "run")
    loaded = gradlib.load_recording(tmp_path / "run")
    with pytest.raises(gradlib.CannotReplayError, match="loaded from a file"):
        loaded[""].replay()


def test_without_a_backward_pass() -> None:
    model = nn.Linear(2, 2)
    with gradlib.record(model) as recording:
        model(torch.ones(1, 2))
        with torch.no_grad():
            model(torch.ones(1, 2))
    for call, why in zip(recording, ("no backward pass", "disabled"), strict=True):
        with pytest.raises(gradlib.CannotReplayError, match=why):
            call.replay()


def test_a_module_that_does_not_repeat() -> None:
    class Drifts(nn.Module):
        factors = iter(range(1, 9))

        def forward(self, x: Tensor) -> Tensor:
            return x * next(self.factors)

    recording = replays(Drifts(), torch.ones(1, 2, requires_grad=True))
    with pytest.raises(gradlib.CannotReplayError, match="does not repeat"):
        recording[""].replay()


class Cache:
    """Opaque, and changed by the call that is given it."""

    keys: Tensor | None = None


class Remembers(nn.Module):
    def forward(self, x: Tensor, *, state: dict[str, Any]) -> Tensor:
        cache = state["cache"]
        cache.keys = x if cache.keys is None else torch.cat([cache.keys, x])
        return cache.keys.softmax(0)[-len(x) :] * x


def test_an_argument_that_may_change_is_never_given_again() -> None:
    model, cache = Remembers(), Cache()
    x = torch.randn(2, 3, requires_grad=True)
    with gradlib.record(model) as recording:
        model(x, state={"cache": cache}).sum().backward()
    with pytest.raises(gradlib.CannotReplayError) as caught:
        recording[""].replay()
    assert "kwargs['state']['cache'] is of type Cache" in str(caught.value)
    found = recording.verify(numerical=True)
    assert found.disagreements == ()
    assert found.skipped[0].reason == caught.value.args[0]
    assert cache.keys is x


def test_a_generator_is_not_drawn_from() -> None:
    class Noisy(nn.Module):
        def forward(self, x: Tensor, generator: torch.Generator) -> Tensor:
            made = torch.rand(x.shape, generator=generator, device="cpu")
            return x * made.to(x)

    generator = torch.Generator().manual_seed(0)
    model = Noisy()
    with gradlib.record(model) as recording:
        model(torch.ones(2, requires_grad=True), generator).sum().backward()
    before = generator.get_state()
    with pytest.raises(gradlib.CannotReplayError, match=r"args\[1\] is of type Gen"):
        recording[""].replay()
    assert torch.equal(generator.get_state(), before)


def test_plain_values_and_arrays_are_given_again() -> None:
    given: list[Any] = []

    class Many(nn.Module):
        def forward(self, x: Tensor, shift: Any, *_rest: Any, act: Any) -> Tensor:
            given.append(shift)
            return act(x * torch.from_numpy(shift).to(x))

    array = np.ones(2, dtype=np.float32)
    rest = (torch.float32, torch.device("cpu"), x_size := torch.ones(2).shape, "a", int)
    assert isinstance(x_size, torch.Size)
    model, x = Many(), torch.ones(2, requires_grad=True)
    with gradlib.record(model) as recording:
        model(x, array, *rest, act=F.relu).sum().backward()
    recording[""].replay()
    given[-1][:] = 0
    assert recording[""].args[1].tolist() == array.tolist() == [1, 1]


def test_one_of_two_outputs_that_does_not_repeat() -> None:
    class Drifts(nn.Module):
        factors = iter(range(1, 9))

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return 2 * x, x * next(self.factors)

    model = Drifts()
    with gradlib.record(model) as recording:
        model(torch.ones(1, 2, requires_grad=True))[0].sum().backward()
    with pytest.raises(gradlib.CannotReplayError, match="does not repeat"):
        recording[""].replay()


def test_an_output_of_another_form() -> None:
    class Shrinks(nn.Module):
        sizes = iter((3, 2))

        def forward(self, x: Tensor) -> Tensor:
            return x[: next(self.sizes)]

    recording = replays(Shrinks(), torch.ones(4, requires_grad=True))
    with pytest.raises(gradlib.CannotReplayError, match="does not repeat"):
        recording[""].replay()


@pytest.mark.parametrize("when", ["forward", "backward"])
def test_an_exception_leaves_everything_as_it_was(when: str) -> None:
    class Breaks(torch.autograd.Function):
        broken = False

        @staticmethod
        def forward(_ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, *grads: Tensor) -> Tensor:
            assert ctx.needs_input_grad[0]
            if Breaks.broken and when == "backward":
                raise KeyError("broken")
            return grads[0]

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(3)

        def forward(self, x: Tensor) -> Tensor:
            x = F.dropout(self.norm(x), 0.5)
            self.last = x
            if Breaks.broken and when == "forward":
                random.random()
                np.random.rand()
                raise KeyError("broken")
            return Breaks.apply(x)

    model = Model()
    with gradlib.record(model) as recording:
        loss_of(model(torch.randn(4, 3, requires_grad=True))).backward()
    Breaks.broken = True
    before = everything(model)
    with (
        torch.no_grad(),
        torch.autocast(torch.get_default_device().type, torch.bfloat16),
        pytest.raises(
            gradlib.CannotReplayError, match="again raised KeyError"
        ) as caught,
    ):
        recording[""].replay()
    assert isinstance(caught.value.__cause__, KeyError)
    after = everything(model)
    assert str(before) == str(after)


@pytest.mark.filterwarnings("ignore:.torch.jit.")
def test_a_script_module() -> None:
    scripted: Any = torch.jit.trace(nn.Tanh(), torch.ones(1))
    model = nn.Sequential(nn.Linear(2, 2), scripted)
    recording = replays(model, torch.ones(1, 2))
    with pytest.raises(gradlib.CannotReplayError, match="contains a ScriptModule"):
        recording[""].replay()


def test_the_printed_replay() -> None:
    recording = replays(nn.Linear(2, 2), torch.ones(1, 2))
    again = recording[""].replay()
    assert repr(again) == "<replay of backward pass 0 of (root), call 0 in forward 0>"
    assert str(again).splitlines()[1].split() == ["field", "shape", "norm"]


@pytest.mark.parametrize("frozen", [False, True])
def test_nothing_is_left_of_a_replay(
    frozen: bool, tensors_alive: Callable[[], int]
) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2))
    model.requires_grad_(not frozen)
    x = torch.randn(3, 4, requires_grad=True)
    counts: list[int] = []
    for _ in range(3):
        with gradlib.record(model) as recording:
            loss_of(model(x)).backward()
        assert recording.verify(numerical=True).ok
        recording["0"].replay()
        del recording
        counts.append(tensors_alive())
    assert counts[1] == counts[2]
