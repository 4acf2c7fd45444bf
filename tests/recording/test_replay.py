"""A replayed call reproduces what was recorded, and changes nothing."""

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.testing import assert_close
from torch.utils.checkpoint import checkpoint

import gradlib

from ..recorder.first_nets import Residual, Thrice
from .replayed import assert_replays, assert_same, loss_of, replays, values_of


class Nested(nn.Module):
    """Has keyword tensors, and a nested output of which one part is not used."""

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
    """Receives its own parameter as an argument."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(2, 4))

    def forward(self, x: Tensor, weight: Tensor) -> Tensor:
        return 5 * x * weight + 7 * self.weight


class Owner(nn.Module):
    """Has a parameter that a module inside has too."""

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
    """Returns its input, and another tensor twice."""

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


def test_a_backward_pass_is_replayed_under_its_own_autocast() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 8))
    with gradlib.record(net) as recording:
        loss = net(torch.randn(4, 16)).square().sum()
        loss.backward(retain_graph=True)
        with torch.autocast(torch.get_default_device().type, torch.bfloat16):
            loss.backward()
    whole, rounded = recording["2"].passes
    assert not torch.equal(whole.param_grads["weight"], rounded.param_grads["weight"])
    for found in (whole, rounded):
        again = found.replay().param_grads["weight"]
        torch.testing.assert_close(again, found.param_grads["weight"])
    assert recording.verify(rtol=1e-5).ok


def test_the_shares_of_all_calls_add_up() -> None:
    model = Thrice()
    with gradlib.record(model) as recording:
        loss_of(model(torch.randn(2, 4))).backward()
    for name, parameter in model.f.named_parameters():
        shares = [call.replay().param_grads[name] for call in recording.calls("f")]
        assert_close(sum(shares), parameter.grad)


def test_no_recording_sees_a_replay() -> None:
    model = Residual()
    with gradlib.record(model) as recording:
        loss_of(model(torch.randn(2, 4))).backward()
    with gradlib.record(model) as other, gradlib.record(nn.Sequential(model)) as outer:
        recording[""].replay()
    assert len(other) == len(outer) == 0


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
    """The gradients of that pass are no part of those of a later pass."""

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
class Sine(torch.autograd.Function):
    """A sine whose backward overwrites its gradient and its result."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        y = x.sin()
        ctx.x, ctx.y = x, y.detach()
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        ctx.y.zero_()
        return grads[0].mul_(ctx.x.cos())


class Clips(nn.Module):
    """Sets a hook that clips a gradient in place, behind a view."""

    def forward(self, x: Tensor) -> Tensor:
        y = x.tanh()
        y.register_hook(lambda grad: grad.clamp_(-0.05, 0.05))
        return y.view(-1)


class Sines(nn.Module):
    def forward(self, x: Tensor) -> Any:
        return Sine.apply(x)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_backwards_that_write_over_what_was_recorded(dtype: torch.dtype) -> None:
    model = nn.Sequential(nn.Linear(4, 3), Sines(), nn.Linear(3, 2), Clips())
    with gradlib.record(model.to(dtype)) as recording:
        model(torch.randn(5, 4, dtype=dtype)).square().sum().backward()
    first = values_of(recording)
    for _ in range(2):
        assert_replays(recording, model)
        assert recording.verify().ok
        (wrong,) = recording.verify(numerical=True).disagreements
        assert wrong.name == "3"  # whose hook makes it no derivative
    assert_same(values_of(recording), first)


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


def test_the_printed_replay() -> None:
    recording = replays(nn.Linear(2, 2), torch.ones(1, 2))
    again = recording[""].replay()
    assert repr(again) == "<replay of backward pass 0 of (root), call 0 in forward 0>"
    assert str(again).splitlines()[1].split() == ["field", "shape", "norm"]


@pytest.mark.parametrize("frozen", [False, True])
def test_nothing_is_left_of_a_replay(
    frozen: bool, tensors_alive: Callable[[], Counter[str]]
) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2))
    model.requires_grad_(not frozen)
    x = torch.randn(3, 4, requires_grad=True)
    counts: list[Counter[str]] = []
    for _ in range(3):
        with gradlib.record(model) as recording:
            loss_of(model(x)).backward()
        assert recording.verify(numerical=True).ok
        recording["0"].replay()
        del recording
        counts.append(tensors_alive())
    assert counts[1] == counts[2]


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
@pytest.mark.parametrize("nested", [False, True])
def test_a_checkpoint_of_what_is_outside_of_the_model(nested: bool) -> None:
    """It adds to the ``.grad`` of all tensors that it uses; a replay undoes that."""
    head = nn.Linear(3, 3)
    fired: list[Tensor] = []
    head.weight.register_post_accumulate_grad_hook(fired.append)

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(3, 3)

        def forward(self, x: Tensor) -> Any:
            def inner(z: Tensor) -> Any:
                return checkpoint(head, z, use_reentrant=True) if nested else head(z)

            return checkpoint(lambda z: inner(self.fc(z)), x, use_reentrant=True)

    model, x = Block(), torch.ones(2, 3, requires_grad=True)
    with gradlib.record(model) as recording:
        model(x).sum().backward()
    before = [it.grad.clone() for it in head.parameters() if it.grad is not None]
    assert len(before) == 2
    assert len(fired) == 1
    again = recording[""].replay()
    assert_close(again.grad_input, recording[""].grad_input)
    assert recording.verify(numerical=True).ok
    for parameter, grad in zip(head.parameters(), before, strict=True):
        assert_close(parameter.grad, grad, rtol=0, atol=0)
    assert len(fired) == 1
    head(x).sum().backward()
    assert len(fired) == 2


def test_a_checkpoint_outside_of_the_model_is_left_as_it_was() -> None:
    head = nn.Linear(3, 3)
    x = torch.ones(2, 3, requires_grad=True)
    made = checkpoint(lambda z: head(z), x, use_reentrant=True)
    before = made.grad_fn.run_function

    class Scaled(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x * made

    model = Scaled()
    with gradlib.record(model) as recording:
        model(x).sum().backward(retain_graph=True)
    recording[""].replay()
    assert made.grad_fn.run_function is before


def test_a_backward_that_gives_an_input_nothing() -> None:
    class Straight(torch.autograd.Function):
        @staticmethod
        def forward(_ctx: Any, x: Tensor, y: Tensor) -> Tensor:
            return x + y

        @staticmethod
        def backward(ctx: Any, *grads: Tensor) -> tuple[None, Tensor]:
            assert ctx.needs_input_grad == (True, True)
            return None, grads[0]

    class Model(nn.Module):
        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return Straight.apply(x * 1, y)

    model, (x, y) = Model(), torch.ones(2, 3, requires_grad=True)
    with gradlib.record(model) as recording:
        loss_of(model(x, y)).backward()
    assert recording[""].replay().grad_input[0] is None
    assert_replays(recording, model)
