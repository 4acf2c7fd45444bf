"""Errors outside of a backward pass are explained: leaves in place, and NumPy."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import gradlib


def weight() -> Tensor:
    return torch.tensor([1.0, 2.0, 3.0], requires_grad=True)


def a_step() -> None:
    w = weight()
    w -= 0.1 * torch.ones(3)


def a_step_of_each() -> None:
    net = nn.Linear(2, 2)
    for p in net.parameters():
        p.sub_(0.1 * torch.ones_like(p))


def first_values() -> None:
    nn.Linear(2, 2).weight.fill_(0.1)


def an_entry() -> None:
    x = weight()
    x[0] = 1.0


def by_a_function() -> None:
    x = weight()
    nn.functional.relu_(x)


CHANGED = {
    a_step: ("`w` is changed in place, and is a leaf", "w -= 0.1 * torch.ones(3)"),
    a_step_of_each: ("`p` is", "p.sub_(0.1 * torch.ones_like(p))"),
    first_values: (
        "`nn.Linear(2, 2).weight` is",
        "nn.Linear(2, 2).weight.fill_(0.1)",
    ),
    an_entry: ("`x[0]` is changed in place, and is a view of a leaf", "x[0] = 1.0"),
    by_a_function: ("`x` is", "nn.functional.relu_(x)"),
}


def note_of(program: Callable[[], None]) -> str:
    with pytest.raises(RuntimeError) as caught, gradlib.explain_errors():
        program()
    (note,) = caught.value.__notes__
    return note


@pytest.mark.parametrize("program", CHANGED)
def test_a_leaf_is_changed_under_no_grad(program: Callable[[], None]) -> None:
    place, line = CHANGED[program]
    note = note_of(program)
    assert note.startswith("\n[GL112] ")
    assert place in " ".join(note.split())
    assert f"\n    with torch.no_grad():\n        {line}\n" in note


def the_method() -> None:
    y = weight() * 2
    y.numpy()


def of_an_expression() -> None:
    y = weight()
    print((y * 2).numpy())


def of_a_list() -> None:
    losses = [weight().sum(), weight().mean()]
    np.mean(np.array(losses))


def inside_numpy() -> None:
    y = weight()
    np.mean([y, y])


CONVERTED = {
    the_method: "y.detach().numpy()",
    of_an_expression: "(y * 2).detach().numpy()",
    of_a_list: "losses[0].detach().numpy()",
    inside_numpy: "y.detach().numpy()",
}


@pytest.mark.cpu  # of a GPU's tensor torch first says that it has to be copied
@pytest.mark.parametrize("program", CONVERTED)
def test_numpy_is_given_what_is_detached(program: Callable[[], None]) -> None:
    note = note_of(program)
    assert note.startswith(
        f"\n[GL108] `{CONVERTED[program][: -len('.detach().numpy()')]}`"
    )
    assert f"\n    {CONVERTED[program]}\n" in note


@pytest.mark.parametrize(
    ("source", "code"),
    [
        ("x += 1", "with torch.no_grad():\n        w -= step"),
        pytest.param("x.numpy()", "y.detach().numpy()", marks=pytest.mark.cpu),
    ],
)
def test_without_a_source_the_letters_stand(source: str, code: str) -> None:
    assert f"\n    {code}\n" in note_of(lambda: exec(source, {"x": weight()}))
