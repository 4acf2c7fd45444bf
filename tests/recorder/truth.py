"""Gradients without a recorder, and nets that recordings are held against them on."""

import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.testing import assert_close

import gradlib


class Net(nn.Module):
    """Two layers with a name each."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 4)
        self.second = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.tanh(self.first(x)))


def loss_of(output: Tensor) -> Tensor:
    """Weigh the entries differently, so that no two gradients agree by chance."""
    # Threads have a default device of their own.
    kind: Any = {"dtype": output.real.dtype, "device": output.device}
    weights = torch.arange(1.0, output.numel() + 1, **kind)
    return (
        (output.abs() if output.is_complex() else output)
        .mul(weights.view_as(output))
        .sum()
    )


def run(model: nn.Module, *args: Any, **kwargs: Any) -> Tensor:
    """Run forward and backward, and return the output."""
    output = model(*args, **kwargs)
    loss_of(output).backward()
    return output


def grad_of(tensor: Tensor) -> Tensor:
    """Return ``tensor.grad``, which must be there."""
    assert tensor.grad is not None
    return tensor.grad


def grads_of(model: nn.Module) -> dict[str, Any]:
    """Return what is in every ``.grad`` of a model."""
    return {name: parameter.grad for name, parameter in model.named_parameters()}


def twins(model: nn.Module) -> tuple[Any, Any]:
    """Return two copies of a model."""
    return copy.deepcopy(model), copy.deepcopy(model)


def assert_same_bits(found: object, expected: object) -> None:
    assert_close(found, expected, rtol=0, atol=0, equal_nan=True)


def assert_is_vjp(call: gradlib.Call, module: nn.Module) -> None:
    """Hold a call's shares against the VJP of the module alone."""
    args = [
        arg.detach().clone().requires_grad_(given is not None)
        for arg, given in zip(call.args, call.grad_input, strict=True)
    ]
    alone = copy.deepcopy(module)
    output = alone(*args)
    outputs = [output] if isinstance(output, Tensor) else list(output)
    wanted = [arg for arg in args if arg.requires_grad]
    wanted += [p for p in alone.parameters(recurse=False) if p.requires_grad]
    pairs = zip(outputs, call.grad_output, strict=True)
    flowed = [(out, grad) for out, grad in pairs if grad is not None]
    expected = torch.autograd.grad(
        [out for out, _ in flowed], wanted, [grad for _, grad in flowed]
    )
    found = [grad for grad in call.grad_input if grad is not None]
    found += [grad for grad in call.param_grads.values() if grad is not None]
    assert_close(found, list(expected))


class Powers(nn.Module):
    """A power, by products of what it is given with itself."""

    def __init__(self, power: int) -> None:
        super().__init__()
        self.power = power

    def forward(self, x: Tensor) -> Tensor:
        if self.power == 1:
            return 2 * x
        y = x * x
        return y if self.power == 2 else y * x


def all_hooks_of(model: nn.Module) -> list[dict[Any, Any]]:
    """Return every dict of a model that has to do with hooks."""
    return [
        value
        for module in model.modules()
        for name, value in vars(module).items()
        if "_hooks" in name
    ]


class Asks(nn.Module):
    """Asks for a pointer to the memory of its input, as some convolutions do."""

    def forward(self, x: Tensor) -> Tensor:
        assert x.data_ptr()
        return 2 * x


def grad_like(shape: tuple[int, ...]) -> Tensor:
    """Return what `loss_of` gives to an output of a shape."""
    output = torch.ones(shape, requires_grad=True)
    loss_of(output).backward()
    return grad_of(output)
