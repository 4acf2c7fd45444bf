"""`verify` uses the hooks, weights and parameters of the time of each call."""

import itertools
import random
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any, cast

import numpy
import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import prune

import gradlib
from gradlib.recording.another_output import ANOTHER_OUTPUT


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
        "it may use what was not kept as it was then, such as a global, an object of "
        "another class, a hook, a setting or what parametrize.cached() held"
    )
    assert grad.reason == ""  # it is that of another output


@pytest.mark.parametrize("where", ["a global list", "a closure"])
def test_a_state_outside_of_the_model_is_told_apart(where: str) -> None:
    count = 0

    class Counts(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            nonlocal count
            if where == "a closure":
                count += 1
            else:
                COUNTED.append(0)
            return x * (count + len(COUNTED))

    COUNTED.clear()
    net = nn.Sequential(nn.Linear(3, 3), Counts())
    with gradlib.record(net) as recording:
        net(torch.randn(4, 3)).sum().backward()
    output, grad = recording.verify().disagreements
    assert (output.name, output.field) == ("1", "output")
    assert output.reason == ANOTHER_OUTPUT
    assert (grad.field, grad.reason) == ("grad_input[0]", "")
    with pytest.raises(gradlib.CannotReplayError, match="does not repeat"):
        recording["1"].replay()


COUNTED: list[int] = []


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


def test_a_new_seed_at_each_call_is_named() -> None:
    """Reversible layers seed so, to draw the same numbers again in the backward."""

    class Drops(nn.Module):
        def __init__(self, seed: Callable[[], object]) -> None:
            super().__init__()
            self.seed = seed

        def forward(self, x: Tensor) -> Tensor:
            self.seed()
            return nn.functional.dropout(x) * next(factors)

    factors = itertools.count(1)
    same_seed = Drops(partial(torch.manual_seed, 7))
    net = nn.Sequential(nn.Linear(30, 30), same_seed, Drops(torch.seed))
    with gradlib.record(net) as recording:
        net(torch.randn(4, 30)).sum().backward()
    found = recording.verify().disagreements
    reasons = {it.name: it.reason for it in found if it.field == "output"}
    assert reasons.keys() == {"1", "2"}
    assert reasons["1"].startswith("it may use what was not kept")
    assert reasons["2"] == (
        "it gives torch's generators another seed each time, as torch.seed() does"
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
    if when == "at its first call":  # the hook removes itself
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
    """A layer, and parameters that may be absent."""

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


def test_a_hook_that_was_set_since() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))
    with gradlib.record(model) as recording:
        model(torch.randn(2, 3)).sum().backward()
    _forward(model[1])
    assert recording.verify().ok
