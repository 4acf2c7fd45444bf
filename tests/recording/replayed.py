"""What a replay must reproduce, and what a replay must not change."""

import copy
import random
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.testing import assert_close

import gradlib
from gradlib.tree import tensors_in


def loss_of(output: Tensor) -> Tensor:
    """Weigh the entries differently, so that no two gradients agree by chance."""
    weights = torch.arange(1.0, output.numel() + 1).view_as(output)
    loss = (output * weights).sum()
    return loss.abs() if loss.is_complex() else loss


def everything(model: nn.Module) -> dict[str, Any]:
    """Return the state that a replay must not change."""
    state: dict[str, Any] = {
        "random": torch.get_rng_state(),
        "python": random.getstate(),
        "numpy": cast(Any, np.random.get_state())[1],
        "grad mode": torch.is_grad_enabled(),
        "autocast": torch.is_autocast_enabled("cpu"),
        "dtype": torch.get_default_dtype(),
    }
    for name, module in model.named_modules():
        state[f"vars of {name}"] = {
            key: id(value) for key, value in vars(module).items()
        }
        state[f"own of {name}"] = [
            (key, id(value)) for key, value in (*module._parameters.items(),)
        ]
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        state[name] = tensor.detach().clone()
        state[f"version of {name}"] = tensor._version
        state[f"requires_grad of {name}"] = tensor.requires_grad
        grad = tensor.grad
        state[f"grad of {name}"] = None if grad is None else (id(grad), grad.clone())
    return state


def assert_same(a: object, b: object) -> None:
    assert_close(a, b, rtol=0, atol=0, equal_nan=True)


def assert_replays(
    recording: gradlib.Recording, model: nn.Module, **tolerance: Any
) -> None:
    """Assert that a replay reproduces each pass, and changes nothing."""
    before = everything(model)
    kept = copy.deepcopy(values_of(recording))
    for call in recording:
        assert call.passes
        for pass_ in call.passes:
            again = pass_.replay()
            assert again.backward == pass_.backward
            assert_close(again.grad_output, pass_.grad_output)
            for field in ("grad_input", "grad_kwargs", "param_grads"):
                assert_close(getattr(again, field), getattr(pass_, field), **tolerance)
            for field in ("grad_input_total", "param_grads_total"):
                assert_close(getattr(again, field), getattr(pass_, field))
    assert_unchanged(model, before)
    assert_same(values_of(recording), kept)


def assert_unchanged(model: nn.Module, before: dict[str, Any]) -> None:
    """Assert that the state is what `everything` returned before."""
    after = everything(model)
    for key, value in before.items():
        if isinstance(value, Tensor):
            assert torch.equal(value, after[key]), key
        elif key == "numpy":
            assert (value == after[key]).all()
        elif key.startswith("grad of") and value is not None:
            assert value[0] == after[key][0], key
            assert torch.equal(value[1], after[key][1]), key
        else:
            assert value == after[key], key


def values_of(recording: gradlib.Recording) -> list[Tensor]:
    """Return the values that a replay starts from, and must not write to."""
    every = [(call, pass_) for call in recording for pass_ in call.passes]
    kept = [(call.args, call.output, pass_.grad_output) for call, pass_ in every]
    return tensors_in(kept)


def replays(model: nn.Module, x: Tensor, **options: Any) -> gradlib.Recording:
    with gradlib.record(model, **options) as recording:
        model(x).sum().backward()
    return recording
