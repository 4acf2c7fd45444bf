"""What `record` sees, compared with gradients that autograd gives without it."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close
from torch.utils.checkpoint import checkpoint

import gradlib

from .first_nets import Net, Residual, Thrice, loss_of
from .truth import grad_of


def test_every_quantity_of_a_chain() -> None:
    net = Net()
    x = torch.randn(4, 3)
    # The same network by hand; every tensor keeps its gradient.
    names = ["fc1", "relu1", "fc2", "relu2", "fc3"]
    tensors = [x]
    for name in names:
        tensors.append(copy.deepcopy(net.get_submodule(name))(tensors[-1]))
    for tensor in tensors[1:]:
        tensor.retain_grad()
    loss_of(tensors[-1]).backward()

    with gradlib.record(net) as recording:
        loss_of(net(x)).backward()

    assert [call.name for call in recording] == ["", *names]
    for name, before, after in zip(names, tensors, tensors[1:], strict=False):
        call = recording[name]
        assert_close(call.args, (before.detach(),))
        assert_close(call.output, after.detach())
        assert_close(call.grad_output, (after.grad,))
        assert_close(call.grad_input, (before.grad,))
        assert_close(call.grad_input_total, (before.grad,))
        own = dict(net.get_submodule(name).named_parameters())
        assert list(call.param_grads) == list(own)
        for parameter_name, parameter in own.items():
            assert_close(call.param_grads[parameter_name], parameter.grad)
            assert_close(call.param_grads_total[parameter_name], parameter.grad)
    assert recording["fc1"].note == "args[0] does not require grad"
    assert recording["fc2"].note == ""


def test_results_are_the_same_bits_with_and_without() -> None:
    net, plain = (copy.deepcopy(model) for model in [Net()] * 2)
    x = torch.randn(4, 3, requires_grad=True)
    expected = torch.autograd.grad(loss_of(plain(x)), [x, *plain.parameters()])
    with gradlib.record(net):
        found = torch.autograd.grad(loss_of(net(x)), [x, *net.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_share_and_total_of_a_residual_branch() -> None:
    model = Residual()
    x = torch.randn(2, 4, requires_grad=True)
    with gradlib.record(model) as recording:
        output = model(x)
        loss_of(output).backward()
    (skip,) = torch.autograd.grad(loss_of(output), output)
    call = recording["f"]
    assert_close(call.grad_input_total[0], x.grad)
    assert_close(call.grad_input[0], grad_of(x) - skip)
    assert_close(recording[""].grad_input[0], x.grad)


def test_the_total_counts_uses_outside_the_model() -> None:
    model = nn.Sequential(nn.Linear(4, 4))
    x = torch.randn(2, 4, requires_grad=True)
    with gradlib.record(model) as recording:
        (model(x).sum() + (x**2).sum()).backward()
    for name in ("", "0"):
        assert_close(recording[name].grad_input_total[0], x.grad)
        assert_close(recording[name].grad_input[0], grad_of(x) - 2 * x.detach())


def test_one_module_called_three_times() -> None:
    model = Thrice()
    with gradlib.record(model) as recording:
        loss_of(model(torch.randn(2, 4))).backward()
    calls = recording.calls("f")
    assert [call.index for call in calls] == [0, 1, 2]
    for name, parameter in model.f.named_parameters():
        shares = [call.param_grads[name] for call in calls]
        assert_close(sum(shares), parameter.grad)
        assert not torch.equal(shares[0], shares[1])
        for call in calls:
            assert_close(call.param_grads_total[name], parameter.grad)
    # Each call's gradients are those of its own tensors.
    for call in calls:
        (grad,) = call.grad_output
        assert_close(call.param_grads["weight"], grad.T @ call.args[0])
        assert_close(call.param_grads["bias"], grad.sum(0))


def test_a_parameter_used_outside_its_module() -> None:
    model = Net()
    with gradlib.record(model) as recording:
        output = model(torch.randn(4, 3))
        decay = (model.fc2.weight**2).sum()
        (output.sum() + decay).backward()
    call = recording["fc2"]
    weight = model.fc2.weight
    assert_close(call.param_grads_total["weight"], weight.grad)
    assert_close(call.param_grads["weight"], grad_of(weight) - 2 * weight.detach())


def test_a_parameter_of_a_module_that_calls_others() -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.tensor(3.0))
            self.inner = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.scale * self.inner(self.scale * x)

    model = Scaled()
    with gradlib.record(model) as recording:
        loss_of(model(torch.randn(2, 4))).backward()
    assert_close(recording[""].param_grads, {"scale": model.scale.grad})


@pytest.mark.filterwarnings("ignore")  # torch's own: masked tensors are a prototype
def test_masked_tensors() -> None:
    class Exp(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.exp()

    model = nn.Sequential(Exp(), Exp())
    mask = torch.tensor([True, False, True])
    x = torch.masked.masked_tensor(torch.randn(3), mask, requires_grad=True)
    with gradlib.record(model) as recording:
        model(x).sum().backward()
    share: Any = recording["0"].grad_input[0]
    total: Any = x.grad
    assert_close(share.to_tensor(0), total.to_tensor(0))
    assert share.get_mask().equal(mask)
    assert recording.first_nonfinite() is None
    assert recording.compare(recording).ok
    assert str(recording).count("[3]") == 3


def test_two_backward_passes_over_one_forward() -> None:
    net = Net()
    with gradlib.record(net) as recording:
        output = net(torch.randn(4, 3))
        output.sum().backward(retain_graph=True)
        (3 * output.sum()).backward()
    call = recording["fc2"]
    first, second = call.passes
    assert (first.backward, second.backward) == (0, 1)
    assert_close(second.grad_output[0], 3 * first.grad_output[0])
    assert_close(second.grad_input_total[0], 3 * first.grad_input[0])
    added = first.param_grads_total["weight"] + second.param_grads_total["weight"]
    assert_close(added, net.fc2.weight.grad)
    with pytest.raises(
        gradlib.AmbiguousCallError, match=r"call.passes\[i\].grad_input"
    ):
        _ = call.grad_input


def test_two_forwards_then_their_backwards_in_the_other_order() -> None:
    net = Net()
    with gradlib.record(net) as recording:
        first, second = (net(torch.randn(4, 3)).sum() for _ in range(2))
        (2 * second).backward()
        first.backward()
    assert len(recording.forwards) == 2
    for forward, factor, backward in ((0, 1.0, 1), (1, 2.0, 0)):
        call = recording.forwards[forward]["fc3"]
        assert (call.index, call.forward) == (forward, forward)
        assert call.passes[0].backward == backward
        assert_close(call.grad_output[0], torch.full((4, 2), factor))


def test_autograd_grad_for_one_weight() -> None:
    net = Net()
    with gradlib.record(net) as recording:
        loss = loss_of(net(torch.randn(4, 3)))
        (grad,) = torch.autograd.grad(loss, net.fc3.weight)
    assert net.fc3.weight.grad is None
    call = recording["fc3"]
    assert_close(call.param_grads["weight"], grad)
    assert_close(call.param_grads_total["weight"], grad)
    assert call.param_grads["bias"] is None
    assert call.grad_input == (None,)
    assert call.note == "backward pass 0 gave no gradient to args[0], bias"
    assert recording["fc2"].note == "no backward pass reached its output in the block"


def test_a_frozen_parameter() -> None:
    net = Net()
    net.fc2.weight.requires_grad_(False)
    with gradlib.record(net) as recording:
        net(torch.randn(4, 3)).sum().backward()
    call = recording["fc2"]
    assert call.param_grads["weight"] is None
    assert_close(call.param_grads["bias"], net.fc2.bias.grad)
    assert call.note == "weight does not require grad"


def test_why_there_is_no_backward_pass() -> None:
    net = Net()
    with gradlib.record(net) as recording:
        with torch.no_grad():
            net(torch.randn(4, 3))
        net(torch.randn(4, 3))
    quiet, unused = recording.calls("fc2")
    assert quiet.note == "gradients were disabled when it was called"
    assert unused.note == "no backward pass reached its output in the block"
    assert quiet.grad_output is None
    assert quiet.passes == ()
    with gradlib.record(model := nn.ReLU()) as recording:
        model(torch.randn(3))
    assert recording[""].note == "it returned no tensor that requires grad"


def test_nested_recordings_agree() -> None:
    model = Residual()
    x = torch.randn(2, 4, requires_grad=True)
    with gradlib.record(model) as outer, gradlib.record(model) as inner:
        loss_of(model(x)).backward()
    for field in ("grad_input", "grad_input_total", "grad_output", "param_grads"):
        assert_close(getattr(inner["f"], field), getattr(outer["f"], field))


def test_autocast() -> None:
    net = Net()
    with (
        gradlib.record(net) as recording,
        torch.autocast(torch.get_default_device().type, torch.bfloat16),
    ):
        net(torch.randn(4, 3)).sum().backward()
    for name in ("fc1", "fc2", "fc3"):
        call = recording[name]
        for own, parameter in net.get_submodule(name).named_parameters():
            assert_close(call.param_grads[own], parameter.grad)
    assert recording["fc3"].grad_output[0].dtype == torch.bfloat16


def test_autocast_reuses_the_cast_of_a_weight() -> None:
    model = Thrice()
    with (
        gradlib.record(model) as recording,
        torch.autocast(torch.get_default_device().type, torch.bfloat16),
    ):
        model(torch.randn(2, 4)).sum().backward()
    calls = recording.calls("f")
    for call in calls:
        assert call.param_grads["weight"].dtype == torch.float32
        assert_close(call.param_grads_total["weight"], model.f.weight.grad)
        (grad,) = call.grad_output
        share = grad.T @ call.args[0].to(grad.dtype)
        assert_close(call.param_grads["weight"], share.float(), rtol=0.02, atol=0.02)
    total = sum(call.param_grads["weight"] for call in calls)
    assert_close(total, model.f.weight.grad, rtol=0.02, atol=0.02)


def test_a_module_that_stands_in_two_places() -> None:
    shared = nn.Linear(4, 4)
    model = nn.Sequential(shared, nn.ReLU(), shared)
    with gradlib.record(model) as recording:
        model(torch.randn(2, 4)).sum().backward()
    assert len(recording.calls("0")) == 2
    assert recording["2", 1].name == "0"
    assert "2" in recording


def test_only_a_module_can_be_recorded() -> None:
    with pytest.raises(gradlib.NotAModuleError, match="of type function") as caught:
        gradlib.record(lambda x: x)  # pyright: ignore[reportArgumentType] (on purpose)
    assert isinstance(caught.value, TypeError)
    assert caught.value.code == "GL200"
    with pytest.raises(
        gradlib.NotAModuleError, match=r"class Linear, .* Linear\(...\)"
    ):
        gradlib.record(nn.Linear)  # pyright: ignore[reportArgumentType] (on purpose)


@pytest.mark.parametrize(
    "given", ["model.pt", Path("model.pt"), nn.ReLU().state_dict()]
)
def test_weights_alone_are_no_module(given: Any) -> None:
    with pytest.raises(gradlib.NotAModuleError, match=r"load_state_dict\(\)"):
        gradlib.record(given)


@pytest.mark.parametrize("given", [None, [nn.ReLU()]])
def test_what_is_no_function_is_not_told_to_be_one(given: Any) -> None:
    with pytest.raises(gradlib.NotAModuleError, match=r"Pass the model\.$"):
        gradlib.record(given)


def test_autograd_inside_a_module() -> None:
    class Forces(nn.Module):
        def forward(self, energy: Tensor, x: Tensor) -> Tensor:
            (grad,) = torch.autograd.grad(energy, x, create_graph=True)
            return -grad

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.energy, self.forces = nn.Linear(2, 1), Forces()

        def forward(self, x: Tensor) -> Tensor:
            return self.forces(self.energy(x).sin().sum(), x)

    model = Model()
    x = torch.randn(3, 2, requires_grad=True)
    expected = model(x)
    expected_grads = torch.autograd.grad(loss_of(expected), [x, *model.parameters()])[
        :2
    ]
    with gradlib.record(model) as recording:
        found = model(x)
        found_grads = torch.autograd.grad(loss_of(found), [x, *model.parameters()])[:2]
    assert torch.equal(found, expected)
    assert all(map(torch.equal, found_grads, expected_grads))
    assert len(recording["energy"].passes) == 2


def test_the_order_of_additions_is_kept() -> None:
    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.q, self.k, self.v = (nn.Linear(4, 4) for _ in range(3))

        def forward(self, x: Tensor) -> Tensor:
            return self.q(x) * self.k(x) + self.v(x)

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.a = nn.Linear(4, 4), Attention()

        def forward(self, x: Tensor) -> Tensor:
            h = self.inner(x)
            return h + self.a(h)

    for seed in range(20):
        torch.manual_seed(seed)
        model, x = Block(), torch.randn(3, 4)
        expected = torch.autograd.grad(loss_of(model(x)), [*model.parameters()])
        with gradlib.record(model):
            found = torch.autograd.grad(loss_of(model(x)), [*model.parameters()])
        assert all(map(torch.equal, found, expected))


@pytest.mark.cpu
def test_memory_shared_with_numpy() -> None:
    buffer = torch.zeros(1, 2)
    array = buffer.numpy()
    with gradlib.record(model := nn.Sequential(nn.Identity())) as recording:
        for i in range(3):
            array[:] = i
            model(buffer)
    assert [call.args[0].tolist()[0] for call in recording.calls("0")] == [
        [0, 0],
        [1, 1],
        [2, 2],
    ]


def test_a_module_that_calls_itself() -> None:
    class Again(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.tensor(3.0))

        def forward(self, x: Tensor, depth: int) -> Tensor:
            return self.scale * (self(x, depth - 1) if depth else x)

    x = torch.tensor(2.0, requires_grad=True)
    with gradlib.record(model := Again()) as recording:
        model(x, 2).backward()
    assert len(recording.forwards) == 1
    # scale³ x: each call's share is its own factor and those inside it.
    assert [call.param_grads["scale"].item() for call in recording] == [54, 36, 18]
    assert [call.grad_input[0].item() for call in recording] == [27, 27, 27]


@pytest.mark.parametrize("reduce", [None, Tensor.clone])
def test_a_module_that_is_not_initialised_yet(reduce: Any) -> None:
    lazy = nn.LazyLinear(2)
    model = nn.Sequential(nn.Linear(2, 3), lazy)
    with gradlib.record(model, reduce=reduce) as recording:
        model(torch.ones(1, 2)).sum().backward()
    assert_close(recording["1"].param_grads["bias"], grad_of(lazy.bias))
    assert_close(recording["1"].param_grads_total["bias"], grad_of(lazy.bias))


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoints(reentrant: bool) -> None:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            return torch.tanh(self.b(torch.tanh(self.a(torch.tanh(self.a(x))))))

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.block = nn.Linear(4, 4), Block()

        def forward(self, x: Tensor, again: bool) -> Tensor:
            x = self.first(x)
            for _ in range(2):
                x = (
                    checkpoint(self.block, x, use_reentrant=reentrant)
                    if again
                    else self.block(x)
                )
            return x

    model, plain = (copy.deepcopy(one) for one in [Model()] * 2)
    x = torch.randn(3, 4)
    with gradlib.record(plain) as expected:
        loss_of(plain(x, again=False)).backward()
    with gradlib.record(model) as recording:
        loss_of(model(x, again=True)).backward()

    assert [call.name for call in recording] == [call.name for call in expected]
    for found, wanted in zip(recording, expected, strict=True):
        assert_close(found.output, wanted.output)
        (pass_,) = found.passes
        assert pass_.backward == 0
        for field in ("grad_input", "grad_output", "param_grads", "param_grads_total"):
            if found.name != "":
                assert_close(getattr(found, field), getattr(wanted, field))
        remark = "a checkpoint computed it again for the backward pass"
        in_block = found.name.startswith("block")
        assert found.note == (remark if in_block else wanted.note)
