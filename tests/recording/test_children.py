"""A replay uses the modules that the model had when the call began."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gradlib


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer: Any = nn.Linear(3, 3)
        self.head = nn.Linear(3, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layer(x))


class Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.each = nn.ModuleDict({"fc": nn.Linear(3, 3), "relu": nn.ReLU()})

    def forward(self, x: Tensor) -> Tensor:
        for module in self.each.values():
            x = module(x)
        return x


class Builds(nn.Module):
    """Makes its layer in the first forward, and notes that in an attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.layer: nn.Module | None = None
        self.first = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        if self.layer is None:
            self.layer = nn.Sequential(nn.Linear(3, 3), nn.Tanh())
        return self.layer(self.first(x))


class Rebuilds(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        self.layer = nn.Linear(3, 3)
        return self.layer(x)


class BuildsUnlessThere(nn.Module):
    """Makes its layer as `Builds` does, if the attribute holds none."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 3)
        self.drop = nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        if not hasattr(self, "layer"):
            self.layer = nn.Linear(3, 3)
        return self.drop(self.layer(self.first(x)))


class Turns(nn.Module):
    """Makes in each forward what the layer before it was not."""

    def __init__(self) -> None:
        super().__init__()
        self.register_module("layer", None)
        self.first = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        self.layer = nn.Tanh() if isinstance(self.layer, nn.Sigmoid) else nn.Sigmoid()
        return self.layer(self.first(x))


def step(model: nn.Module) -> None:
    """Take a training step, with data that requires grad."""
    model(torch.randn(4, 3, requires_grad=True)).square().sum().backward()
    torch.optim.SGD(model.parameters(), 0.1).step()
    model.zero_grad()


def replaced(model: Any) -> None:
    model.layer = nn.Linear(3, 3)


def deleted(model: Any) -> None:
    del model.layer


def replaced_by_a_function(model: Any) -> None:
    del model.layer
    model.layer = torch.tanh


def replaced_by_several(model: Any) -> None:
    model.layer = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 3))


def appended(model: Any) -> None:
    model.append(nn.Linear(3, 3))


def inserted(model: Any) -> None:
    model.insert(0, nn.Tanh())


def popped(model: Any) -> None:
    model.pop(0)


def reordered(model: Any) -> None:
    model.each["fc"] = model.each.pop("fc")


def two_layers() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3))


CHANGES: list[tuple[Callable[[], nn.Module], Callable[[Any], None]]] = [
    (Net, replaced),
    (Net, replaced_by_a_function),
    (Net, replaced_by_several),
    (two_layers, appended),
    (two_layers, inserted),
    (two_layers, popped),
    (Branches, reordered),
]


def assert_all_agree(recording: gradlib.Recording) -> None:
    found = recording.verify()
    assert found.ok, found
    assert found.agreed == found.calls == len(recording), found


@pytest.mark.parametrize(("make", "change"), CHANGES)
def test_modules_that_are_changed_between_two_steps(
    make: Callable[[], nn.Module], change: Callable[[Any], None]
) -> None:
    model = make()
    with gradlib.record(model) as recording:
        step(model)
        change(model)
        step(model)
        before = str(model)
        assert_all_agree(recording)
    assert_all_agree(recording)
    assert str(model) == before


@pytest.mark.parametrize("change", [replaced, deleted, replaced_by_a_function])
@pytest.mark.parametrize("where", ["before the backward pass", "after the block"])
def test_a_module_that_is_gone(change: Callable[[Any], None], where: str) -> None:
    model = Net()
    with gradlib.record(model) as recording:
        output = model(torch.randn(4, 3, requires_grad=True))
        if where == "before the backward pass":
            change(model)
        output.sum().backward()
    if where == "after the block":
        change(model)
    standing = vars(model).get("layer"), dict(model.named_children())
    assert_all_agree(recording)
    assert (vars(model).get("layer"), dict(model.named_children())) == standing


@pytest.mark.parametrize("make", [Builds, BuildsUnlessThere, Rebuilds, Turns])
def test_a_module_that_a_forward_makes(make: Callable[[], nn.Module]) -> None:
    model = make()
    with gradlib.record(model) as recording:
        step(model)
        step(model)
        model.eval()
        step(model)
    assert_all_agree(recording)


class Borrows(nn.Module):
    """Calls the child of a module that is not one of its own children."""

    def __init__(self, other: Any) -> None:
        super().__init__()
        self.others = [other]

    def forward(self, x: Tensor) -> Tensor:
        return self.others[0].layer(x)


def test_a_module_that_a_forward_makes_and_another_module_calls() -> None:
    makes = BuildsUnlessThere()
    model = nn.Sequential(makes, Borrows(makes))
    with gradlib.record(model) as recording:
        step(model)
        step(model)
    assert_all_agree(recording)


def test_weights_and_modes_of_a_module_that_is_gone() -> None:
    model = Net()
    model.layer = nn.Sequential(nn.Linear(3, 3), nn.Dropout(0.5))
    gone = model.layer
    with gradlib.record(model) as recording:
        step(model)
        step(model)
        model.layer = nn.Tanh()
        step(model)
    with torch.no_grad():
        gone[0].weight.zero_()
    gone.eval()
    assert_all_agree(recording)


def test_a_module_that_joins_the_model_after_its_first_call() -> None:
    class Knows(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.known = [nn.Linear(3, 3)]  # a list, so the layer is no child

        def forward(self, x: Tensor) -> Tensor:
            return self.known[0](x).tanh()

    model = Knows()
    with gradlib.record(model) as recording:
        for _ in range(2):
            model(torch.randn(2, 3, requires_grad=True)).sum().backward()
            model.late = model.known[0]
    assert [call.name for call in recording] == ["", "", "late"]
    assert recording.verify().agreed == 3


def test_the_model_is_left_out_and_learns() -> None:
    model = Net()
    with gradlib.record(model, modules=["layer", "head"]) as recording:
        for _ in range(3):
            step(model)
    assert_all_agree(recording)
