"""What a module held at an earlier moment, as `History` reports."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gradlib
from gradlib.recording.history import History
from gradlib.recording.past_attributes import Held


def parent_of(**children: nn.Module) -> Any:
    module = nn.Module()
    for name, child in children.items():
        module.add_module(name, child)
    return module


def begin(*modules: nn.Module) -> History:
    """Return a history of hooked modules, at the beginning of a forward."""
    history = History(modules)
    history.look(0)
    return history


# Children


def test_a_child_is_there_since_the_module_was_last_seen() -> None:
    first, other, new = nn.Tanh(), nn.ReLU(), nn.Sigmoid()
    parent = parent_of(a=first)
    history = begin(parent)
    history.look(10)
    parent.a = other
    history.world(parent, 13, {})
    parent.b = new
    history.world(parent, 15, {})
    assert history.children(parent, 10) == {"a": first}
    assert history.children(parent, 11) == {"a": other}
    assert history.children(parent, 13) == {"a": other}
    assert history.children(parent, 14) == {"a": other, "b": new}


def test_a_child_that_is_called_before_its_parent_is() -> None:
    parent, made = parent_of(a=nn.Tanh()), nn.Sigmoid()
    history = begin(parent, made)
    history.look(10)
    parent.b = made
    history.world(made, 13, {})
    history.world(parent, 15, {})
    assert [*history.children(parent, 10)] == ["a"]
    assert [*history.children(parent, 15)] == ["a", "b"]


def test_the_order_of_children() -> None:
    parent = parent_of(a=nn.Tanh(), b=nn.ReLU())
    history = begin(parent)
    last_is_first(parent)
    history.has_changed = True
    history.look(10)
    last_is_first(parent)
    history.world(parent, 20, {})
    assert [*history.children(parent, 0)] == ["a", "b"]
    assert [*history.children(parent, 10)] == ["b", "a"]
    assert [*history.children(parent, 20)] == ["a", "b"]


def last_is_first(parent: nn.Module) -> None:
    children = vars(parent)["_modules"]
    for name in [*children][:-1]:
        children[name] = children.pop(name)


# Parameters and buffers


@pytest.mark.cpu  # reading another device's values would wait for the device
def test_what_is_the_same_is_kept_once() -> None:
    module = nn.BatchNorm1d(2)
    history = begin(module)
    for moment in (10, 20):
        history.look(moment)
        history.world(module, moment + 1, {})
    assert history.parameters(module, 0) is history.parameters(module, 30)
    assert history.buffers(module, 0) is history.buffers(module, 30)


def test_what_is_taken_away_is_gone() -> None:
    module: Any = nn.BatchNorm1d(2)
    history = begin(module)
    for name in ("weight", "bias", "running_mean"):
        delattr(module, name)
    for name in ("running_var", "num_batches_tracked"):
        delattr(module, name)
    history.look(10)
    assert [*history.at(module, 0)] == [
        *("weight", "bias", "running_mean", "running_var", "num_batches_tracked")
    ]
    assert not history.at(module, 10)


def test_a_lazy_weight_beside_one_that_changed() -> None:
    class Scales(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(3, 3)
            self.lazy: Any = nn.LazyLinear(2)
            self.lazy.scale = nn.Parameter(torch.ones(1))

        def forward(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                self.first.weight.mul_(0.9)
                self.lazy.scale.mul_(0.9)
            return self.lazy(self.first(x)) * self.lazy.scale

    model = Scales()
    with gradlib.record(model) as recording:
        model(torch.randn(2, 3)).sum().backward()
    assert recording.verify().agreed == 3


def test_a_script_module_in_a_module_that_is_called() -> None:
    script: Any = torch.jit.script(nn.BatchNorm1d(3))
    model = nn.Sequential(nn.Linear(3, 3), nn.Sequential(script, nn.Tanh()))
    with gradlib.record(model) as recording:
        model(torch.randn(4, 3)).sum().backward()
    assert recording["1.1"].replay().grad_input[0] is not None


# Hooks


def doubles_output(module: nn.Module) -> None:
    def hook(_module: object, _args: object, output: Tensor) -> Tensor:
        return output * 2

    module.register_forward_hook(hook)


def doubles_input(module: nn.Module) -> None:
    def hook(_module: object, args: tuple[Tensor]) -> tuple[Tensor]:
        return (args[0] * 2,)

    module.register_forward_pre_hook(hook)


@pytest.mark.parametrize("hook", [doubles_output, doubles_input])
def test_a_module_that_a_forward_makes_with_a_hook(
    hook: Callable[[nn.Module], None],
) -> None:
    class Makes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(3, 3)
            self.new: nn.Module | None = None

        def forward(self, x: Tensor) -> Tensor:
            if self.new is None:
                self.new = nn.Linear(3, 3)
                hook(self.new)
            return self.new(self.fc(x))

    model = Makes()
    with gradlib.record(model) as recording:
        model(torch.randn(2, 3)).sum().backward()
        model(torch.randn(2, 3)).sum().backward()
    found = recording.verify()
    assert found.agreed == found.calls == 6, found


def test_the_hooks_of_a_module_that_was_not_seen() -> None:
    module = nn.Tanh()
    hook = module.register_forward_hook(lambda *_: None)
    assert [*History([]).hooks(module, 0)["_forward_hooks"]] == [hook.id]


# Attributes


def test_an_attribute_that_requires_grad_later() -> None:
    module = parent_of()
    module.scale = torch.ones(3)
    history = begin(module)
    module.scale.requires_grad_()
    history.look(10)
    found = [history.attributes(module, it).found["scale"] for it in (0, 10)]
    assert [it.requires_grad for it in found] == [False, True]


class Scales(nn.Module):
    def __init__(self, rows: list[float]) -> None:
        super().__init__()
        self.rows = rows

    def forward(self, x: Tensor) -> Tensor:
        return x * self.rows[0]


class Holds(nn.Module):
    def __init__(self, inner: Scales) -> None:
        super().__init__()
        self.rows, self.inner = inner.rows, inner

    def forward(self, x: Tensor) -> Tensor:
        return self.inner.forward(x)


class SetsBack(nn.Module):
    def __init__(self, inner: Scales) -> None:
        super().__init__()
        self.inner, self.holder = inner, Holds(inner)

    def forward(self, x: Tensor) -> Tensor:
        x = self.holder(x)
        self.inner.rows[0] = 1.0
        return self.inner(x)


def test_a_list_that_two_modules_hold_and_a_call_changes() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc, self.inner = nn.Linear(3, 3), Scales([1.0])
            self.outer = SetsBack(self.inner)

        def forward(self, x: Tensor) -> Tensor:
            x = self.inner(self.fc(x))
            self.inner.rows[0] = 2.0
            return self.outer(x)

    model = Net()
    with gradlib.record(model) as recording:
        model(torch.randn(2, 3)).sum().backward()
    found = recording.verify()
    assert found.agreed == found.calls == 6, found


def test_a_tuple_of_one_module_says_nothing_of_that_of_another() -> None:
    class Pairs(nn.Module):
        def __init__(self, pair: tuple[Any, ...]) -> None:
            super().__init__()
            self.pair = pair

    first, second = Pairs((1, 2)), Pairs((torch.ones(1), 2))
    history = begin(first, second)
    attributes = history.attributes(second, 0)
    assert attributes is not None
    assert isinstance(attributes.found["pair"], Held)
