"""`verify` names what does not repeat and what is wrong, and nothing else."""

import math
import random
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import numpy
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.nn.utils import prune

import gradlib
from gradlib import progress


class Double(torch.autograd.Function):
    """Doubles; what the backward multiplies by is told each time."""

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


def recorded(model: nn.Module, *args: Tensor, **options: Any) -> gradlib.Recording:
    with gradlib.record(model, **options) as recording:
        output = model(*args)
        output = output if isinstance(output, Tensor) else output[0]
        weights = torch.randn_like(output)
        loss = (output * weights).sum()
        (loss.abs() if loss.is_complex() else loss).backward()
    return recording


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
    assert lines[-1] == "not checked: 2, with a disagreement inside"
    assert lines[2].startswith("1.doubled  grad_input[0]")
    assert "finite differences disagree" in lines[2]
    assert "1.doubled" in found._repr_html_()


def test_of_many_disagreements_the_first_are_printed(
    backward: Callable[..., None],
) -> None:
    backward(lambda: 1.0)
    with gradlib.record(deep := model(), modules=["1.doubled"]) as recording:
        for _ in range(30):
            deep(torch.randn(5, 3)).sum().backward()
    found = recording.verify(numerical=True)
    assert len(found.disagreements) == 30
    lines = str(found).splitlines()
    assert lines[2].startswith("1.doubled  ")
    assert lines[21].startswith("1.doubled (19)  ")
    assert lines[22] == "and 10 more, all in .disagreements"


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
    assert wrong.reason == "shapes [3] and [2]"


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


class Experts(nn.Module):
    """It leaves a loss in an attribute, and other tensors that do not matter."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(3, 2)
        self.log = [torch.zeros(1)]

    def forward(self, x: Tensor) -> Tensor:
        p = self.router(x).softmax(-1)
        self.auxiliary = {"loss": p.square().mean()}
        self.seen = p.detach()
        self.log.append(self.seen)
        self.first = getattr(self, "first", p.sum())
        self.returned = p @ torch.ones(2, 3) * x
        return self.returned


def test_a_gradient_that_came_through_an_attribute_is_the_reason() -> None:
    torch.manual_seed(0)
    net: Any = nn.Sequential(nn.Linear(3, 3), nn.Sequential(Experts()))
    for add, modules in ((0, None), (1, None), (1, ["1"])):
        with gradlib.record(net, modules=modules) as recording:
            loss = net(torch.randn(4, 3)).sum()
            (loss + add * net[1][0].auxiliary["loss"]).backward()
        wrong = recording.verify(numerical=True).disagreements
        if not add:
            assert wrong == ()
            continue
        (only,) = wrong
        assert only.field == "grad_input[0]"
        name = "auxiliary" if modules is None else "0.auxiliary"
        assert only.reason.endswith(f"by another way too: attribute {name}")


def test_a_gradient_that_came_to_a_call_inside_is_the_reason() -> None:
    torch.manual_seed(0)
    inner = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3), nn.Tanh())
    net = nn.Sequential(nn.Linear(3, 3), inner)
    seen: list[Tensor] = []

    def look(_module: nn.Module, _args: object, output: Tensor) -> None:
        seen.append(output)

    inner[1].register_forward_hook(look)
    x = torch.randn(4, 3, requires_grad=True)
    with gradlib.record(net) as recording:
        for _ in range(2):
            loss = net(x).sum()
            loss.backward(retain_graph=True)
            (loss + seen[-1].square().mean()).backward()
    wrong = recording.verify().disagreements
    assert [(it.name, it.index, it.field) for it in wrong] == [
        ("1", i, "passes[1].grad_input[0]") for i in range(2)
    ]
    for it, said in zip(wrong, ("output of 1.1", "output of 1.1 (1)"), strict=True):
        assert it.reason.endswith(f"by another way too: {said}")
    assert not any(module._forward_hooks for module in (net, inner, inner[0]))


class Forgets(torch.autograd.Function):
    """Squares, with a backward that forgets a factor."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.square()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return x * grads[0]


class Squares(nn.Module):
    def __init__(self, square: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.square = square

    def forward(self, x: Tensor) -> Tensor:
        return self.square(x)


@pytest.mark.parametrize("is_right", [True, False])
def test_of_a_penalty_the_pass_that_made_the_graph_is_checked(is_right: bool) -> None:
    square: Any = torch.square if is_right else Forgets.apply
    net = nn.Sequential(nn.Linear(3, 4), Squares(square), nn.Linear(4, 1))
    x = torch.randn(5, 3, requires_grad=True)
    with gradlib.record(net) as recording:
        y = net(x)
        (grad,) = torch.autograd.grad(y.sum(), x, create_graph=True)
        (y.mean() + grad.square().sum()).backward()
    found = recording.verify(numerical=True)
    names = ["", "0", "1", "2"] if is_right else ["0", "1", "2"]
    assert [(it.backward, it.name) for it in found.skipped] == [
        (1, name) for name in names
    ]
    footer = " ".join(str(found).split())
    assert f"not replayed, pass 1 of {len(names)} calls: " in footer
    if is_right:
        assert (found.ok, found.agreed) == (True, 4)
    else:
        (wrong,) = found.disagreements
        assert (wrong.name, wrong.field) == ("1", "passes[0].grad_input[0]")
        assert "not checked: 1, with a disagreement inside" in footer


class Doubles(nn.Module):
    """It doubles what it is given, in place."""

    def __init__(self, gives: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.gives = gives

    def forward(self, x: Tensor) -> Tensor:
        return self.gives(x.mul_(2))


@pytest.mark.parametrize("is_used", [True, False])
@pytest.mark.parametrize(
    ("gives", "shows"),
    [
        (Tensor.clone, lambda base: base[:, :2]),
        (Tensor.clone, lambda base: base),
        (lambda x: x, lambda base: base[:, :2]),
    ],
    ids=["another, of a view", "another", "itself, a view"],
)
def test_a_gradient_that_came_by_an_input_it_overwrites_is_the_reason(
    gives: Callable[[Tensor], Tensor], shows: Callable[[Tensor], Tensor], is_used: bool
) -> None:
    first, doubles = nn.Linear(3, 4), Doubles(gives)
    with gradlib.record(nn.ModuleList([first, doubles])) as recording:
        base = first(torch.randn(5, 3))
        loss = doubles(shows(base)).sum()
        (loss + base.square().sum() if is_used else loss).backward()
    found = [it.reason for it in recording.verify().disagreements]
    said = "gradients may have come by another way too: args[0], which it overwrites"
    assert found == [said] * is_used


def assert_named_as_another_way(model: Any, of: Callable[[Any], Tensor]) -> None:
    """Go back by what ``model.tells`` returned too, and find that this is the reason.

    Args:
        model: What calls that module.
        of: Gives, of what it returned, the tensor.
    """
    net = nn.Sequential(nn.Linear(3, 3), model)
    seen: list[Tensor] = []
    model.tells.register_forward_hook(lambda *_: seen.append(of(_[-1])))
    with gradlib.record(net) as recording:
        loss = net(torch.randn(4, 3)).sum()
        (loss + seen[0].square().mean()).backward()
    (wrong,) = recording.verify().disagreements
    assert (wrong.name, wrong.field) == ("1", "grad_input[0]")
    assert wrong.reason.endswith("by another way too: output of 1.tells")


def test_a_call_inside_that_returns_more_than_tensors_is_the_reason() -> None:
    class Tells(nn.Module):
        def forward(self, x: Tensor) -> tuple[Tensor, None, int, Tensor]:
            return x.tanh(), None, 7, x.detach()

    class Uses(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tells = Tells()

        def forward(self, x: Tensor) -> Tensor:
            y, _, times, _ = self.tells(x)
            return y * times

    assert_named_as_another_way(Uses(), lambda output: output[0])


def test_a_call_inside_is_the_reason_where_others_have_no_like() -> None:
    more = iter(range(99))  # none while it is recorded

    class Uses(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tells, self.mapped = nn.Tanh(), nn.Tanh()

        def forward(self, x: Tensor) -> Tensor:
            y = self.tells(x)
            for _ in range(next(more)):
                self.tells(x)
            mapped: Any = torch.vmap(self.mapped)(x)  # whose call has no values
            return y + mapped

    assert_named_as_another_way(Uses(), lambda output: output)


class Given(nn.Module):
    """It cannot be computed again: it is given an object."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)

    def forward(self, x: Tensor, _object: object = None) -> Tensor:
        return 2 * self.linear(x)


class Gives(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.given = Given()

    def forward(self, x: Tensor) -> Tensor:
        return self.given(x, object()).tanh()


def test_it_may_have_come_to_a_call_in_one_that_is_skipped() -> None:
    seen: list[Tensor] = []

    def look(_module: nn.Module, _args: object, output: Tensor) -> None:
        seen.append(output)

    net = Gives()
    net.given.linear.register_forward_hook(look)
    with gradlib.record(net) as recording:
        out = net(torch.randn(4, 3, requires_grad=True))
        (out.sum() + seen[-1].square().sum()).backward()
    found = recording.verify()
    assert [it.name for it in found.skipped] == ["given"]
    (wrong,) = found.disagreements
    assert wrong.reason.endswith("output of given.linear")


@pytest.mark.parametrize("through_the_output_too", [False, True])
def test_a_pass_that_began_inside_of_a_call_is_not_held_against_it(
    through_the_output_too: bool,
) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(3, 4), nn.Linear(4, 2)

        def forward(self, x: Tensor) -> Tensor:
            self.inner = torch.tanh(self.first(x))
            return self.last(self.inner)

    net, x = Net(), torch.randn(2, 3, requires_grad=True)
    with gradlib.record(net) as recording:
        y = net(x)
        torch.autograd.grad(net.inner.sum(), x, retain_graph=True)
        if through_the_output_too:
            torch.autograd.grad(y.sum(), x)
    found = recording.verify()
    assert found.ok
    skipped = {it.name: it.reason for it in found.skipped}
    assert ("" in skipped) is not through_the_output_too
    if not through_the_output_too:
        assert skipped[""].startswith("its backward passes began inside of it")


def test_weights_that_a_call_changes_before_it_calls_what_has_them() -> None:
    class Teaches(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.student, self.teacher = nn.Linear(3, 3), nn.Linear(3, 3)
            self.tied = nn.Linear(3, 3)
            self.tied.weight = self.teacher.weight

        def forward(self, x: Tensor) -> Tensor:
            before = self.tied(x)
            with torch.no_grad():
                for own, other in zip(
                    self.teacher.parameters(), self.student.parameters(), strict=True
                ):
                    own.lerp_(other, 0.1)
            return self.student(x) - self.teacher(x) - self.tied(x) - before.detach()

    net = Teaches()
    with gradlib.record(net) as recording:
        for _ in range(3):
            net(torch.randn(4, 3, requires_grad=True)).square().sum().backward()
    found = recording.verify()
    assert found.ok, str(found)
    assert found.agreed == 15 - 3  # one call of three is cut off from the loss


def test_what_a_call_reads_from_another_object_may_have_changed() -> None:
    class Counts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.state = nn.Linear(3, 3), SimpleNamespace(count=0)

        def forward(self, x: Tensor) -> Tensor:
            self.state.count += 1
            return self.inner(x) * self.state.count

    net = Counts()
    with gradlib.record(net) as recording:
        net(torch.randn(4, 3, requires_grad=True)).sum().backward()
    output, grad = recording.verify().disagreements
    assert (output.field, grad.field) == ("output", "grad_input[0]")
    assert output.reason == (
        "it may use what was not kept as it was then, such as an object of another "
        "class, a hook or a setting"
    )
    assert grad.reason == ""  # it is that of another output


@pytest.mark.parametrize("draw", [random.random, numpy.random.rand])
def test_what_a_call_draws_from_other_generators_is_named(
    draw: Callable[[], float],
) -> None:
    class Scales(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x * draw()

    net = nn.Sequential(nn.Linear(3, 3), Scales(), nn.Dropout(0.5))
    with gradlib.record(net) as recording:
        net(torch.randn(4, 3)).sum().backward()
    found = recording.verify()
    assert found.agreed == 2
    assert found.disagreements[0].name == "1"
    assert found.disagreements[0].reason == (
        "it draws from Python's random or NumPy, whose states are not kept as torch's "
        "are"
    )


def _doubles(_module: object, _args: object, output: Tensor) -> Tensor:
    return 2 * output


def _forward(layer: nn.Module) -> Any:
    return layer.register_forward_hook(_doubles)


def _before(layer: nn.Module) -> Any:
    def doubled(_m: object, args: tuple[Tensor]) -> tuple[Tensor]:
        return (2 * args[0],)

    return layer.register_forward_pre_hook(doubled)


def _with_keywords(layer: nn.Module) -> Any:
    def doubled(_m: object, _args: object, _kwargs: object, output: Tensor) -> Tensor:
        return 2 * output

    return layer.register_forward_hook(doubled, with_kwargs=True)


def _backward(layer: nn.Module) -> Any:
    return layer.register_full_backward_hook(lambda _m, grads, _outs: (2 * grads[0],))


@pytest.mark.parametrize("hook", [_forward, _before, _with_keywords, _backward])
@pytest.mark.parametrize("when", ["in the block", "after it", "at its first call"])
def test_a_hook_that_was_taken_away(hook: Callable[[Any], Any], when: str) -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))
    handles = [hook(model[1])]
    if when == "at its first call":  # it takes itself away
        model[1].register_forward_hook(lambda *_: handles[0].remove())
    with gradlib.record(model) as recording:
        model(torch.randn(2, 3)).sum().backward()
        if when == "in the block":
            handles[0].remove()
            model(torch.randn(2, 3)).sum().backward()
    handles[0].remove()
    after = dict(model[1]._forward_pre_hooks), dict(model[1]._forward_hooks)
    found = recording.verify()
    assert found.ok, str(found)
    assert after == (model[1]._forward_pre_hooks, model[1]._forward_hooks)


def _without_bias(layer: nn.Module) -> None:
    cast(Any, layer).bias = None


def _pruned(layer: nn.Module) -> None:
    prune.l1_unstructured(layer, "weight", 0.5)


def _with_another(layer: nn.Module) -> None:
    layer.register_parameter("scale", nn.Parameter(torch.ones(2)))


@pytest.mark.parametrize("change", [_without_bias, _pruned, _with_another])
def test_parameters_that_came_or_went(change: Callable[[nn.Module], None]) -> None:
    net = nn.Sequential(nn.Linear(2, 2))
    with gradlib.record(net) as recording:
        net(torch.randn(3, 2)).sum().backward()
        change(net[0])
        net(torch.randn(3, 2)).sum().backward()
    names = {*dict(net.named_parameters()), *dict(net.named_buffers())}
    assert recording.verify().agreed == len(recording)
    assert names == {*dict(net.named_parameters()), *dict(net.named_buffers())}
    change(other := nn.Linear(2, 2))
    assert vars(net[0]).keys() == vars(other).keys()


class Optional(nn.Module):
    """A layer, and what may be there besides."""

    def __init__(self) -> None:
        super().__init__()
        self.fc, self.more = nn.Linear(3, 3), nn.ParameterList([torch.ones(3)])
        self.register_parameter("scale", None)

    def forward(self, x: Tensor) -> Tensor:
        x = self.fc(x)
        more: Any = self.more
        scale: Any = self.scale
        for factor in more:
            x = x * factor
        if "shift" in self._buffers:
            x = x + self.get_buffer("shift")
        return x if scale is None else x * scale


@pytest.mark.parametrize(
    "change",
    [
        lambda it: setattr(it, "scale", nn.Parameter(torch.full((3,), 2.0))),
        lambda it: it.more.append(nn.Parameter(torch.full((3,), 2.0))),
        lambda it: it.register_buffer("shift", torch.ones(3)),
        lambda it: prune.l1_unstructured(it.fc, "weight", 0.5),
    ],
)
def test_what_came_between_two_forwards(change: Callable[[Any], object]) -> None:
    model, x = Optional(), torch.randn(2, 3)
    with gradlib.record(model) as recording:
        model(x).sum().backward()
        change(model)
        model(x).sum().backward()
    found = recording.verify()
    assert found.agreed == len(recording), str(found)


def test_a_hook_that_was_replaced() -> None:
    model: Any = nn.Sequential(nn.Linear(3, 3), nn.Tanh())

    def hooked(factor: float) -> Any:
        return model[1].register_full_backward_hook(
            lambda _m, grads, _outs: (grads[0] * factor,)
        )

    with gradlib.record(model) as recording:
        handle = hooked(2)
        model(torch.randn(2, 3)).sum().backward()
        handle.remove()
        hooked(3)
        model(torch.randn(2, 3)).sum().backward()
    assert recording.verify().ok


def test_a_pass_that_raised_half_way() -> None:
    class Residual(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(3, 3)

        def forward(self, x: Tensor) -> Tensor:
            return x + self.fc(x)

    model, x = Residual(), torch.randn(2, 3, requires_grad=True)
    with gradlib.record(model) as recording:
        y = model(x)
        y.sum().backward(retain_graph=True)
        with torch.no_grad():
            model.fc.weight.mul_(2)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            y.sum().backward()
    found = recording.verify()
    assert found.disagreements == ()
    assert "Backward pass 1 raised" in found.skipped[0].reason


def test_tangents_are_not_kept() -> None:
    net, x = nn.Linear(2, 2), torch.randn(3, 2)
    with gradlib.record(net) as recording:
        net(x).sum().backward()
        with forward_ad.dual_level():
            dual = net(forward_ad.make_dual(x, torch.ones_like(x)))
            primal, tangent = forward_ad.unpack_dual(dual)
            assert tangent is not None
            (primal.sum() + tangent.sum()).backward()
    found = recording.verify()
    assert found.disagreements == ()
    assert found.agreed == 1
    assert "may have carried tangents" in found.skipped[0].reason


def test_a_hook_that_was_set_since() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))
    with gradlib.record(model) as recording:
        model(torch.randn(2, 3)).sum().backward()
    _forward(model[1])
    assert recording.verify().ok


@pytest.mark.parametrize("slope", [2.0, 2.2])
@pytest.mark.parametrize("offset", [0.0, 100.0, 1e6])
def test_an_output_that_is_large_beside_its_slopes(slope: float, offset: float) -> None:
    class Energy(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            ctx.save_for_backward(x)
            return x.square().sum(1) + offset

        @staticmethod
        def backward(ctx: Any, *grads: Tensor) -> Tensor:
            (x,) = ctx.saved_tensors
            return slope * x * grads[0][:, None]

    class Model(nn.Module):
        def forward(self, x: Tensor) -> Any:
            return Energy.apply(x)

    torch.manual_seed(0)
    with gradlib.record(model := Model()) as recording:
        model(torch.randn(8, 5).double().requires_grad_()).sum().backward()
    found = recording.verify(numerical=True)
    assert found.ok == (slope == 2.0)
    if not found.ok:
        assert found.disagreements[0].error == pytest.approx(1 - 2.0 / slope, rel=0.5)


@pytest.mark.cpu
def test_finite_differences_of_what_onednn_lays_out() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.act = nn.ReLU()

        def forward(self, x: Tensor) -> Tensor:
            packed: Any = x
            return self.act(packed.to_mkldnn()).to_dense()

    with gradlib.record(model := Model()) as recording:
        model(torch.randn(2, 3, requires_grad=True)).sum().backward()
    assert recording.verify().ok
    found = recording.verify(numerical=True)
    assert not found.disagreements
    reasons = {it.name: it.reason for it in found.skipped}
    assert "oneDNN, which knows no float64" in reasons["act"]


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


def test_a_pass_through_the_graph_of_another() -> None:
    net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))
    x = torch.randn(5, 3, requires_grad=True)
    with gradlib.record(net) as recording:
        (grad,) = torch.autograd.grad(net(x).sum(), x, create_graph=True)
        grad.norm().backward()
    found = recording.verify()
    assert found.disagreements == ()
    reason = found.skipped[0].reason
    assert "the graph of pass 0, which had" in reason
    assert reason.endswith("Pass 0 can be computed again.")
    assert len(found.skipped) == found.calls == 4
    again = recording["0"].passes[0].replay()
    torch.testing.assert_close(again.grad_input, recording["0"].passes[0].grad_input)


@pytest.mark.cpu  # torch has no batching rule for cuDNN's way back
def test_a_pass_through_the_graph_of_a_batched_one() -> None:
    net: Any = nn.GRU(3, 4, batch_first=True)
    x = torch.randn(2, 5, 3, requires_grad=True)
    with gradlib.record(net) as recording:
        net(x)[0].sum().backward()
        output, _ = net(x)
        vectors = torch.ones(2, *output.shape)
        (grads,) = torch.autograd.grad(
            output, x, vectors, is_grads_batched=True, create_graph=True
        )
        (grads.square().sum() + output.sum()).backward()
    found = recording.verify()
    assert found.disagreements == ()
    (skipped,) = found.skipped
    assert "the graph of a pass with is_grads_batched" in skipped.reason
    assert "Without is_grads_batched, the first of its rows can be" in skipped.reason
    assert (found.calls, skipped.index) == (2, 1)


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


def test_only_some_fields_kept() -> None:
    recording = recorded(model(), torch.randn(5, 3), keep=["args", "grad_output"])
    assert recording.verify().ok


# What finite differences must not be fooled by


class Norm32(nn.Module):
    """Computes in float32, whatever it is given, as many models do."""

    def forward(self, x: Tensor) -> Tensor:
        wide = x.to(torch.float32)
        wide = wide @ torch.ones(x.shape[-1], x.shape[-1]).tril()
        scale = torch.ones(x.shape[-1], dtype=torch.float32)
        return (wide * scale * wide.float().square().mean(-1, True).rsqrt()).to(x.dtype)


class Complex(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, dtype=torch.complex64))

    def forward(self, x: Tensor) -> Tensor:
        return (x * self.weight).exp()


class Taking(nn.Module):
    """It is given its own parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4))

    def forward(self, x: Tensor, weight: Tensor | None = None) -> Tensor:
        if weight is None:
            return self(x, self.weight)
        return (x * weight).sin() + self.weight.cos()


class Twice(nn.Module):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        y = x.sin()
        return y, y, x


class Both(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.twice = Twice()

    def forward(self, x: Tensor) -> Tensor:
        a, b, c = self.twice(2 * x)
        return a + 2 * b + 3 * c


RIGHT: dict[str, tuple[Callable[[], nn.Module], Callable[[], Tensor]]] = {
    "kinks at the recorded point": (
        lambda: nn.Sequential(
            nn.Conv2d(2, 4, 3), nn.ReLU(), nn.ReLU(), nn.MaxPool2d(2), nn.ReLU()
        ),
        lambda: torch.randn(2, 2, 12, 12),
    ),
    "zeros": (
        lambda: nn.Sequential(nn.Linear(4, 4), nn.ReLU()),
        lambda: torch.zeros(3, 4),
    ),
    "batch norm": (
        lambda: nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Tanh()),
        lambda: torch.randn(6, 4),
    ),
    "float32 inside": (
        lambda: nn.Sequential(nn.Linear(4, 4), Norm32()),
        lambda: torch.randn(6, 4),
    ),
    "complex": (lambda: nn.Sequential(Complex(), Complex()), lambda: torch.randn(2, 3)),
    "words": (
        lambda: nn.Sequential(nn.Embedding(5, 4), nn.LayerNorm(4), nn.GELU()),
        lambda: torch.tensor([[0, 3], [3, 3]]),
    ),
    "sparse gradients": (
        lambda: nn.Sequential(nn.Embedding(5, 4, sparse=True), nn.Tanh()),
        lambda: torch.tensor([[0, 3], [3, 3]]),
    ),
    "recurrent": (lambda: nn.LSTM(3, 4, 2, dropout=0.4), lambda: torch.randn(5, 2, 3)),
    "attention": (
        lambda: nn.TransformerEncoderLayer(4, 2, 8, dropout=0.3, batch_first=True),
        lambda: torch.randn(2, 5, 4),
    ),
    "its own parameter as argument": (Taking, lambda: torch.randn(3, 4)),
    "one tensor returned twice": (Both, lambda: torch.randn(3, requires_grad=True)),
    "bfloat16": (
        lambda: nn.Sequential(nn.Linear(4, 4), nn.Tanh()).to(torch.bfloat16),
        lambda: torch.randn(3, 4, dtype=torch.bfloat16),
    ),
}


# cuDNN has a random state of its own for dropout: such a call is not replayed.
ON_A_CPU = pytest.param("recurrent", marks=pytest.mark.cpu)


@pytest.mark.parametrize(
    "kind", [ON_A_CPU if it == "recurrent" else it for it in RIGHT]
)
def test_right_ones_pass(kind: str) -> None:
    torch.manual_seed(0)
    make, given = RIGHT[kind]
    net = make()
    recording = recorded(net, given())
    before = torch.get_rng_state(), torch.get_default_dtype()
    found = recording.verify(numerical=True)
    assert found.ok, str(found)
    assert found.skipped == ()
    assert torch.equal(torch.get_rng_state(), before[0])
    assert torch.get_default_dtype() == before[1]


NESTED = pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")


def nested(layout: torch.layout, *lengths: int) -> Tensor:
    parts = [torch.randn(length, 4) for length in lengths]
    return torch.nested.nested_tensor(parts, layout=layout, requires_grad=True)


def recorded_nested(net: nn.Module, x: Tensor) -> gradlib.Recording:
    with gradlib.record(net) as recording:
        torch.nested.to_padded_tensor(net(x), 0.0).square().sum().backward()
    return recording


@NESTED
@pytest.mark.parametrize("layout", [torch.jagged, torch.strided])
def test_nested_tensors(layout: torch.layout) -> None:
    class Cut(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return nested(layout, *lengths) if lengths else x

    lengths: tuple[int, ...] = ()
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 4), Cut())
    recording = recorded_nested(net, nested(layout, 2, 3))
    found = recording.verify(numerical=True)
    assert found.agreed == len(recording), str(found)
    lengths = (4, 1)
    found = recording.verify().disagreements[-1]
    assert (found.name, found.reason) == (
        "3",
        "shapes [[2, 4], [3, 4]] and [[4, 4], [1, 4]]",
    )


@NESTED
@pytest.mark.parametrize("layout", [torch.jagged, torch.strided])
def test_a_wrong_gradient_of_a_nested_tensor(layout: torch.layout) -> None:
    class Cheat(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(3, 4))
            self.bias = nn.Parameter(torch.randn(3))

        def forward(self, x: Tensor) -> Tensor:
            y = F.linear(x, self.weight, self.bias)
            return y + y.detach()

    net = nn.Sequential(Cheat(), nn.Linear(3, 2))
    found = recorded_nested(net, nested(layout, 2, 3)).verify(numerical=True)
    assert {(it.name, it.field) for it in found.disagreements} == {
        ("0", "grad_input[0]"),
        ("0", "param_grads['weight']"),
        ("0", "param_grads['bias']"),
    }


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta")
@pytest.mark.parametrize("factor", [1.0, 2.0])
@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr])
def test_sparse_inputs(layout: torch.layout, factor: float) -> None:
    class Dense(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            y = x.to_dense()
            return factor * y + (1 - factor) * y.detach()

    x = torch.tensor([[1.0, 0.0], [3.0, 2.0]])
    x = x.to_sparse() if layout == torch.sparse_coo else x.to_sparse_csr()
    found = recorded(Dense(), x.requires_grad_()).verify(numerical=True)
    assert found.ok == (factor == 1)
    assert not found.skipped


@pytest.mark.parametrize("backward_inside", [True, False])
def test_autocast(backward_inside: bool) -> None:
    torch.manual_seed(0)
    net = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    weights = torch.randn(2, 5, 8)
    with gradlib.record(net) as recording:
        with torch.autocast(torch.get_default_device().type, torch.bfloat16):
            loss = (net(torch.randn(2, 5, 8)).float() * weights).sum()
            if backward_inside:
                loss.backward()
        if not backward_inside:
            loss.backward()
    found = recording.verify(numerical=True)
    assert found.ok, str(found)
    if weights.is_cpu:  # where autocast, inside, rounds in the backward too
        assert recording.verify(rtol=1e-5).ok is not backward_inside


@pytest.mark.parametrize("wrong", ["weight", "bias"])
def test_a_wrong_gradient_of_one_parameter(wrong: str) -> None:
    class Affine(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
            ctx.save_for_backward(x, weight)
            return F.linear(x, weight, bias)

        @staticmethod
        def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, ...]:
            x, weight = ctx.saved_tensors
            (grad,) = grads
            of_weight, of_bias = grad.T @ x, grad.sum(0)
            if wrong == "weight":
                of_weight = of_weight + 0.01
            else:
                of_bias = of_bias[[1, 0, *range(2, len(of_bias))]]
            return grad @ weight, of_weight, of_bias

    class Layer(nn.Linear):
        def forward(self, input: Tensor) -> Tensor:  # noqa: A002 (torch's name)
            return Affine.apply(input, self.weight, self.bias)

    recording = recorded(nn.Sequential(Layer(3, 5), nn.Tanh()), torch.randn(6, 3))
    assert recording.verify().ok
    (found,) = recording.verify(numerical=True).disagreements
    assert (found.name, found.field) == ("0", f"param_grads[{wrong!r}]")


def test_what_has_no_float64_is_skipped() -> None:
    class Narrow(torch.autograd.Function):
        @staticmethod
        def forward(_ctx: Any, x: Tensor) -> Tensor:
            if x.dtype != torch.float32:
                raise TypeError("float32 only")
            return 2 * x

        @staticmethod
        def backward(ctx: Any, *grads: Tensor) -> Tensor:
            assert ctx.needs_input_grad[0]
            return 2 * grads[0]

    class Model(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return Narrow.apply(x)

    recording = recorded(Model(), torch.randn(3, requires_grad=True))
    assert recording.verify().ok
    found = recording.verify(numerical=True)
    assert not found.ok
    assert "again raised TypeError: float32 only" in found.skipped[0].reason


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


@pytest.mark.parametrize("padding", [0, -1, None])
@pytest.mark.parametrize("kind", [nn.Embedding, nn.EmbeddingBag])
def test_padding_gets_no_gradient_on_purpose(kind: Any, padding: int | None) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(kind(5, 3, padding_idx=padding), nn.Linear(3, 2))
    recording = recorded(net, torch.tensor([[1, 0, 2, 2], [3, 4, 0, 0]]))
    found = recording.verify(numerical=True)
    assert (found.disagreements, found.skipped) == ((), ())


def test_a_wrong_gradient_of_an_embedding_with_padding() -> None:
    class Wrong(nn.Embedding):
        def forward(self, input: Tensor) -> Tensor:  # noqa: A002 (as torch names it)
            found = super().forward(input)
            return found + found.detach()

    recording = recorded(Wrong(5, 3, padding_idx=0), torch.tensor([1, 0, 2]))
    (found,) = recording.verify(numerical=True).disagreements
    assert found.field == "param_grads['weight']"
