"""`verify` names calls that do not repeat and wrong gradients, and nothing else."""

import itertools
import math
import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any, cast

import numpy
import pytest
import torch
from torch import Tensor, nn

import gradlib
from gradlib import progress
from gradlib.recording.verification import Skipped

from .recorded import recorded


class Double(torch.autograd.Function):
    """Doubles; the factor of its backward is set by each test."""

    factor: Callable[[], float] = staticmethod(lambda: 2.0)

    @staticmethod
    def forward(_ctx: Any, x: Tensor) -> Tensor:
        return 2 * x

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        assert ctx.needs_input_grad[0]
        return cast(Any, Double).factor() * grads[0]


class Doubled(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return Double.apply(x)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc, self.doubled = nn.Linear(4, 4), Doubled()

    def forward(self, x: Tensor) -> Tensor:
        return self.doubled(self.fc(x)).tanh()


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 4), Block(), nn.Dropout(0.5), nn.Linear(4, 2))


@pytest.fixture
def backward(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    def set_factor(factor: Callable[[], float]) -> None:
        monkeypatch.setattr(Double, "factor", staticmethod(factor))

    return set_factor


def test_a_right_backward_passes() -> None:
    recording = recorded(model(), torch.randn(5, 3, requires_grad=True))
    for found in (recording.verify(), recording.verify(numerical=True)):
        assert found.ok
        assert found.agreed == len(recording) == 7
        assert found.disagreements == found.skipped == ()
        assert str(found) == "Verification: 7 of 7 calls agree"


def test_a_wrong_backward_is_named(backward: Callable[..., None]) -> None:
    backward(lambda: 1.0)
    recording = recorded(model(), torch.randn(5, 3))
    assert recording.verify().ok  # it repeats
    found = recording.verify(numerical=True)
    assert not found.ok
    (wrong,) = found.disagreements
    assert (wrong.name, wrong.index, wrong.direction) == ("1.doubled", 0, "backward")
    assert wrong.field == "grad_input[0]"
    assert wrong.error == pytest.approx(0.5, rel=1e-4)
    lines = str(found).splitlines()
    assert lines[0] == "Verification: 4 of 7 calls agree"
    assert lines[-1] == "not checked: 2 calls, with a disagreement inside"
    assert lines[2].startswith("1.doubled  grad_input[0]")
    assert "finite differences disagree" in lines[2]
    assert "1.doubled" in found._repr_html_()


def test_of_many_disagreements_the_first_are_printed(
    backward: Callable[..., None],
) -> None:
    factors = itertools.count(1.0)
    backward(lambda: next(factors))
    with gradlib.record(deep := model(), modules=["1.doubled"]) as recording:
        for _ in range(30):
            deep(torch.randn(5, 3)).sum().backward()
    found = recording.verify()
    assert len(found.disagreements) == 30
    lines = str(found).splitlines()
    named = [it.partition("  ")[0] for it in lines if it.startswith("1.doubled")]
    assert named == ["1.doubled", *(f"1.doubled ({i})" for i in range(1, 20))]
    assert "and 10 more, all in .disagreements" in lines


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(
    ("factor", "error"), [(1.0, 1 / 2), (4.0, 1 / 2), (-2.0, 2.0), (1.998, 1e-3)]
)
def test_the_error_is_a_part_of_the_gradient(
    backward: Callable[..., None], factor: float, error: float, seed: int
) -> None:
    torch.manual_seed(seed)
    backward(lambda: factor)
    recording = recorded(model(), torch.randn(5, 3))
    (wrong,) = recording.verify(numerical=True).disagreements
    assert wrong.error == pytest.approx(error, rel=1e-2)


@pytest.mark.parametrize("seed", range(4))
def test_one_wrong_entry_of_a_gradient_is_found(
    backward: Callable[..., None], seed: int
) -> None:
    torch.manual_seed(seed)
    factor = torch.full((5, 4), 2.0)
    factor[1, 2] = 2.2
    backward(lambda: factor)
    recording = recorded(Block(), torch.randn(5, 4))
    (wrong,) = recording.verify(numerical=True).disagreements
    assert wrong.field == "grad_input[0]"


def test_a_gradient_that_is_nan_where_the_slope_is_a_number(
    backward: Callable[..., None],
) -> None:
    backward(lambda: math.nan)
    recording = recorded(Block(), torch.randn(5, 4))
    assert recording.verify().ok  # it repeats
    (wrong,) = recording.verify(numerical=True).disagreements
    assert (wrong.field, wrong.error) == ("grad_input[0]", math.inf)


@pytest.mark.parametrize(
    "keep", [("args", "grad_output"), ("args", "output", "grad_output")]
)
@pytest.mark.parametrize("change", [Tensor.detach, lambda y: y[:, :2], Tensor.tolist])
def test_an_output_that_takes_the_gradient_no_more(
    change: Callable[[Tensor], Any], keep: tuple[str, ...]
) -> None:
    changes: list[Callable[[Tensor], Any]] = [lambda y: y]

    class Doubles(nn.Module):
        def forward(self, x: Tensor) -> Any:
            return changes[-1](2 * x)

    with gradlib.record(model := Doubles(), keep=keep) as recording:
        model(torch.randn(5, 3, requires_grad=True)).sum().backward()
    assert recording.verify().ok
    changes.append(change)
    (wrong,) = recording.verify().disagreements
    assert (wrong.direction, wrong.error) == ("forward", math.inf)


def test_where_differences_are_no_numbers_they_say_nothing() -> None:
    class Overflows(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return (1000 * x).exp()

    found = recorded(Overflows(), torch.ones(3, requires_grad=True)).verify(
        numerical=True
    )
    assert found.ok
    assert found.agreed == 1
    assert found.unchecked == ("args[0]",)


def test_a_backward_that_does_not_repeat_is_named(
    backward: Callable[..., None],
) -> None:
    factors = iter([2.0] + [3.0] * 20)
    backward(lambda: next(factors))
    recording = recorded(model(), torch.randn(5, 3))
    found = recording.verify()
    (wrong,) = found.disagreements
    assert (wrong.name, wrong.field) == ("1.doubled", "grad_input[0]")
    assert wrong.error == pytest.approx(1 / 3)
    # Neither the block nor the model around it is listed, and neither agrees.
    assert found.agreed == 4


@pytest.mark.parametrize(
    "noise",
    [
        lambda grad: torch.rand_like(grad),
        lambda _grad: random.random(),
        lambda _grad: float(numpy.random.rand()),
    ],
)
@pytest.mark.parametrize("drawn", [0, 1])
def test_a_backward_that_draws_random_numbers_is_named_with_the_reason(
    noise: Callable[[Tensor], Any], drawn: int
) -> None:
    class Noisy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(3, 3)

        def forward(self, x: Tensor) -> Tensor:
            y: Any = self.linear(x)
            y.register_hook(lambda grad: grad + noise(grad))
            return y.tanh()

    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 3), Noisy())
    with gradlib.record(net) as recording:
        loss = net(torch.randn(2, 3)).sum()
        torch.randn(drawn)  # without it, a replay could draw the same numbers again
        loss.backward()
    state, pythons = torch.get_rng_state(), random.getstate()
    wrong = recording.verify().disagreements
    assert {it.name for it in wrong} == {"1"}
    assert {it.reason for it in wrong} == {
        "its backward does not repeat: two passes with the same values differ, as "
        "where it draws random numbers"
    }
    assert torch.equal(torch.get_rng_state(), state)
    assert random.getstate() == pythons


def test_a_forward_that_does_not_repeat_is_named() -> None:
    class Drifts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.factors = iter(range(1, 99))

        def forward(self, x: Tensor) -> Tensor:
            return x * next(self.factors)

    found = recorded(nn.Sequential(nn.Linear(3, 3), Drifts()), torch.ones(2, 3))
    wrong = found.verify().disagreements
    assert [(it.name, it.direction, it.field) for it in wrong] == [
        ("1", "forward", "output"),
        ("1", "backward", "grad_input[0]"),
    ]


@pytest.mark.parametrize(("apart", "ok"), [(5e-6, True), (5e-5, False)])
def test_values_may_be_as_far_apart_as_their_dtype_allows(
    apart: float, ok: bool
) -> None:
    class Drifts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.factors = iter([1.0] + [1 + apart] * 20)

        def forward(self, x: Tensor) -> Tensor:
            return x * next(self.factors)

    found = recorded(Drifts(), torch.ones(2, 3, requires_grad=True)).verify()
    assert found.ok is ok


def test_an_output_of_another_shape() -> None:
    class Shrinks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.sizes = iter((3, 2, 1))

        def forward(self, x: Tensor) -> Tensor:
            return x[: next(self.sizes)]

    recording = recorded(Shrinks(), torch.ones(4, requires_grad=True))
    (wrong,) = recording.verify().disagreements
    assert (wrong.field, wrong.error) == ("output", float("inf"))
    assert wrong.reason.startswith("shapes [3] and [2]: it may use what was not kept")


def test_another_shape_by_pythons_random_numbers_is_explained() -> None:
    class Drops(nn.Module):
        def forward(self, x: Tensor) -> list[Tensor]:
            return [2 * x] * random.randrange(1, 1000)

    random.seed(0)  # else two draws may be equal
    with gradlib.record(model := Drops()) as recording:
        model(torch.ones(1, requires_grad=True))[0].sum().backward()
    (wrong,) = recording.verify().disagreements
    assert "values: it draws from Python's random or NumPy" in wrong.reason


def test_tolerances(backward: Callable[..., None]) -> None:
    factors = iter([2.0] + [2.02] * 99)
    backward(lambda: next(factors))
    recording = recorded(Doubled(), torch.randn(50, 3, requires_grad=True))
    assert not recording.verify().ok
    assert recording.verify(rtol=0.02).ok
    assert not recording.verify(rtol=0.005).ok
    assert recording.verify(rtol=0.0, atol=0.1).ok


def test_tolerances_of_finite_differences(backward: Callable[..., None]) -> None:
    backward(lambda: 1.999)
    recording = recorded(Doubled(), torch.randn(50, 3, requires_grad=True))
    (wrong,) = recording.verify(numerical=True).disagreements
    assert wrong.error == pytest.approx(5e-4, rel=0.1)
    assert recording.verify(numerical=True, rtol=1e-3).ok
    assert not recording.verify(numerical=True, rtol=0.0, atol=1.0).ok
    backward(lambda: 2.0)
    assert recording.verify(numerical=True, rtol=1e-9, atol=1.0).ok


def test_each_pass_is_checked(backward: Callable[..., None]) -> None:
    factors = iter([2.0, 5.0] + [2.0] * 9)
    backward(lambda: next(factors))
    with gradlib.record(net := Doubled()) as recording:
        output = net(torch.randn(3, requires_grad=True))
        output.sum().backward(retain_graph=True)
        output.sum().backward()
    (wrong,) = recording.verify().disagreements
    assert wrong.field == "passes[1].grad_input[0]"


def test_what_cannot_be_replayed_is_listed() -> None:
    net = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2))
    with gradlib.record(net) as recording:
        net(torch.randn(2, 3)).sum().backward()
        with torch.no_grad():
            net[0](torch.randn(2, 3))
        one = recording.verify()
        with torch.no_grad():
            for _ in range(3):
                net(torch.randn(2, 3))
    assert one.ok
    assert one.agreed == 3
    (skipped,) = one.skipped
    assert (skipped.name, skipped.index) == ("0", 1)
    assert skipped.reason == "gradients were disabled when it was called"
    assert str(one).splitlines()[-1] == (
        "not replayed, 1 call: 0 (1) (gradients were disabled when it was called)"
    )
    last = str(recording.verify()).splitlines()[-2:]
    assert " ".join(last).startswith(
        "not replayed, 10 calls: 0 (1), (root) (1), 0 (2), 1 (1) and 6 more (gradients"
    )


def test_nothing_verified_is_not_ok() -> None:
    net = nn.Linear(3, 3)
    with gradlib.record(net) as recording:
        net(torch.randn(2, 3))
    assert not recording.verify().ok
    for options in ({"reduce": gradlib.tensor_stats}, {"keep": "output"}):
        with pytest.raises(gradlib.CannotReplayError):
            recorded(net, torch.randn(2, 3), **options).verify()


def test_what_a_pass_was_not_asked_for_is_not_missed() -> None:
    net: Any = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2))
    with gradlib.record(net) as recording:
        torch.autograd.grad(net(torch.randn(2, 3)).sum(), net[1].weight)
    assert recording.verify().ok


def test_what_one_pass_shows_is_kept_where_another_cannot_be_replayed(
    backward: Callable[..., None],
) -> None:
    factors = iter([3.0] + [2.0] * 9)
    backward(lambda: next(factors))
    with gradlib.record(net := Doubled()) as recording:
        x = torch.ones(3, requires_grad=True)
        output = net(x).square().sum()
        torch.autograd.grad(output, x, retain_graph=True)
        torch.autograd.grad(output, x, create_graph=True)
        torch.autograd.grad(output, x)
    found = recording.verify()
    assert [it.field for it in found.disagreements] == ["passes[0].grad_input[0]"]
    assert len(found.skipped) == 1


def test_tensors_without_values() -> None:
    net = nn.Linear(3, 4, device="meta")
    recording = recorded(net, torch.randn(5, 3, device="meta", requires_grad=True))
    assert "without values" in recording.verify(numerical=True).skipped[0].reason


def test_an_output_that_was_not_asked_for_is_not_compared() -> None:
    class Draws(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x + random.random()

    x = torch.randn(5, 3, requires_grad=True)
    assert not recorded(Draws(), x).verify().ok
    assert recorded(Draws(), x, keep=["args", "grad_input", "grad_output"]).verify().ok


def test_what_was_skipped_prints() -> None:
    all_passes = Skipped("fc", 1, "no history")
    assert str(all_passes).splitlines()[1:] == [
        "module  passes  reason",
        "fc (1)  all     no history",
    ]
    assert str(replace(all_passes, backward=0)).endswith("fc (1)  0       no history")


def test_only_some_fields_kept() -> None:
    recording = recorded(model(), torch.randn(5, 3), keep=["args", "grad_output"])
    assert recording.verify().ok


def test_progress(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    recording = recorded(model(), torch.randn(5, 3))
    monkeypatch.setattr(progress, "PATIENCE", -1.0)
    recording.verify()
    assert capsys.readouterr().err == ""
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    recording.verify()
    shown = capsys.readouterr().err
    assert shown.startswith("\rverify: 0 of 7 calls\rverify: 1 of 7 calls")
    assert shown.endswith(" \r")
    monkeypatch.setattr(progress, "PATIENCE", math.inf)
    recording.verify()
    assert capsys.readouterr().err == ""


def test_one_call_agrees() -> None:
    with gradlib.record(model := nn.Linear(2, 1)) as recording:
        model(torch.ones(3, 2)).sum().backward()
    assert str(recording.verify()) == "Verification: 1 of 1 call agrees"


@pytest.mark.parametrize("numerical", [False, True])
def test_a_recording_without_calls(numerical: bool) -> None:
    with gradlib.record(model()) as recording:
        pass
    found = recording.verify(numerical=numerical)
    assert not found.ok
    assert str(found) == "Verification: 0 of 0 calls agree"
