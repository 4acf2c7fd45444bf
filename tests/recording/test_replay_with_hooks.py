"""Replays of calls whose inputs and outputs have tensor hooks."""

from collections.abc import Callable
from typing import Any

import numpy.random
import pytest
import torch
from torch import Tensor, nn
from torch.nn.modules.module import (
    register_module_forward_hook,
    register_module_forward_pre_hook,
    register_module_full_backward_hook,
    register_module_full_backward_pre_hook,
)
from torch.nn.utils import parametrize
from torch.utils.checkpoint import checkpoint

import gradlib
from gradlib import Recording


def changed(grad: Tensor) -> Tensor:
    """Change a gradient so that a change made twice, or in parts, shows."""
    return 0.5 * grad.clamp(-0.3, 0.3) + 0.1


def halves(grads: Any) -> tuple[Any, ...]:
    return tuple(None if it is None else 0.5 * it for it in grads)


def hook(*tensors: Any) -> None:
    for tensor in tensors:
        tensor.register_hook(changed)


class Layer(nn.Module):
    """Applies a function; its call may be hooked in many ways."""

    def __init__(self, computes: Callable[[Any, Tensor], Any]) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.scale = nn.Parameter(torch.randn(4))
        self.computes = computes

    def forward(self, x: Tensor) -> Any:
        return self.computes(self, x)


def on_output(layer: Any, x: Tensor) -> Tensor:
    y = layer.first(x).tanh()
    hook(y)
    return y


def on_input(layer: Any, x: Tensor) -> Tensor:
    hook(x)
    return layer.first(x).tanh()


def on_own_weight(layer: Any, x: Tensor) -> Tensor:
    hook(layer.scale)
    return layer.first(x) * layer.scale


def on_own_weight_that_is_returned(layer: Any, x: Tensor) -> tuple[Tensor, Tensor]:
    hook(layer.scale)
    return layer.scale * 1, layer.scale * x


def on_an_input_that_is_returned(_layer: Any, x: Tensor) -> Tensor:
    hook(x)
    return x


def on_a_view_of_the_input(_layer: Any, x: Tensor) -> Tensor:
    y = x[:2]
    hook(x, y)
    return y


def on_a_view_and_its_base(layer: Any, x: Tensor) -> Tensor:
    whole = layer.first(x)
    part = whole[:2]
    hook(whole, part)
    return part


def before_it_is_overwritten(layer: Any, x: Tensor) -> Tensor:
    y = layer.first(x) * 1
    hook(y)
    return y.mul_(2)


def before_and_after_it_is_overwritten(layer: Any, x: Tensor) -> Tensor:
    y = layer.first(x) * 1
    hook(y)
    y.mul_(2)
    hook(y)
    return y


def on_a_view_that_is_overwritten(layer: Any, x: Tensor) -> Tensor:
    part = (layer.first(x) * 1)[:2]
    hook(part)
    part.mul_(2)
    hook(part)
    return part


def on_an_input_that_is_overwritten(layer: Any, x: Tensor) -> Tensor:
    hook(x)
    x.mul_(2)
    hook(x)
    return layer.first(x)


def on_a_tensor_inside(layer: Any, x: Tensor) -> Tensor:
    inner = layer.first(x).tanh()
    hook(inner)
    return layer.second(inner)


def on_outputs_made_of_each_other(layer: Any, x: Tensor) -> tuple[Tensor, ...]:
    a = layer.first(x).tanh()
    b = layer.second(a)
    hook(a, b)
    return a, b, a


def on_the_output_of_a_call_inside(layer: Any, x: Tensor) -> Tensor:
    y = layer.first(x)
    hook(y)
    return y


def in_a_checkpoint(layer: Any, x: Tensor) -> Tensor:
    def inside(x: Tensor) -> Tensor:
        y = layer.second(layer.first(x).tanh())
        hook(y)
        return y

    hook(x)
    return checkpoint(inside, x, use_reentrant=False)


def on_a_reentrant_checkpoint(layer: Any, x: Tensor) -> Tensor:
    y = checkpoint(lambda x: layer.second(layer.first(x).tanh()), x, use_reentrant=True)
    hook(x, y)
    return y


def on_the_node_of_the_input(layer: Any, x: Any) -> Tensor:
    x.grad_fn.register_hook(lambda grads, _outs: halves(grads))
    return layer.first(x)


def in_a_module_that_calls_itself(layer: Any, x: Tensor) -> Tensor:
    layer.depth = getattr(layer, "depth", 0) + 1
    y = layer.first(x) if layer.depth == 3 else 2 * layer(0.5 * x)
    layer.depth -= 1
    hook(y)
    return y


COMPUTES = (
    on_output,
    on_input,
    on_own_weight,
    on_own_weight_that_is_returned,
    on_an_input_that_is_returned,
    on_a_view_of_the_input,
    on_a_view_and_its_base,
    before_it_is_overwritten,
    before_and_after_it_is_overwritten,
    on_a_view_that_is_overwritten,
    on_an_input_that_is_overwritten,
    on_a_tensor_inside,
    on_outputs_made_of_each_other,
    on_the_output_of_a_call_inside,
    in_a_checkpoint,
    on_a_reentrant_checkpoint,
    on_the_node_of_the_input,
    in_a_module_that_calls_itself,
)

OVERWRITES_INPUT = (on_an_input_that_is_overwritten,)  # torch refuses it with these
BACKWARD_HOOKS = ("register_full_backward_hook", "register_full_backward_pre_hook")


class Net(nn.Module):
    """Has a layer between two others."""

    def __init__(self, layer: Layer) -> None:
        super().__init__()
        self.before, self.layer, self.after = nn.Linear(4, 4), layer, nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        output = self.layer(1 * self.before(x))
        outputs = output if isinstance(output, tuple) else (output,)
        squares = [self.after(it).square().sum() for it in outputs]
        return torch.stack(squares).sum()


def recorded(layer: Layer) -> Recording:
    """Record two backward passes."""
    net = Net(layer)
    with gradlib.record(net) as recording:
        loss = net(torch.randn(4, 4))
        loss.backward(retain_graph=True)
        loss.cos().backward()
    return recording


def assert_repeats(recording: Recording) -> None:
    found = recording.verify()
    assert found.disagreements == (), str(found)
    for call in recording.calls("layer"):
        for recorded_pass in call.passes:
            again = recorded_pass.replay()
            torch.testing.assert_close(again.grad_input, recorded_pass.grad_input)
            torch.testing.assert_close(again.param_grads, recorded_pass.param_grads)


@pytest.mark.parametrize("computes", COMPUTES, ids=lambda it: it.__name__)
def test_a_tensor_hook_that_the_forward_sets(computes: Any) -> None:
    torch.manual_seed(0)
    assert_repeats(recorded(Layer(computes)))


@pytest.mark.parametrize("kind", BACKWARD_HOOKS)
@pytest.mark.parametrize(
    "computes",
    [it for it in COMPUTES if it not in OVERWRITES_INPUT],
    ids=lambda it: it.__name__,
)
def test_a_tensor_hook_beside_a_backward_hook(computes: Any, kind: str) -> None:
    torch.manual_seed(0)
    layer = Layer(computes)
    getattr(layer, kind)(lambda _module, grads, *_: halves(grads))
    assert_repeats(recorded(layer))


@pytest.mark.parametrize("computes", COMPUTES, ids=lambda it: it.__name__)
def test_a_tensor_hook_that_a_forward_hook_sets(computes: Any) -> None:
    torch.manual_seed(0)
    layer = Layer(computes)

    def before(_module: object, args: tuple[Tensor]) -> None:
        hook(args[0])

    def after(_module: object, _args: object, output: Any) -> None:
        hook(output[0] if isinstance(output, tuple) else output)

    layer.register_forward_pre_hook(before)
    layer.register_forward_hook(after)
    assert_repeats(recorded(layer))


def test_an_output_that_is_returned_twice_beside_a_backward_hook() -> None:
    class Twice(nn.Module):
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            y = x.tanh()
            return y, y

    twice = Twice()
    twice.register_full_backward_hook(lambda _module, grads, _outs: halves(grads))
    x = torch.randn(3, requires_grad=True)
    with gradlib.record(twice) as recording:
        a, b = twice(x)
        (a + 2 * b).sum().backward()
    call = recording[""]
    torch.testing.assert_close(call.replay().grad_input, call.grad_input)


def test_the_gradient_of_an_implicit_layer() -> None:
    class Fixed(nn.Module):
        """Its output solves z = tanh(weight z + x), and a hook differentiates that."""

        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(0.1 * torch.randn(3, 3))

        def step(self, z: Tensor, x: Tensor) -> Tensor:
            return torch.tanh(z @ self.weight + x)

        def forward(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                z = torch.zeros_like(x)
                for _ in range(50):
                    z = self.step(z, x)
            start = z.detach().requires_grad_()
            end = self.step(start, x.detach())

            def solved(grad: Tensor) -> Tensor:
                found = grad
                for _ in range(50):
                    (more,) = torch.autograd.grad(end, start, found, retain_graph=True)
                    found = grad + more
                return found

            output: Any = self.step(z, x)
            output.register_hook(solved)
            return output

    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 3), Fixed())
    with gradlib.record(net) as recording:
        net(torch.randn(2, 3)).sum().backward()
    found = recording.verify()
    assert found.ok, str(found)
    call = recording["1"]
    torch.testing.assert_close(call.replay().grad_input, call.grad_input)


def test_a_weight_used_inside_and_outside_a_reentrant_checkpoint() -> None:
    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.randn(4))

        def forward(self, x: Tensor) -> Tensor:
            y = checkpoint(lambda x: (x * self.scale).tanh(), x, use_reentrant=True)
            hook(self.scale)
            return y * self.scale

    layer, x = Layer(), torch.randn(3, 4, requires_grad=True)
    scale = layer.scale.detach().clone().requires_grad_()
    ((x.detach() * scale).tanh() * scale).sum().backward()
    with gradlib.record(layer) as recording:
        layer(x).sum().backward()
    torch.testing.assert_close(recording[""].replay().param_grads["scale"], scale.grad)


def test_a_hook_on_a_weight_with_two_names() -> None:
    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.randn(4))
            self.same = self.scale

        def forward(self, x: Tensor) -> Tensor:
            hook(self.same)
            return x * self.scale * self.same

    layer = Layer()
    with gradlib.record(layer) as recording:
        layer(torch.randn(3, 4)).sum().backward()
    call = recording[""]
    assert call.param_grads.keys() == {"scale", "same"}
    torch.testing.assert_close(call.replay().param_grads, call.param_grads)


EVERY = {
    register_module_forward_pre_hook: lambda _module, args: halves(args),
    register_module_forward_hook: lambda _module, _args, output: output * 2,
    register_module_full_backward_pre_hook: lambda _module, grads: halves(grads),
    register_module_full_backward_hook: lambda _module, grads, _: halves(grads),
}
"""Ways to hook every module there is, each with a hook that changes something."""


@pytest.mark.parametrize("of_its_own", BACKWARD_HOOKS)
@pytest.mark.parametrize("register", EVERY, ids=lambda it: it.__name__)
def test_a_hook_of_every_module(register: Any, of_its_own: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    getattr(model[1], of_its_own)(lambda _module, grads, *_: halves(grads))
    handle = register(EVERY[register])
    try:
        with gradlib.record(model) as recording:
            model(torch.randn(2, 3, requires_grad=True)).sum().backward()
        assert recording.verify().disagreements == ()
        for call in recording:
            again = call.replay()
            torch.testing.assert_close(again.grad_input, call.grad_input)
            torch.testing.assert_close(again.param_grads, call.param_grads)
    finally:
        handle.remove()


def test_hooks_of_a_tensor_that_is_returned_and_no_copy_stay() -> None:
    table = torch.ones(3, requires_grad=True)

    class Looks(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return looked_up() * x

    class Table(nn.Module):
        def forward(self) -> Tensor:
            return table

    looked_up = Table()
    model = Looks()
    model.table = looked_up
    table.register_hook(lambda grad: grad * 3)
    x = torch.full((3,), 2.0)
    with gradlib.record(model) as recording:
        model(x).sum().backward()
    assert recording.verify().disagreements == ()
    table.grad = None
    model(x).sum().backward()
    assert table.grad is not None
    assert table.grad.tolist() == [6.0, 6.0, 6.0]


def test_a_graph_outside_of_a_checkpoint_is_still_gone_through() -> None:
    outside = torch.ones(5, 3, requires_grad=True).exp()

    class Adds(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(3, 3)

        def forward(self, x: Tensor) -> Any:
            made: Any = checkpoint(self.layer, x, use_reentrant=True)
            return made + held[0]

    held = [outside]
    with gradlib.record(model := Adds()) as recording:
        x = torch.ones(5, 3, requires_grad=True)
        model(x).sum().backward(retain_graph=True)
    assert recording.verify().ok
    outside.sum().backward()


def test_what_parametrizations_have_cached_is_not_the_copies() -> None:
    class Doubles(nn.Module):
        def forward(self, weight: Tensor) -> Tensor:
            return weight * 2

    model: Any = nn.Linear(3, 3)
    parametrize.register_parametrization(model, "weight", Doubles())
    x = torch.ones(2, 3)
    with gradlib.record(model) as recording:
        model(x).sum().backward()
    expected = model.parametrizations.weight.original.grad
    model.zero_grad()
    with parametrize.cached():
        assert recording.verify().ok
        model(x).sum().backward()
    assert torch.equal(model.parametrizations.weight.original.grad, expected)


def test_another_generator_of_numpy() -> None:
    of_numpy: Any = numpy.random
    before = of_numpy.get_bit_generator()
    of_numpy.set_bit_generator(of_numpy.PCG64())
    try:
        with gradlib.record(model := nn.Linear(3, 3)) as recording:
            model(torch.ones(2, 3)).sum().backward()
        assert recording.verify().ok
    finally:
        of_numpy.set_bit_generator(before)


def test_a_hook_that_a_call_sets_on_what_is_no_copy_is_not_left() -> None:
    table = torch.ones(3, requires_grad=True) * 1

    class Hooks(nn.Module):
        def forward(self, _: Tensor) -> Tensor:
            table.register_hook(lambda grad: grad * 2)
            return table

    with gradlib.record(model := Hooks()) as recording:
        model(torch.ones(3)).sum().backward(retain_graph=True)
    hooks: Any = table._backward_hooks
    before = dict(hooks)
    recording[""].replay()
    assert dict(hooks) == before
