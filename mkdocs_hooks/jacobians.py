"""The functions of the playground, and what torch computes for them."""

import ast
import inspect
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn


def outer() -> tuple[Tensor, Tensor]:
    """Multiply each entry of a vector by every entry."""
    x = torch.tensor([1.0, 2.0, 3.0, 4.0], requires_grad=True)
    y = torch.outer(x, x)
    return x, y


def product() -> tuple[Tensor, Tensor]:
    """Multiply two matrices."""
    x = torch.ones(2, 3, requires_grad=True)
    a = torch.tensor(
        [[1.0, 2.0, 3.0, -1.0], [2.0, -1.0, 1.0, 4.0], [-2.0, 3.0, 1.0, 5.0]]
    )
    y = torch.mm(x, a)
    return x, y


def square() -> tuple[Tensor, Tensor]:
    """Compute each entry from its own entry of x alone."""
    x = torch.tensor([[1.0, 2.0], [3.0, 4.0]], requires_grad=True)
    y = (x + 2) ** 2
    return x, y


def network() -> tuple[Tensor, Tensor]:
    """Run a small network on one sample."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))
    x = torch.randn(4, requires_grad=True)
    y = net(x)
    return x, y


def next_function(y: Tensor) -> Tensor:
    """Compute a loss: its gradient at y is the v of a backward pass."""
    return y.square().mean()


def statements(function: Callable[..., object]) -> list[str]:
    """Return the code of a function, one statement a line, without its docstring."""
    (definition,) = ast.parse(inspect.getsource(function)).body
    assert isinstance(definition, ast.FunctionDef)
    return [ast.unparse(statement) for statement in definition.body[1:]]


FUNCTIONS = (outer, product, square, network)
LOSS = statements(next_function)[-1].removeprefix("return ")


class Computed(NamedTuple):
    """A function and its gradients, in which y and x are flattened."""

    code: list[str]  # what ran; its last line makes y
    x_shape: tuple[int, ...]
    y_shape: tuple[int, ...]
    jacobian: list[list[float]]
    gradient_for_ones: list[float]
    loss_gradient: list[float]


def compute(function: Callable[[], tuple[Tensor, Tensor]]) -> Computed:
    """Compute what the playground shows of a function."""
    with torch.random.fork_rng(devices=[]):
        x, y = function()

    def gradient(v: Tensor) -> list[float]:
        found = torch.autograd.grad(y, x, grad_outputs=v, retain_graph=True)[0]
        return found.flatten().tolist()

    one_hots = torch.eye(y.numel()).reshape(-1, *y.shape)
    (loss_gradient,) = torch.autograd.grad(next_function(y), y, retain_graph=True)
    return Computed(
        code=statements(function)[:-1],
        x_shape=tuple(x.shape),
        y_shape=tuple(y.shape),
        jacobian=[gradient(v) for v in one_hots],
        gradient_for_ones=gradient(torch.ones_like(y)),
        loss_gradient=loss_gradient.flatten().tolist(),
    )
