"""Hooks that the user set, some of which change gradients."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

import gradlib

from .truth import Net, assert_is_vjp, assert_same_bits, loss_of, run, twins


def _tripled(_module: nn.Module, args: Any) -> tuple[Tensor]:
    return (args[0] * 3,)


def test_a_pre_hook_that_changes_the_arguments() -> None:
    model = Net()
    model.first.register_forward_pre_hook(_tripled)
    x = torch.randn(2, 3, requires_grad=True)
    with gradlib.record(model) as recording:
        run(model, x)
    call = recording["first"]
    # What the caller passed, and the gradient that came back to the caller.
    assert_close(call.args, (x.detach(),))
    assert_close(call.grad_input, (x.grad,))
    (grad,) = call.grad_output
    assert_close(call.grad_input[0], 3 * grad @ model.first.weight.detach())
    assert_close(call.param_grads["weight"], model.first.weight.grad)


def _tripled_output(_module: nn.Module, _args: Any, output: Any) -> Tensor:
    return output * 3


def test_a_forward_hook_that_changes_the_output() -> None:
    model = Net()
    model.first.register_forward_hook(_tripled_output)
    x = torch.randn(2, 3, requires_grad=True)
    plain = copy.deepcopy(model)
    changed = plain.first(x)
    (expected,) = torch.autograd.grad(
        loss_of(plain.second(torch.tanh(changed))), changed
    )
    with gradlib.record(model) as recording:
        run(model, x)
    call = recording["first"]
    assert_close(call.output, changed.detach())
    assert_close(call.grad_output, (expected,))
    assert_close(call.param_grads["weight"], model.first.weight.grad)
    assert_close(call.grad_input, (x.grad,))


def test_full_backward_hooks_that_change_gradients() -> None:
    model: Any = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    model[2].register_full_backward_hook(lambda _m, grads, _out: (grads[0] * 2,))
    model[2].register_full_backward_pre_hook(lambda _m, grads: (grads[0] * 3,))
    model, plain = twins(model)
    x = torch.randn(2, 3, requires_grad=True)
    hidden = torch.tanh(plain[0](x))
    hidden.retain_grad()
    loss_of(plain[2](hidden)).backward()
    expected = x.grad
    x.grad = None
    with gradlib.record(model) as recording:
        run(model, x)
    assert_same_bits(x.grad, expected)
    call = recording["2"]
    assert_close(call.grad_input, (hidden.grad,))
    # The parameters got what belongs to the grad_output that entered the module.
    assert_close(call.grad_output[0].sum(0), model[2].bias.grad)
    assert_close(call.param_grads["bias"], model[2].bias.grad)
    assert_close(recording["1"].grad_output, (hidden.grad,))
    assert_is_vjp(recording["0"], model[0])


@pytest.mark.parametrize("when", ["before", "in the forward", "after"])
def test_a_tensor_hook_on_a_hidden_tensor(when: str) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(3, 3), nn.Linear(3, 2)

        def forward(self, x: Tensor) -> Tensor:
            h = self.a(x)
            if when == "before":
                h.register_hook(lambda grad: grad * 10)
            y = self.b(h)
            if when == "in the forward":
                h.register_hook(lambda grad: grad * 10)
            self.hidden = h
            return y

    model = Model()
    x = torch.randn(2, 3, requires_grad=True)
    with gradlib.record(model) as recording:
        output = model(x)
        if when == "after":
            model.hidden.register_hook(lambda grad: grad * 10)
        model.hidden.retain_grad()
        loss_of(output).backward()
    # The share of b is taken before the hook, and what enters a after the hook.
    assert_close(recording["b"].grad_input[0] * 10, model.hidden.grad)
    assert_close(recording["b"].grad_input_total, (model.hidden.grad,))
    assert_close(recording["a"].grad_output, (model.hidden.grad,))
    assert_close(recording["a"].param_grads["bias"], model.a.bias.grad)
    assert_is_vjp(recording["a"], model.a)


@pytest.mark.parametrize("inside", [False, True])
def test_a_tensor_hook_on_an_output(inside: bool) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(3, 2)

        def forward(self, x: Tensor) -> Tensor:
            y = self.fc(x)
            if inside:
                y.register_hook(lambda grad: grad * 5)
            return y

    model = Model()
    x = torch.randn(2, 3, requires_grad=True)
    with gradlib.record(model) as recording:
        output = model(x)
        if not inside:
            output.register_hook(lambda grad: grad * 5)
        loss_of(output).backward()
    (given,) = torch.autograd.grad(
        loss_of(other := output.detach().requires_grad_()), other
    )
    for name in ("", "fc"):
        assert_close(recording[name].grad_output, (5 * given,))
    assert_is_vjp(recording["fc"], model.fc)
    assert_close(recording[""].grad_input, (x.grad,))


@pytest.mark.parametrize("when", ["before the block", "before the call", "after"])
def test_a_tensor_hook_on_a_leaf(when: str) -> None:
    model = Net()
    x = torch.randn(2, 3, requires_grad=True)

    def hook() -> None:
        for leaf in (x, model.first.weight):
            leaf.register_hook(lambda grad: grad * 7)

    if when == "before the block":
        hook()
    with gradlib.record(model) as recording:
        if when == "before the call":
            hook()
        output = model(x)
        if when == "after":
            hook()
        loss_of(output).backward()
    call = recording["first"]
    assert_close(call.grad_input_total, (x.grad,))
    assert_close(call.grad_input[0] * 7, x.grad)
    assert_close(call.param_grads_total["weight"], model.first.weight.grad)
    assert_close(call.param_grads["weight"] * 7, model.first.weight.grad)
    assert_is_vjp(call, model.first)


def test_a_tensor_hook_that_sets_a_gradient_to_zero_in_place() -> None:
    model = Net()
    x = torch.randn(2, 3, requires_grad=True)
    with gradlib.record(model) as recording:
        output = model(x)
        output.register_hook(lambda grad: grad * 0)
        loss_of(output).backward()
    assert_close(recording["second"].grad_output, (torch.zeros(2, 2),))


def test_a_node_hook_that_changes_what_leaves_the_node() -> None:
    model = nn.Linear(3, 2)
    x = torch.randn(2, 3, requires_grad=True)
    with gradlib.record(model) as recording:
        output = model(x)
        output.grad_fn.register_hook(
            lambda grads, _: tuple(grad if grad is None else grad * 4 for grad in grads)
        )
        loss_of(output).backward()
    call = recording[""]
    assert_close(call.param_grads["weight"], model.weight.grad)
    assert_close(call.param_grads["bias"], model.bias.grad)
    assert_close(call.grad_input, (x.grad,))


def test_a_node_hook_that_changes_what_enters_the_node() -> None:
    model = nn.Linear(3, 2)
    x = torch.randn(2, 3, requires_grad=True)
    with gradlib.record(model) as recording:
        output = model(x)
        output.retain_grad()  # .grad is taken before the node's hooks
        output.grad_fn.register_prehook(lambda grads: (grads[0] * 4,))
        loss_of(output).backward()
    call = recording[""]
    assert_close(call.grad_output, (output.grad,))
    assert_close(call.grad_input, (x.grad,))
    assert_close(call.param_grads["weight"], model.weight.grad)
    assert not recording.verify().ok  # the factor of the hook is not part of the module


@pytest.mark.filterwarnings("ignore:Using a non-full backward hook")
def test_old_style_backward_hooks_that_change_gradients() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    model[2].register_backward_hook(
        lambda _m, grads, _out: tuple(grad * 4 for grad in grads)
    )
    x = torch.randn(2, 3, requires_grad=True)
    with gradlib.record(model) as recording:
        run(model, x)
    call = recording["2"]
    assert_close(call.param_grads["weight"], model[2].weight.grad)
    assert_close(call.param_grads["bias"], model[2].bias.grad)
    assert_close(call.grad_input, recording["1"].grad_output)
    assert_close(recording["0"].grad_input, (x.grad,))


@pytest.mark.parametrize(
    "kind",
    [
        "pre",
        "forward",
    ],
)
def test_forward_hooks_that_raise(kind: str) -> None:
    model = Net()

    def refuse(*_: object) -> None:
        raise ValueError("no")

    if kind == "pre":
        handle = model.second.register_forward_pre_hook(refuse)
    else:
        handle = model.second.register_forward_hook(refuse)
    x = torch.randn(2, 3, requires_grad=True)
    with gradlib.record(model) as recording:
        with pytest.raises(ValueError, match="no"):
            model(x)
        handle.remove()
        run(model, x)
    who = "its forward" if kind == "pre" else "a hook"
    assert recording["second", 0].note.startswith(f"{who} raised ValueError")
    assert recording["", 0].note == "its forward raised ValueError"
    assert recording["", 1].index == 1
    assert_close(recording["", 1].grad_input, (x.grad,))


def test_a_backward_hook_that_raises() -> None:
    model = Net()
    x = torch.randn(2, 3, requires_grad=True)

    def refuse(_: Tensor) -> None:
        raise ValueError("no")

    def hook_input(_module: nn.Module, args: Any) -> None:
        args[0].register_hook(refuse)

    with gradlib.record(model) as recording:
        first = model(x)
        first.register_hook(refuse)
        with pytest.raises(ValueError, match="no"):
            loss_of(first).backward()
        run(model, x)
    assert_close(recording["", 1].grad_input, (x.grad,))
    for reduced in (False, True):
        model.zero_grad()
        x.grad = None
        reduce = gradlib.tensor_stats if reduced else None
        with gradlib.record(model, reduce=reduce) as recording:
            handle = model.second.register_forward_pre_hook(hook_input)
            output = model(x)
            handle.remove()
            with pytest.raises(ValueError, match="no"):
                loss_of(output).backward()
        assert recording["second"].param_grads["bias"] is not None
        assert recording["first"].passes == ()
        str(recording)
