"""Tensors that are overwritten, or changed behind torch's back."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.testing import assert_close

import gradlib

from .truth import (
    Asks,
    Net,
    Powers,
    assert_is_vjp,
    assert_same_bits,
    grad_like,
    grad_of,
    grads_of,
    loss_of,
    run,
    twins,
)


class Narrow(nn.Module):
    """Returns a part of its input, as a view."""

    def forward(self, x: Tensor) -> Tensor:
        return x[:, 1:]


@pytest.mark.parametrize("reduce", [None, torch.norm])
@pytest.mark.parametrize("also_before", [False, True])
@pytest.mark.parametrize(
    "views",
    [
        [nn.Flatten(0)],
        [nn.Flatten(0), nn.Unflatten(0, (2, 4))],
        [Narrow()],
        [nn.Unflatten(1, (2, 2)), nn.Flatten(), Narrow(), nn.Flatten(0)],
        [nn.Sequential(nn.Flatten(0), nn.Unflatten(0, (2, 4))), Narrow()],
    ],
    ids=["whole", "twice", "part", "several", "nested"],
)
def test_modules_that_return_views_which_are_overwritten(
    views: list[nn.Module], also_before: bool, reduce: Any
) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc, self.views = nn.Linear(3, 4), nn.Sequential(*views)
            self.seen: list[Tensor] = []

        def forward(self, x: Tensor, apart: bool = False) -> Tensor:
            h = self.fc(x)
            self.seen = [h]
            for view in self.views:  # their own values, in the reference
                h = view(h).clone() if apart else view(h)
                self.seen.append(h)
            before = (5 * h).sum() if also_before else 0
            h = h.mul(3) if apart else h.mul_(3)
            return torch.exp(h).sum() + before

    model, plain = twins(Model())
    x = torch.randn(2, 3)
    y = plain(x, apart=True)
    expected = torch.autograd.grad(y, plain.seen)
    with gradlib.record(model, reduce=reduce) as recording:
        model(x).backward()
    if reduce is not None:
        expected = [reduce(it) for it in expected]
    for i in range(len(views)):
        call = recording[f"views.{i}"]
        assert call.note == ""
        assert_close(call.grad_output, (expected[i + 1],))
        given = call.grad_input[0]
        if reduce is None:  # the entries that the view shows, and zeros elsewhere
            assert_close(views[i](given), expected[i + 1])
            assert_close(given.norm(), expected[i + 1].norm())
        else:
            assert_close(given, expected[i + 1])
    if reduce is None:
        assert recording.verify().ok


def test_an_output_that_is_a_view_and_overwritten() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc, self.flat = nn.Linear(3, 4), nn.Flatten()

        def forward(self, x: Tensor) -> Tensor:
            h = self.flat(self.fc(x))
            h.mul_(3)
            return h

    model = Model()
    x = torch.randn(2, 5, 3, requires_grad=True)
    with gradlib.record(model) as recording:
        output = run(model, x)
    weights = torch.arange(1.0, 41).view(2, 20)
    assert_close(recording[""].output, output.detach())
    assert_close(recording[""].grad_output, (weights,))
    assert_close(recording["flat"].output, output.detach() / 3)
    assert_close(recording["flat"].grad_output, (3 * weights,))
    assert_close(recording["fc"].grad_output, (3 * weights.view(2, 5, 4),))
    assert_close(recording["fc"].grad_input, (x.grad,))


@pytest.mark.parametrize("reduce", [None, torch.norm])
@pytest.mark.parametrize("identities", [1, 2])
def test_a_view_that_modules_hand_on_and_one_overwrites(
    identities: int, reduce: Callable[[Tensor], Any] | None
) -> None:
    hand_on = [nn.Dropout(0.0) for _ in range(identities)]
    model = nn.Sequential(
        nn.Linear(3, 4), *hand_on, nn.ReLU(inplace=True), nn.Linear(4, 2)
    )
    x = torch.randn(2, 5, 3)  # so the first output is a view of a matrix
    y = model[0](x).detach().requires_grad_()
    weights = torch.arange(1.0, 21).view(2, 5, 2)
    (model[-1](F.relu(y)) * weights).sum().backward()
    with gradlib.record(model, reduce=reduce) as recording:
        (model(x) * weights).sum().backward()
    assert y.grad is not None
    expected = y.grad if reduce is None else reduce(y.grad)
    for number in range(identities + 1):
        assert_close(recording[str(number)].grad_output, (expected,))
    for number in range(1, identities + 1):
        assert_close(recording[str(number)].grad_input, (expected,))
        assert_close(recording[str(number)].grad_input_total, (expected,))


SHOWN: dict[str, Callable[[Tensor], Tensor]] = {
    "real numbers": lambda z: torch.view_as_real(z)[:, 1:],
    "complex numbers": lambda z: torch.view_as_complex(torch.view_as_real(z) * 1),
    "the real part": lambda z: z.real[1:],
    "the imaginary part": lambda z: z.imag,
    "the conjugate": lambda z: z.conj().T,
    "the imaginary part of that": lambda z: z.conj().imag[:, :1],
}


@pytest.mark.parametrize("name", SHOWN)
def test_a_complex_output_that_is_a_view_and_overwritten(name: str) -> None:
    class Show(nn.Module):
        def forward(self, z: Tensor) -> Tensor:
            return SHOWN[name](z * 1)

    show, z = Show(), torch.randn(2, 3, dtype=torch.complex64, requires_grad=True)

    def loss(y: Tensor) -> Tensor:
        y = y * torch.arange(1, y.numel() + 1).view(y.shape)
        return y.sum().real + 2 * y.abs().sum()

    y = show(z)
    y.retain_grad()
    loss(y * (3 + 2 * (y.is_complex() and 1j))).backward()
    expected, z.grad = z.grad, None
    with gradlib.record(show) as recording:
        overwritten = show(z)
        overwritten.mul_(3 + 2 * (y.is_complex() and 1j))
        loss(overwritten).backward()
    assert y.grad is not None
    assert_close(recording[""].grad_output, (y.grad,))
    assert_close(recording[""].grad_input, (expected,))
    assert recording.verify().ok


class Left(nn.Module):
    """Returns a view of its input."""

    def forward(self, x: Tensor) -> Tensor:
        return x[:, :2]


def test_a_view_that_is_overwritten_beside_its_base_counts_once() -> None:
    class Doubles(nn.Module):
        def forward(self, base: Tensor, view: Tensor) -> Tensor:
            view.mul_(2)
            return base.sum()

    h = 1 * torch.randn(2, 3, requires_grad=True)
    h.retain_grad()
    with gradlib.record(model := Doubles()) as recording:
        model(h, h[0]).backward()
    of_base, of_view = recording[""].grad_input
    assert_close(of_base, torch.tensor([[2.0] * 3, [1.0] * 3]))
    assert of_view is None


def test_a_view_whose_base_is_overwritten_later() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.left = Left()

        def forward(self, x: Tensor) -> Tensor:
            h = 1 * x
            used = 2 * self.left(h)
            h.mul_(10)
            return torch.cat([used, h], dim=1)

    x = torch.ones(1, 3, requires_grad=True)
    with gradlib.record(model := Model()) as recording:
        model(x).sum().backward()
    call = recording["left"]
    assert_close(call.grad_output, (torch.full((1, 2), 2.0),))
    assert_close(call.grad_input, (torch.tensor([[2.0, 2.0, 0.0]]),))
    assert_close(call.grad_input_total, (torch.tensor([[12.0, 12.0, 10.0]]),))


def test_a_view_that_is_used_and_then_overwritten() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.left = Left()

        def forward(self, x: Tensor) -> Tensor:
            h = 1 * x
            part = self.left(h)
            used = 2 * part
            part.mul_(10)
            return torch.cat([used, part, 100 * h], dim=1)

    x = torch.ones(1, 3, requires_grad=True)
    with gradlib.record(model := Model()) as recording:
        model(x).sum().backward()
    # 2 from the first use, 10 times (1 + 100) from what overwrote it.
    assert_close(recording["left"].grad_output, (torch.full((1, 2), 1012.0),))


class Overwrites(nn.Module):
    """Overwrites a view that a module inside returned, and also uses the base."""

    def __init__(self, times: int, early: float) -> None:
        super().__init__()
        self.left, self.times, self.early = Left(), times, early

    def forward(self, x: Tensor) -> Tensor:
        h = 1 * x
        part = self.left(h)
        before = torch.cat([7 * h, self.early * part], dim=1)
        for _ in range(self.times):
            part.mul_(10)
        return torch.cat([before, part], dim=1)


@pytest.mark.parametrize(
    ("times", "early", "grad"), [(1, 0.0, 10.0), (2, 0.0, 100.0), (2, 3.0, 103.0)]
)
def test_a_view_overwritten_beside_another_use_of_its_base(
    times: int, early: float, grad: float
) -> None:
    x = torch.ones(1, 3, requires_grad=True)
    with gradlib.record(model := Overwrites(times, early)) as recording:
        model(x).sum().backward()
    assert_close(recording["left"].grad_output, (torch.full((1, 2), grad),))


def test_statistics_of_a_view_that_is_overwritten() -> None:
    x = torch.ones(1, 3, requires_grad=True)
    model = Overwrites(2, 3.0)
    with gradlib.record(model, reduce=torch.norm) as recording:
        model(x).sum().backward()
    expected = torch.full((1, 2), 103.0).norm()
    assert_close(recording["left"].grad_output, (expected,))


@pytest.mark.cpu
@pytest.mark.parametrize("way", ["data", "set data", "numpy"])
def test_a_hidden_tensor_changed_behind_the_back_of_torch(way: str) -> None:
    class Model(Net):
        def forward(self, x: Tensor) -> Tensor:
            h = self.first(x)
            if way == "data":
                h.data.mul_(2)
            elif way == "set data":
                h.data = h.data * 2
            else:
                h.detach().numpy()[...] *= 2
            return self.second(h)

    model = Model()
    x = torch.randn(2, 3)
    with gradlib.record(model) as recording:
        run(model, x)
    before = F.linear(x, model.first.weight, model.first.bias).detach()
    assert_close(recording["first"].output, before)
    assert_close(recording["second"].args, (2 * before,))
    assert_is_vjp(recording["second"], model.second)


@pytest.mark.cpu
def test_a_hidden_tensor_with_other_data_is_summed_up_anew() -> None:
    class Model(Net):
        def forward(self, x: Tensor) -> Tensor:
            h = self.first(x)
            h.data = h.data * 2
            return self.second(h)

    model, x = Model(), torch.randn(2, 3)
    with gradlib.record(model, reduce=lambda it: it.sum().item()) as recording:
        run(model, x)
    before = F.linear(x, model.first.weight, model.first.bias).sum().item()
    assert_close(recording["first"].output, before)
    assert_close(recording["second"].args, (2 * before,))


class Chained(nn.Module):
    """Returns two outputs, and computes the second from the first."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = 2 * x
        return h, 3 * h


@pytest.mark.parametrize(
    ("weights", "grads"),
    [((0, 1), (None, 1.0)), ((1, 0), (1.0, None)), ((5, 1), (5, 1))],
)
@pytest.mark.parametrize("reduce", [None, Tensor.clone])
def test_an_output_that_only_another_output_is_made_of(
    weights: tuple[int, int], grads: tuple[float | None, ...], reduce: Any
) -> None:
    """A gradient that comes through the call itself is not part of grad_output."""
    x = torch.randn(2, 3, requires_grad=True)
    with gradlib.record(model := Chained(), reduce=reduce) as recording:
        outputs = model(x)
        used = zip(weights, outputs, strict=True)
        torch.stack([it * out.sum() for it, out in used if it]).sum().backward()
    call = recording[""]
    found = [None if it is None else it.mean().item() for it in call.grad_output]
    assert found == [*grads]
    for place, grad in enumerate(grads):
        said = f"gave no gradient to output[{place}] from outside of this call"
        assert (said in call.note) == (grad is None)
    if reduce is None:
        assert recording.verify().ok


def test_several_inputs_that_a_call_returns() -> None:
    class Passes(nn.Module):
        def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            return x, x * y, y

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.passes = Passes()

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            a, b, c = self.passes(2 * x, 3 * y)
            return 5 * a + b + 7 * c

    x, y = torch.randn(2, 3, requires_grad=True), torch.randn(2, 3, requires_grad=True)
    with gradlib.record(model := Model()) as recording:
        model(x, y).sum().backward()
    call = recording["passes"]
    assert_close(call.grad_input, ((5 + 3 * y).detach(), (7 + 2 * x).detach()))
    assert [it[0, 0].item() for it in call.grad_output] == [5, 1, 7]
    for place in range(2):
        assert f"it returned args[{place}] as it was" in call.note
    assert recording.verify().ok


@pytest.mark.parametrize(
    "change", [lambda it: it[:2], Tensor.t], ids=["a part", "transposed"]
)
def test_a_hidden_tensor_that_shows_its_memory_in_another_way(
    change: Callable[[Tensor], Tensor],
) -> None:
    class Model(Net):
        def forward(self, x: Tensor) -> Tensor:
            h = self.first(x).detach()
            self.second(h)
            h.data = change(h.data)
            return self.second(h)

    model = Model()
    model.first = nn.Linear(3, 3)
    model.second = nn.Linear(3, 2)
    x = torch.randn(3, 3)
    with gradlib.record(model) as recording:
        run(model, x)
    before = model.first(x).detach()
    assert_close(recording["second", 0].args, (before,))
    assert_close(recording["second", 1].args, (change(before),))
    assert_is_vjp(recording["second", 1], model.second)


def test_a_tensor_detached_in_place() -> None:
    class Model(Net):
        def forward(self, x: Tensor) -> Tensor:
            return self.second(self.first(x).detach_().requires_grad_())

    model = Model()
    with gradlib.record(model) as recording:
        run(model, torch.randn(2, 3))
    call = recording["second"]
    (grad,) = call.grad_output
    assert_close(call.grad_input, (grad @ model.second.weight.detach(),))
    assert recording["first"].passes == ()


def test_a_tensor_detached_in_place_after_its_use() -> None:
    class Model(nn.Module):
        def __init__(self, inplace: bool) -> None:
            super().__init__()
            self.first, self.twice = nn.Linear(3, 3), Powers(1)
            self.second, self.inplace = nn.Linear(3, 3), inplace

        def forward(self, x: Tensor) -> Tensor:
            h = self.first(x)
            y = self.twice(h)
            return y + self.second(h.detach_() if self.inplace else h.detach())

    x, weights = torch.randn(2, 3), copy.deepcopy(Model(inplace=True).state_dict())
    recordings: list[gradlib.Recording] = []
    for inplace in True, False:
        model = Model(inplace)
        model.load_state_dict(weights)
        with gradlib.record(model) as recording:
            model(x).square().sum().backward()
        recordings.append(recording)
    for call, expected in zip(*recordings, strict=True):
        assert call.note == expected.note
        for field in ("grad_input", "grad_input_total", "grad_output"):
            assert_same_bits(getattr(call, field), getattr(expected, field))


class Recurrent(nn.Module):
    """A recurrent cell, whose second output is its next state."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.Linear(3, 3)

    def forward(self, x: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        state = self.cell(x) + state / 2
        return state.sum(1), state


@pytest.mark.parametrize("each", [False, True])
def test_a_state_detached_in_place_between_forwards(each: bool) -> None:
    """It keeps the hooks of what it was, and is another tensor since."""
    model, steps = Recurrent(), torch.randn(3, 2, 3)

    def run(cut: Callable[[Tensor], Tensor]) -> gradlib.Recording:
        state, losses = torch.zeros(2, 3), []
        with gradlib.record(model) as recording:
            for x in steps:
                y, state = model(x, state)
                losses.append(y.square().sum())
                if each:
                    losses[-1].backward()
                state = cut(state)
            if not each:
                torch.stack(losses).sum().backward()
        return recording

    inplace = run(lambda state: state.detach_().requires_grad_())
    apart = run(lambda state: state.detach().requires_grad_())
    for call, expected in zip(inplace, apart, strict=True):
        assert call.note == expected.note
        assert len(call.passes) == len(expected.passes) == 1
        for field in ("grad_input", "grad_input_total", "grad_output"):
            assert_same_bits(getattr(call, field), getattr(expected, field))
    assert inplace.verify().ok


@pytest.mark.parametrize("hooked", [False, True])
def test_the_gradient_of_a_hidden_tensor_is_asked_for(hooked: bool) -> None:
    class Model(Net):
        def forward(self, x: Tensor) -> Tensor:
            self.hidden = self.first(x)
            return self.second(self.hidden)

    model = Model()
    with gradlib.record(model) as recording:
        output = model(torch.randn(2, 3))
        if hooked:
            model.hidden.register_hook(lambda grad: 10 * grad)
        (grad,) = torch.autograd.grad(loss_of(output), model.hidden)
    assert_close(recording["second"].grad_input_total, (grad,))
    assert_close(recording["first"].grad_output, (grad,))


def test_a_new_call_inside_a_backward_pass() -> None:
    class Model(Net):
        def forward(self, x: Tensor) -> Tensor:
            h = self.first(x)
            h.register_hook(lambda grad: self.first(5 * x).detach()[:, :4] + grad)
            return self.second(h)

    model = Model()
    x = torch.randn(2, 3)
    with gradlib.record(model) as recording:
        run(model, x)
    assert [call.index for call in recording.calls("first")] == [0, 1]
    assert_close(recording["first", 1].args, (5 * x,))
    assert recording["first", 0].note == "args[0] does not require grad"


def test_outputs_changed_in_place_without_gradients() -> None:
    model = Net()
    x = torch.randn(2, 3)
    with gradlib.record(model) as recording:
        output = model(x)
        expected = output.detach().clone()
        loss = loss_of(output)
        loss.backward()
        with torch.no_grad():
            output.mul_(0).add_(1)
            for parameter in model.parameters():
                parameter.sub_(grad_of(parameter))
                grad_of(parameter).zero_()
    assert_close(recording[""].output, expected)
    assert_close(recording["second"].output, expected)
    assert recording["first"].param_grads["weight"].abs().sum() > 0
    assert recording["first"].param_grads_total["weight"].abs().sum() > 0


def test_an_argument_that_the_model_overwrites() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(3, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.fc(x.add_(1))

    model, x = Model(), torch.randn(2, 3)
    before = x.clone()
    with gradlib.record(model) as recording:
        run(model, x)
    assert_close(recording[""].args, (before,))
    assert_close(recording["fc"].args, (before + 1,))


def test_an_optimizer_step_between_rounds() -> None:
    model, plain = twins(Net())
    x = torch.randn(2, 3)
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (model, plain)]
    expected: list[dict[str, Tensor]] = []
    for _ in range(3):
        optimizers[1].zero_grad()
        run(plain, x)
        expected.append({k: v.clone() for k, v in grads_of(plain).items()})
        optimizers[1].step()
    with gradlib.record(model) as recording:
        for _ in range(3):
            optimizers[0].zero_grad(set_to_none=False)
            run(model, x)
            optimizers[0].step()
    for forward, grads in zip(recording.forwards, expected, strict=True):
        call = next(call for call in forward if call.name == "first")
        assert_close(call.param_grads["weight"], grads["first.weight"])
        assert_close(call.param_grads_total["weight"], grads["first.weight"])
    assert_same_bits(dict(model.named_parameters()), dict(plain.named_parameters()))


def test_memory_that_moves_when_somebody_asks_for_a_pointer() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.left, self.right = nn.Linear(3, 3), Asks(), Asks()

        def forward(self, x: Tensor) -> Tensor:
            h = self.first(x)
            return self.left(h) + self.right(h)

    model = Model()
    with gradlib.record(model) as recording:
        run(model, torch.ones(2, 3))
    both = 2 * grad_like((2, 3))
    assert_close(recording["left"].grad_input, (both,))
    assert_close(recording["right"].grad_input_total, (2 * both,))
    assert recording["left"].args[0].equal(recording["right"].args[0])


@pytest.mark.parametrize("shared", [True, False])
def test_tied_weights_written_to_without_a_new_version(shared: bool) -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding, self.head = nn.Embedding(5, 3), nn.Linear(3, 5, bias=False)
            self.head.weight = self.embedding.weight

        def forward(self, i: Tensor) -> Tensor:
            return self.head(self.embedding(i))

    torch.manual_seed(0)
    model = Tied()
    if shared:  # so torch cannot share the memory with the kept value, as on a GPU
        model.share_memory()
    optimizer = torch.optim.AdamW(model.parameters(), 0.1, fused=True)
    with gradlib.record(model) as recording:
        for _ in range(3):
            run(model, torch.arange(5))
            optimizer.step()
    assert recording.verify().ok
