"""The operation that cut the graph is named, where the source shows it."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gradlib


def net() -> nn.Linear:
    return nn.Linear(3, 2)


def numbers_made_a_tensor() -> None:
    losses = [net()(torch.ones(3)).sum() for _ in range(2)]
    torch.tensor(losses).mean().backward()


def numbers_collected_before() -> None:
    model, losses = net(), list[float]()
    for _ in range(2):
        loss = model(torch.ones(3)).sum()
        losses.append(loss.item())
    total = torch.tensor(losses)
    total = total.mean()
    total.backward()


def a_number_added_up() -> None:
    model, total = net(), torch.zeros(())
    for _ in range(2):
        loss = model(torch.ones(3)).sum()
        total += loss.item()
    total.backward()


def a_loss_made_a_float() -> None:
    model = net()
    loss = model(torch.ones(3)).sum().abs()
    loss = torch.tensor(float(loss))
    gradlib.grad(loss, model.weight)


def a_name_given_again() -> None:
    model = net()
    out = model(torch.ones(3))
    out = out.detach()
    out.sum().backward()


def the_data_of_a_tensor() -> None:
    model = net()
    out: Tensor = model(torch.ones(3))
    loss: Tensor = out.data.sum()
    loss.backward()


def the_largest() -> None:
    model, y = net(), torch.tensor([0.0, 1.0])
    out = model(torch.ones(2, 3))
    predicted = out.argmax(1).float()
    loss = ((predicted - y) ** 2).mean()
    loss.backward()


def a_comparison() -> None:
    model = net()
    out = model(torch.ones(3))
    (out > 0.5).float().mean().backward()


def under_no_grad() -> None:
    model = net()
    with torch.no_grad():
        loss = model(torch.ones(3)).sum()
        loss.backward()


def computed_in_the_call() -> None:
    model = net()
    with torch.no_grad():
        model(torch.ones(3)).sum().backward()


def computed_under_no_grad() -> None:
    model = net()
    with torch.no_grad():
        hidden = model(torch.ones(3))
    with torch.enable_grad():
        loss = hidden.sum()
        loss.backward()


@torch.no_grad()
def above_the_function() -> None:
    model = net()
    model(torch.ones(3)).sum().backward()


class Trainer:
    def __init__(self) -> None:
        self.net = net()

    def step(self) -> None:
        self.loss = self.net(torch.ones(3)).sum()
        self.total = self.loss.detach()
        self.total.mean().backward()


def in_attributes() -> None:
    Trainer().step()


def a_second_derivative() -> None:
    x = torch.ones(3, requires_grad=True)
    y = (x**3).sum()
    (gradient,) = torch.autograd.grad(y, x)
    torch.autograd.grad(gradient.sum(), x)


def a_penalty_by_backward() -> None:
    x = torch.ones(3, requires_grad=True)
    (x**3).sum().backward()
    penalty = x.grad.norm() if x.grad is not None else x.sum()
    penalty.backward()


def what_was_drawn() -> None:
    model = net()
    logits = model(torch.ones(3))
    distribution = torch.distributions.Categorical(logits=logits)
    # Two statements on a line are what is looked at.
    action = distribution.sample(); loss = action.float()  # fmt: skip # noqa: E702
    loss.backward()


def indices() -> None:
    model = net()
    out = model(torch.ones(4, 3))
    _, predicted = out.max(1)
    loss = (predicted.float() - 1).pow(2).mean()
    loss.backward()


def something_long() -> None:
    model = net()
    out = model(torch.ones(3))
    loss = torch.tensor([out[0].item() / 2, out[1].item() * 2, 3.0, 4.0, 5.0]).sum()
    loss.backward()


NAMED = {
    numbers_made_a_tensor: "torch.tensor(losses)",
    numbers_collected_before: "torch.tensor(losses)",
    a_number_added_up: "loss.item()",
    a_loss_made_a_float: "torch.tensor(float(loss))",
    a_name_given_again: "out.detach()",
    the_data_of_a_tensor: "out.data",
    the_largest: "out.argmax(1)",
    a_comparison: "out > 0.5",
    under_no_grad: "torch.no_grad()",
    computed_in_the_call: "torch.no_grad()",
    computed_under_no_grad: "torch.no_grad()",
    above_the_function: "torch.no_grad()",
    in_attributes: "self.loss.detach()",
    a_second_derivative: "torch.autograd.grad(y, x)",
    a_penalty_by_backward: "x.grad",
    what_was_drawn: "distribution.sample()",
    indices: "predicted",
    something_long: "torch.tensor(...)",
}


def note_of(program: Callable[[], None]) -> str:
    with pytest.raises(RuntimeError) as caught, gradlib.explain_errors():
        program()
    (note,) = getattr(caught.value, "__notes__", [str(caught.value)])
    assert "[GL108] " in note
    return " ".join(note.split())


@pytest.mark.filterwarnings("ignore:Converting a tensor")
@pytest.mark.parametrize("program", NAMED)
def test_it_is_named(program: Callable[[], None]) -> None:
    assert f"`{NAMED[program]}` seems to cut its graph." in note_of(program)


def frozen_weights() -> None:
    model, y = net().requires_grad_(False), torch.tensor([0.0, 1.0])
    loss = (model(torch.ones(3)) - y.detach()).mean()
    loss.backward()


def test_frozen_weights_are_named() -> None:
    assert "does not require grad: no parameter of `model` does." in note_of(
        frozen_weights
    )


def frozen_part() -> None:
    model: Any = nn.ModuleDict({"teacher": net(), "student": net()})
    model.teacher.requires_grad_(False)
    loss = model.teacher(torch.ones(3)).mean()
    loss.backward()


def test_a_frozen_part_of_a_model_is_named() -> None:
    assert "no parameter of `model.teacher` does." in note_of(frozen_part)


def of_a_linear_function() -> None:
    x = torch.ones(3, requires_grad=True)
    (gradient,) = torch.autograd.grad((2 * x).sum(), x, create_graph=True)
    gradient.sum().backward()


def labels_of_integers() -> None:
    x = torch.ones(3, requires_grad=True)
    labels, weight = torch.tensor([0, 1, 1]), torch.ones(3)
    loss = (weight * labels).sum()
    loss.backward()
    assert x is not labels


def of_another_part() -> None:
    model = net()
    accuracy = model(torch.ones(3)).argmax().item()
    loss = torch.ones(3).mean()
    loss.backward()
    assert accuracy


def gradients_on_again() -> None:
    model = net().requires_grad_(False)
    with torch.no_grad(), torch.enable_grad():
        loss = model(torch.ones(3)).sum()
        loss.backward()


def a_mode_of_another_line() -> None:
    model = net()
    with torch.no_grad():
        model.weight.zero_()
    loss = model(torch.ones(3)).sum()
    constant = torch.autograd.grad(loss, model.weight)[0].sum()
    constant.backward()


@pytest.mark.parametrize(
    "program", [of_a_linear_function, of_another_part, labels_of_integers]
)
def test_where_nothing_shows_it_nothing_is_named(program: Callable[[], None]) -> None:
    assert "Something cut the graph before the output" in note_of(program)


@pytest.mark.parametrize("program", [gradients_on_again, a_mode_of_another_line])
def test_a_mode_that_does_not_matter_is_not_named(program: Callable[[], None]) -> None:
    assert "`torch.no_grad()` seems" not in note_of(program)


def test_of_many_ways_back_each_line_is_looked_at_once(tmp_path: Path) -> None:
    lines = [f"    a, b = a + b, a - b  # {i}" for i in range(200)]
    file = tmp_path / "long.py"
    file.write_text("\n".join(["def long(a, b):", *lines, "    a.sum().backward()"]))
    names: dict[str, Callable[[Tensor, Tensor], None]] = {}
    exec(compile(file.read_text(), str(file), "exec"), names)
    note_of(lambda: names["long"](torch.ones(2), torch.ones(2)))
