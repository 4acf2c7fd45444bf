"""The code at the end of an explanation runs, and does what the explanation says."""

import re
import textwrap
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge

import gradlib


def code_in(text: str) -> str:
    """Return the last block of code of an explanation."""
    return textwrap.dedent(re.findall(r"(?:^    .*\n?)+", text, re.M)[-1])


def given() -> dict[str, Any]:
    x = torch.tensor([1.0, 2.0, 3.0], requires_grad=True)
    return {"torch": torch, "gradlib": gradlib, "np": np, "x": x, "y": 2 * x}


@pytest.mark.parametrize("passed", ["torch.ones(3)", "torch.ones(2)", "None"])
def test_outputs_and_inputs_exchanged(passed: str) -> None:
    names = given()
    x, y, ones = names["x"], torch.outer(names["x"], names["x"]), eval(passed, names)
    with pytest.raises(gradlib.GradlibError) as raised:
        gradlib.grad(x, y, ones)
    code = code_in(str(raised.value))
    assert code == "v = torch.ones_like(y)\ngradlib.grad(y, x, v)\n"
    exec(code, names | {"y": y})


def test_several_inputs_exchanged_with_outputs() -> None:
    names = given()
    x, one, other = names["x"], names["y"], names["y"].sum()
    inputs = [one, other]
    with pytest.raises(gradlib.GradlibError) as raised:
        gradlib.grad(x, inputs, torch.ones_like(x))
    code = code_in(str(raised.value))
    assert "v = [torch.ones_like(each) for each in inputs]" in code
    exec(code, names | {"inputs": inputs})


def test_vectors_that_are_wrong_in_different_ways_are_all_mended() -> None:
    names = given()
    x, y = names["x"], names["y"]
    outputs, vectors = [y, y**2], [torch.ones(2), y > 0]
    with pytest.raises(gradlib.GradOutputsShapeError) as raised:
        gradlib.grad(outputs, x, vectors)
    exec(code_in(str(raised.value)), names | {"outputs": outputs, "vectors": vectors})


def test_a_complex_number_among_outputs() -> None:
    names = given()
    x, outputs = names["x"], [names["y"].sum() * 1j]
    with pytest.raises(gradlib.NoGradOutputsError) as raised:
        gradlib.grad(outputs, x)
    exec(code_in(str(raised.value)), names | {"outputs": outputs})


def by_backward(x: Tensor, y: Tensor, v: Any) -> None:  # noqa: ARG001 (as the other)
    y.backward(v)


def by_grad(x: Tensor, y: Tensor, v: Any) -> None:
    torch.autograd.grad(y, x, v)


@pytest.mark.parametrize("call", [by_backward, by_grad])
def test_a_list_of_numbers_is_one_vector_for_torchs_own_calls(call: Any) -> None:
    names: dict[str, Any] = given() | {"v": [1.0, 2.0, 3.0]}
    x, y = names["x"], names["y"]
    with pytest.raises(TypeError) as raised, gradlib.explain_errors():
        call(x, y, names["v"])
    (note,) = raised.value.__notes__
    assert "torch.as_tensor(v" in note
    code = code_in(note).rstrip().rpartition("\n")
    exec(code[0], names)
    found: tuple[Tensor] = torch.autograd.grad(y, x, names["v"])
    assert found[0].tolist() == [2, 4, 6]


@pytest.mark.parametrize(
    "number", ["2.0", "np.float32(2)", "np.array(2.0)", "np.int64(2)"]
)
def test_a_number_is_the_weight_of_every_entry(number: str) -> None:
    names = given()
    x, y, v = names["x"], names["y"], eval(number, names)
    with pytest.raises(gradlib.GradlibError) as raised:
        gradlib.grad(y, x, v)
    names["v"] = v
    code = code_in(str(raised.value))
    assert "full_like" in code
    exec(code, names)
    assert names["v"].tolist() == [2, 2, 2]


def test_complex_losses_have_no_mean() -> None:
    names = given()
    x = names["x"]
    losses = torch.stack([it + 1j for it in x])
    with pytest.raises(gradlib.GradlibError) as raised:
        gradlib.grad(losses, x)
    exec(code_in(str(raised.value)), names | {"losses": losses})


def test_one_output_and_no_vector_is_no_sum_of_several() -> None:
    names = given()
    with pytest.raises(gradlib.GradlibError) as raised:
        gradlib.grad(names["y"], names["x"], [])
    assert "Several outputs" not in str(raised.value)


def test_a_zero_weight_of_an_infinite_row_counts() -> None:
    x = torch.tensor([-1.0, 4.0], requires_grad=True)
    v = [torch.tensor(1.0), torch.zeros(2)]
    found = gradlib.explain_vjp([x.sum(), x.sqrt()], x, v)
    assert found.meaning.startswith("The gradient of L = y[0] + (y[1] * v[1]).sum().")
    found = gradlib.explain_vjp([x.sum(), x.exp()], x, v)
    assert found.meaning.startswith("The gradient of L = y[0].")


def test_weights_for_an_edge_are_made_on_its_device() -> None:
    x = torch.ones(3, device="meta", requires_grad=True)
    y = 2 * x
    edge = get_gradient_edge(y)
    with pytest.raises(gradlib.NoGradOutputsError) as raised:
        gradlib.grad(edge, x)
    names: dict[str, Any] = given() | {"edge": edge, "x": x}
    exec(code_in(str(raised.value)), names)
    assert names["v"].device == y.device
