"""A default device is a mode, which sees calls before torch does."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import gradlib

from .releases import older_than_dicts

CALLS: dict[str, Callable[[Tensor, Tensor], object]] = {
    "torch.autograd.grad": lambda out, leaf: torch.autograd.grad(out, leaf),
    "backward": lambda out, leaf: out.backward(inputs=[leaf]),
    "torch.autograd.backward": lambda out, leaf: torch.autograd.backward(
        out, inputs=[leaf]
    ),
}


def explained(name: str) -> str:
    """Return the note on the error of a call that needs a vector."""
    leaf = torch.ones(3, requires_grad=True)
    with pytest.raises(RuntimeError) as caught, gradlib.explain_errors():
        CALLS[name](2 * leaf, leaf)
    return "\n".join(caught.value.__notes__)


@pytest.mark.parametrize("name", CALLS)
def test_errors_are_explained_in_the_same_words(name: str) -> None:
    torch.set_default_device(None)
    expected = explained(name)
    with torch.device("cpu"):
        assert explained(name) == expected
    assert "out" in expected


@pytest.mark.skipif(older_than_dicts(), reason="this torch takes no dict of inputs")
def test_inputs_have_their_keys() -> None:
    leaf = torch.ones(3, requires_grad=True)
    with (
        torch.device("cpu"),
        pytest.raises(RuntimeError) as caught,
        gradlib.explain_errors(),
    ):
        torch.autograd.grad(leaf.sum(), {"a": leaf, "b": leaf.detach()})
    assert 'inputs["b"] does not require grad' in "\n".join(caught.value.__notes__)


def test_a_call_inside_another_has_its_own_place() -> None:
    def hook(_grad: Tensor) -> None:
        inner = torch.ones(3, requires_grad=True)
        torch.autograd.grad(2 * inner, inner)

    leaf = torch.ones(3, requires_grad=True)
    leaf.register_hook(hook)
    with (
        torch.device("cpu"),
        pytest.raises(RuntimeError) as caught,
        gradlib.explain_errors(),
    ):
        torch.autograd.grad(leaf.sum(), leaf)
    assert "inner" in "\n".join(caught.value.__notes__)


@pytest.mark.parametrize("weight", [1.0, 1 / 3, 0.1])
def test_a_product_elsewhere_is_explained_as_anywhere(weight: float) -> None:
    leaf, v = torch.ones(3, requires_grad=True), torch.full((3,), weight)
    expected = str(gradlib.explain_vjp(leaf * leaf, leaf, v))
    with torch.device("meta"):
        assert str(gradlib.explain_vjp(leaf * leaf, leaf, v)) == expected
