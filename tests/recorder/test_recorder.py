"""What `record` sees, held against gradients that autograd gives without it."""

import contextlib
import copy
import gc
import weakref
from collections import OrderedDict
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.testing import assert_close
from torch.utils.checkpoint import checkpoint

import gradlib
from gradlib.private.hooks import HOOKS
from gradlib.tree import tensors_in

from ..opcodes import opcodes


class Net(nn.Module):
    """fc1, fc2 and fc3 of the first thread."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1 = nn.Linear(3, 20)
        self.relu1 = nn.ReLU()
        self.fc2 = nn.Linear(20, 30)
        self.relu2 = nn.ReLU()
        self.fc3 = nn.Linear(30, 2)

    def forward(self, x: Tensor) -> Tensor:
        h = self.relu1(self.fc1(x))
        return self.fc3(self.relu2(self.fc2(h)))


class Residual(nn.Module):
    """``x + f(x)``: the input of `f` has a second use."""

    def __init__(self) -> None:
        super().__init__()
        self.f = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.f(x)


class Thrice(nn.Module):
    """One module, three calls."""

    def __init__(self) -> None:
        super().__init__()
        self.f = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(3):
            x = torch.tanh(self.f(x))
        return x


def loss_of(output: Tensor) -> Tensor:
    """Weigh the entries differently, so that no two gradients agree by chance."""
    return (output * torch.arange(1.0, output.numel() + 1).view_as(output)).sum()


def grad_of(tensor: Tensor) -> Tensor:
    """Return ``tensor.grad``, which must be there."""
    assert tensor.grad is not None
    return tensor.grad


def hooks_of(model: nn.Module) -> list[object]:
    """Return every hook left on a model and its parameters, or noted there."""
    left: list[object] = []
    for module in model.modules():
        for kind in HOOKS:
            left += getattr(module, kind).values()
    for parameter in model.parameters():
        left += (parameter._backward_hooks or {}).values()
    return left


def test_every_quantity_of_a_chain() -> None:
    net = Net()
    x = torch.randn(4, 3)
    # The same network by hand, every tensor keeping its gradient.
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


@pytest.mark.parametrize(
    "in_place", [nn.ReLU(inplace=True), nn.Dropout(0.5, inplace=True)]
)
def test_a_module_that_overwrites_its_input(in_place: nn.Module) -> None:
    model = nn.Sequential(nn.Linear(4, 4), in_place, nn.Linear(4, 2))
    plain = copy.deepcopy(model)
    x = torch.randn(8, 4)
    torch.manual_seed(1)
    before = plain[0](x)
    before.retain_grad()
    after = plain[1](before.clone())
    after.retain_grad()
    loss_of(plain[2](after)).backward()

    torch.manual_seed(1)
    with gradlib.record(model) as recording:
        loss_of(model(x)).backward()

    assert_close(recording["0"].output, before.detach())
    assert_close(recording["0"].grad_output, (before.grad,))
    assert_close(recording["1"].args, (before.detach(),))
    assert_close(recording["1"].grad_input, (before.grad,))
    assert_close(recording["1"].grad_input_total, (before.grad,))
    assert_close(recording["1"].grad_output, (after.grad,))
    assert_close(recording["2"].args, (after.detach(),))
    assert recording["1"].note == ""


def test_an_overwritten_input_that_has_another_use() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.relu = nn.ReLU(inplace=True)

        def forward(self, x: Tensor) -> Tensor:
            h = 2 * x
            other = 3 * h
            return self.relu(h) + other

    x = torch.randn(2, 4)
    with gradlib.record(model := Model()) as recording:
        model(x.requires_grad_()).sum().backward()
    share = (x.detach() > 0).float()
    assert_close(recording["relu"].grad_input, (share,))
    assert_close(recording["relu"].grad_input_total, (share + 3,))


def test_a_function_that_overwrites_an_output() -> None:
    linear = nn.Linear(4, 4)
    x = torch.randn(2, 4)
    before = linear(x)
    (expected,) = torch.autograd.grad(loss_of(F.relu(before)), before)
    with gradlib.record(linear) as recording:
        loss_of(F.relu_(linear(x))).backward()
    assert_close(recording[""].output, before.detach())
    assert_close(recording[""].grad_output, (expected,))


def test_views_that_are_overwritten() -> None:
    # With three dimensions the output of a Linear is a view.
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(inplace=True), nn.Linear(4, 2))
    plain = copy.deepcopy(model)
    x = torch.randn(2, 3, 4)
    before = plain[0](x)
    before.retain_grad()
    after = plain[1](before.clone())
    loss_of(plain[2](after)).backward()
    with gradlib.record(model) as recording:
        loss_of(model(x)).backward()
    assert_close(recording["0"].grad_output, (before.grad,))
    assert_close(recording["1"].grad_input, (before.grad,))
    assert_close(recording["1"].grad_input_total, (before.grad,))
    assert recording["1"].note == ""


def test_an_overwritten_part_of_a_tensor() -> None:
    class Halves(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.relu = nn.ReLU(inplace=True)

        def forward(self, x: Tensor) -> Tensor:
            h = (2 * x).T
            left, right = h[:2], h[2:]
            self.relu(right)
            return 3 * left + 5 * right

    x = torch.randn(3, 4, requires_grad=True)
    with gradlib.record(model := Halves()) as recording:
        model(x).sum().backward()
    share = 5.0 * (x.detach().T[2:] > 0)
    assert_close(recording["relu"].grad_output, (torch.full((2, 3), 5.0),))
    assert_close(recording["relu"].grad_input, (share,))
    assert_close(recording["relu"].grad_input_total, (share,))


def test_keyword_tensors_and_nested_outputs() -> None:
    class Model(nn.Module):
        def forward(self, x: Tensor, *, scale: Tensor, flag: bool) -> dict[str, object]:
            assert flag
            return OrderedDict(both=(x * scale, [x + scale]), name="kept")

    x = torch.randn(3, requires_grad=True)
    scale = torch.randn(3, requires_grad=True)
    with gradlib.record(model := Model()) as recording:
        output = model(x, scale=scale, flag=True)
        output["both"][0].sum().backward()
    call = recording[""]
    assert_close(call.kwargs["scale"], scale.detach())
    assert call.kwargs["flag"] is True
    assert isinstance(call.output, OrderedDict)
    assert call.output["name"] == "kept"
    assert_close(call.grad_input, (scale.detach(),))
    assert_close(call.grad_kwargs["scale"], x.detach())
    assert call.grad_kwargs["flag"] is None
    assert_close(call.grad_output["both"][0], torch.ones(3))
    assert call.grad_output["both"][1] == [None]
    assert call.note == "backward pass 0 gave output['both'][1][0] no gradient"


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


def test_share_and_total_of_a_keyword_tensor() -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scaled = Product()

        def forward(self, x: Tensor) -> Tensor:
            h = 2 * x
            return 3 * h + self.scaled(a=h, b=x.detach())

    class Product(nn.Module):
        def forward(self, a: Tensor, b: Tensor) -> Tensor:
            return a * b

    x = torch.randn(3, requires_grad=True)
    with gradlib.record(model := Scaled()) as recording:
        model(x).sum().backward()
    call = recording["scaled"]
    assert_close(call.grad_kwargs, {"a": x.detach(), "b": None})
    assert_close(call.grad_kwargs_total, {"a": 3 + x.detach(), "b": None})
    assert "grad_kwargs_total['a']" in str(call)


def test_one_tensor_in_two_places() -> None:
    class Product(nn.Module):
        def forward(self, a: Tensor, b: Tensor) -> Tensor:
            assert a is b
            return a * b

    x = torch.randn(3, requires_grad=True)
    with gradlib.record(model := Product()) as recording:
        model(x, x).sum().backward()
    assert_close(recording[""].grad_input, (x.grad, x.grad))


def test_a_module_that_returns_its_input_twice() -> None:
    class Twice(nn.Module):
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return x, x

    x = torch.ones(2, requires_grad=True)
    with gradlib.record(model := Twice()) as recording:
        first, second = model(x)
        (2 * first + 3 * second).sum().backward()
    assert_close(recording[""].grad_input, (torch.full((2,), 5.0),))


def test_a_module_that_uses_and_returns_its_input() -> None:
    class Both(nn.Module):
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return x, 10 * x

    x = torch.ones(2, requires_grad=True)
    with gradlib.record(model := Both()) as recording:
        first, second = model(x)
        (2 * first + 3 * second).sum().backward()
    assert_close(recording[""].grad_input, (torch.full((2,), 32.0),))
    assert_close(recording[""].grad_input_total, (torch.full((2,), 32.0),))


@pytest.mark.parametrize("leaf", [True, False])
def test_a_module_that_returns_its_input_and_more_of_it(leaf: bool) -> None:
    class More(nn.Module):
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return x, 10 * x

    model, x = More(), torch.ones(2, requires_grad=True)
    with gradlib.record(model) as recording:
        same, more = model(x if leaf else 1 * x)
        (3 * same + 5 * more).sum().backward()
    same_grad, more_grad = recording[""].grad_output
    assert same_grad.tolist() == [3, 3]
    assert more_grad.tolist() == [5, 5]
    assert recording[""].grad_input[0].tolist() == [53, 53]


@pytest.mark.parametrize("uses_it", [False, True])
@pytest.mark.parametrize("reduce", [None, gradlib.tensor_stats])
def test_a_module_that_returns_its_parameter(uses_it: bool, reduce: Any) -> None:
    class Embedded(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.place = nn.Parameter(torch.randn(3))
            self.bias = nn.Parameter(torch.randn(3))

        def forward(self, x: Tensor) -> Any:
            return (x * self.place, self.place) if uses_it else self.place

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedded = Embedded()

        def forward(self, x: Tensor) -> Tensor:
            if not uses_it:
                return x * self.embedded(x) + self.embedded.place
            y, place = self.embedded(x)
            return y + 5 * place

    x = torch.tensor([1.0, 2.0, 4.0], requires_grad=True)
    with gradlib.record(model := Model(), reduce=reduce) as recording:
        model(x).sum().backward()
    call = recording["embedded"]
    total = grad_of(model.embedded.place)
    kept = reduce or (lambda tensor: tensor)
    for field in (call.param_grads, call.param_grads_total):
        assert repr(field["place"]) == repr(kept(total))
    said = "it returned place as it was: the two are one tensor, and their gradient is "
    assert said + "that of all its uses" in call.note
    assert "gave place no gradient" not in call.note
    if reduce is None:
        assert recording.verify(numerical=True).agreed == len(recording)


def test_a_module_that_returns_its_input() -> None:
    model = nn.Sequential(nn.Identity(), nn.Linear(4, 1))
    x = torch.randn(2, 4, requires_grad=True)
    with gradlib.record(model) as recording:
        model(x).sum().backward()
    assert_close(recording["0"].grad_output, (x.grad,))
    assert_close(recording["0"].grad_input, (x.grad,))
    assert_close(recording["1"].grad_input_total, (x.grad,))


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
    assert "backward pass 0 gave args[0] no gradient" in call.note
    assert "backward pass 0 gave bias no gradient" in call.note
    assert recording["fc2"].note == "no backward pass reached it inside the block"


def test_kept_values_survive_in_place_changes() -> None:
    net = Net()
    x = torch.randn(4, 3)
    expected = x.clone()
    with gradlib.record(net) as recording:
        net(x).sum().backward()
        before = [grad_of(p).clone() for p in net.fc2.parameters()]
        for parameter in net.parameters():
            grad_of(parameter).mul_(0)
            parameter.data.zero_()
        x.zero_()
    assert_close(recording["fc1"].args[0], expected)
    assert_close(list(recording["fc2"].param_grads.values()), before)
    assert_close(list(recording["fc2"].param_grads_total.values()), before)


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
    assert unused.note == "no backward pass reached it inside the block"
    assert quiet.grad_output is None
    assert quiet.passes == ()
    with gradlib.record(model := nn.ReLU()) as recording:
        model(torch.randn(3))
    assert recording[""].note == "it returned no tensor that requires grad"


def test_a_forward_that_raises() -> None:
    net = Net()
    with gradlib.record(net) as recording:
        with pytest.raises(RuntimeError):
            net(torch.randn(4, 5))
        net(torch.randn(4, 3)).sum().backward()
    broken, fine = recording.calls("fc1")
    assert broken.note == "its forward raised RuntimeError"
    assert broken.output is None
    assert (broken.forward, fine.forward) == (0, 1)
    assert recording.calls("")[0].note == "its forward raised RuntimeError"
    assert fine.grad_output is not None


def test_a_module_that_returns_none_while_an_exception_is_handled() -> None:
    class Nothing(nn.Module):
        def forward(self, x: Tensor) -> None:
            pass

    with gradlib.record(model := Nothing()) as recording:
        try:
            raise ValueError
        except ValueError:
            model(torch.ones(1))
    assert recording[""].note == "it returned no tensor that requires grad"


def test_nothing_is_left_when_the_block_raises() -> None:
    net = Net()
    x = torch.randn(4, 3)
    recorded = gradlib.record(net)
    recording = recorded.__enter__()
    assert hooks_of(net)
    output = net(x)
    assert not recorded.__exit__(KeyError, KeyError(), None)
    assert hooks_of(net) == []
    output.sum().backward()  # outside the block: nobody listens
    assert recording["fc3"].passes == ()


def test_no_tensor_is_kept_alive_by_the_model() -> None:
    net = Net()
    with gradlib.record(net) as recording:
        output = net(torch.randn(4, 3))
        output.sum().backward()
        kept = weakref.ref(recording["fc2"].grad_output[0])
    dead = weakref.ref(output)
    del output
    gc.collect()
    assert dead() is None
    assert kept() is not None
    del recording
    gc.collect()
    assert kept() is None


@pytest.mark.parametrize("reduce", [None, gradlib.tensor_stats])
def test_a_late_step_costs_no_more_than_an_early_one(reduce: Any) -> None:
    net, costs = Net(), list[int]()
    with gradlib.record(net, reduce=reduce):
        for _ in range(30):
            x = torch.randn(4, 3)
            costs.append(opcodes(lambda x=x: net(x).sum().backward()))
    # Now and then a step lets go of the hooks that are gone of several.
    assert sum(costs[15:30]) <= 1.02 * sum(costs[1:16])


def test_a_pass_costs_the_same_however_many_forwards_wait_for_theirs() -> None:
    net = Net()
    x = torch.randn(4, 3)
    costs: list[int] = []
    with gradlib.record(net):
        for waiting in (3, 30):
            losses = [net(x).sum() for _ in range(waiting)]
            losses[0].backward()
            costs.append(opcodes(losses[1].backward))
            del losses
    assert costs[1] <= 1.02 * costs[0]


@pytest.mark.parametrize("reduce", [None, gradlib.tensor_stats])
def test_a_step_costs_the_same_however_often_its_input_was_used(reduce: Any) -> None:
    net = Net()
    x = torch.randn(4, 3, requires_grad=True)

    def step() -> None:
        net(x).sum().backward()

    with gradlib.record(net, reduce=reduce) as recording:
        costs = [opcodes(step) for _ in range(30)]
    # Now and then a step lets go of the hooks that are gone of several.
    assert sum(costs[15:30]) <= 1.02 * sum(costs[1:16])
    if reduce is None:
        total = sum(it.grad_input_total[0] for it in recording.calls("fc1"))
        assert x.grad is not None
        assert_close(total, x.grad)


def test_a_pass_costs_the_same_however_many_went_through_the_graph() -> None:
    net = Net()
    x = torch.randn(4, 3, requires_grad=True)
    costs: list[int] = []
    with gradlib.record(net, reduce=gradlib.tensor_stats):
        y = net(x).square().sum()
        for _ in range(40):
            ask = partial(torch.autograd.grad, y, x, create_graph=True)
            costs.append(opcodes(ask))
    assert sum(costs[20:40]) <= 1.02 * sum(costs[1:21])


def test_a_dropped_recording_is_gone_at_once() -> None:
    net = Net()
    gc.collect()
    gc.disable()  # large tensors must not wait for the collector
    try:
        with gradlib.record(net) as recording:
            for _ in range(2):
                net(torch.randn(4, 3)).sum().backward()
        kept = weakref.ref(recording["fc2", 1].grad_output[0])
        del recording
        assert kept() is None
        assert gc.collect() == 0
    finally:
        gc.enable()


def test_a_graph_that_lives_on_keeps_nothing_of_a_recording() -> None:
    net = Net()
    with gradlib.record(net) as recording:
        loss = net(torch.randn(4, 3)).square().sum()
        loss.backward(retain_graph=True)
    call = recording["fc2"]
    kept = [weakref.ref(it) for it in (call.grad_input[0], call.grad_output[0])]
    kept.append(weakref.ref(call.param_grads["weight"]))
    del recording, call
    gc.collect()
    assert [it() for it in kept] == [None] * len(kept)
    loss.backward()


def test_nested_recordings_agree() -> None:
    model = Residual()
    x = torch.randn(2, 4, requires_grad=True)
    with gradlib.record(model) as outer, gradlib.record(model) as inner:
        loss_of(model(x)).backward()
    for field in ("grad_input", "grad_input_total", "grad_output", "param_grads"):
        assert_close(getattr(inner["f"], field), getattr(outer["f"], field))


def test_a_module_that_remembers_its_last_output() -> None:
    class Cell(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.tensor(3.0))
            self.memory = torch.tensor(1.0)

        def forward(self, x: Tensor) -> Tensor:
            self.memory = self.memory * self.scale + x
            return self.memory

    cell = Cell()
    with gradlib.record(cell) as recording:
        cell(torch.tensor(2.0))  # 1 * 3 + 2
        cell(torch.tensor(0.0)).backward()  # (1 * 3 + 2) * 3
    first, second = recording.calls("")
    assert second.param_grads["scale"].item() == 5
    assert first.param_grads["scale"].item() == 3
    assert_close(first.param_grads_total["scale"], cell.scale.grad)


def test_a_module_that_only_keeps_its_last_output() -> None:
    class Cell(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.tensor(3.0))
            self.last, self.present = torch.tensor(0.0), torch.tensor(0.0)

        def forward(self, x: Tensor) -> Tensor:
            self.last, self.present = self.present, self.scale * x
            return self.present

    cell = Cell()
    with gradlib.record(cell) as recording:
        (cell(torch.tensor(2.0)) + cell(torch.tensor(5.0))).backward()
    shares = [call.param_grads["scale"].item() for call in recording]
    assert shares == [2, 5]


def test_a_forward_that_is_over_is_let_go_inside_the_block() -> None:
    made: list[weakref.ref[object]] = []

    class Double(torch.autograd.Function):
        @staticmethod
        def forward(ctx: object, x: Tensor) -> Tensor:
            made.append(weakref.ref(ctx))
            return 2 * x

    class Model(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return Double.apply(x)

    with gradlib.record(model := Model()):
        model(torch.ones(1, requires_grad=True))
        gc.collect()
        assert made[0]() is None


def test_a_parameter_passed_as_an_argument() -> None:
    class Square(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.tensor(3.0))

        def forward(self, x: Tensor) -> Tensor:
            return 5 * x + 7 * self.weight

    with gradlib.record(model := Square()) as recording:
        model(model.weight).backward()
    call = recording[""]
    # One tensor in two places: each place holds the share of the tensor.
    assert call.grad_input[0].item() == 12
    assert call.param_grads["weight"].item() == 12


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


def test_an_output_that_the_call_itself_uses() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(1, 1), nn.Linear(1, 1)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            h = self.a(x)
            return h, 10 * self.b(h)

    with gradlib.record(model := Two()) as recording:
        first, second = model(torch.ones(1, 1))
        (3 * first + second).sum().backward()
    assert_close(recording[""].grad_output, (torch.tensor([[3.0]]), torch.ones(1, 1)))
    total = 3 + 10 * model.b.weight.detach()
    assert_close(recording["a"].grad_output, (total,))


def test_a_child_that_overwrites_its_parents_input() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.relu = nn.ReLU(inplace=True)

        def forward(self, x: Tensor) -> Tensor:
            double = 2 * x
            return 10 * self.relu(x) + double

    first = nn.Linear(2, 2)
    nn.init.ones_(first.weight)
    model = nn.Sequential(first, Model())
    with gradlib.record(model) as recording:
        model(torch.ones(1, 2)).sum().backward()
    assert_close(recording["1"].grad_input, (torch.full((1, 2), 12.0),))
    assert_close(recording["1.relu"].grad_input, (torch.full((1, 2), 10.0),))
    assert_close(recording["1.relu"].grad_input_total, (torch.full((1, 2), 12.0),))


def test_a_parameter_with_two_owners() -> None:
    class Owner(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(2, 2, bias=False)
            self.weight = self.inner.weight

        def forward(self, x: Tensor) -> Tensor:
            return self.inner(x) + F.linear(x, self.weight)

    with gradlib.record(model := Owner()) as recording:
        loss_of(model(torch.randn(3, 2))).backward()
    grad = grad_of(model.weight)
    assert_close(recording[""].param_grads["weight"], grad)
    assert_close(recording["inner"].param_grads["weight"], grad / 2)


def test_a_loss_that_a_module_keeps_in_an_attribute() -> None:
    class Noisy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.tensor(3.0))
            self.penalty = torch.tensor(0.0)

        def forward(self, x: Tensor) -> Tensor:
            self.penalty = 5 * self.scale * x
            return x * 2

    x = torch.tensor(7.0, requires_grad=True)
    with gradlib.record(model := Noisy()) as recording:
        (model(x) + model.penalty).backward()
    assert recording[""].param_grads["scale"].item() == 35
    assert recording[""].grad_input[0].item() == 17


kept: list[Any] = []  # an argument of a module


@pytest.mark.parametrize("base", [nn.Module, nn.Identity], ids=["user's", "torch's"])
@pytest.mark.parametrize(
    "leave",
    [
        lambda module, made: module.made.append(made),
        lambda module, made: module.named.update(aux=[made, "text"]),
        lambda module, made: setattr(module, "pair", (1.0, {"aux": made})),
        lambda _, made: kept.append(made),
        lambda _, made: kept.append((2, made)),
    ],
)
def test_a_loss_that_a_module_leaves_in_a_list_or_dict(base: Any, leave: Any) -> None:
    class Noisy(base):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.tensor(3.0))
            self.made: list[Tensor] = []
            self.named: dict[str, Any] = {}

        def forward(self, x: Tensor, _: list[Any]) -> Tensor:
            leave(self, 5 * self.scale * x)
            return x * 2

    kept.clear()
    x = torch.tensor(7.0, requires_grad=True)
    model: Any = nn.Sequential(Noisy(), nn.Identity())
    model.forward = lambda x: model[0](x, kept)
    with gradlib.record(model) as recording:
        y = model(x)
        module = model[0]
        left = (module.made, module.named, vars(module).get("pair"), kept)
        (penalty,) = tensors_in(left)
        (y + penalty).backward()
    assert recording["0"].param_grads["scale"].item() == 35
    assert recording["0"].grad_input[0].item() == 17


def test_arguments_are_handed_on_as_they_are() -> None:
    class Collect(nn.Module):
        def forward(self, cache: dict[str, Tensor], x: Tensor) -> Tensor:
            cache["new"] = 2 * x
            self.saved = x
            return x

    x = torch.randn(3, requires_grad=True)
    cache: dict[str, Tensor] = {}
    with gradlib.record(model := Collect()) as recording:
        assert model(cache, x) is x
        assert model.saved is x
        cache["new"].sum().backward()
    assert recording[""].args[0] == {}
    assert "it returned args[1] as it was" in recording[""].note


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


def test_a_pre_hook_that_raises() -> None:
    class Careful(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.part = nn.Linear(2, 2)

        def forward(self, x: Tensor) -> Tensor:
            try:
                return self.part(x)
            except ValueError:
                return 2 * x

    def refuse(_module: nn.Module, _args: object) -> None:
        raise ValueError

    model = Careful()
    model.part.register_forward_pre_hook(refuse)
    x = torch.ones(1, 2, requires_grad=True)
    with gradlib.record(model) as recording:
        model(x).sum().backward()
    assert recording["part"].note == "its forward raised ValueError"
    assert_close(recording[""].grad_input, (torch.full((1, 2), 2.0),))


def test_a_keyboard_interrupt_that_is_caught() -> None:
    class Slow(nn.Module):
        interrupt = True

        def __init__(self) -> None:
            super().__init__()
            self.part = nn.Linear(2, 2)

        def forward(self, x: Tensor) -> Tensor:
            y = self.part(x)
            if self.interrupt:
                raise KeyboardInterrupt
            return y

    with gradlib.record(model := Slow()) as recording:
        with pytest.raises(KeyboardInterrupt):
            model(torch.ones(1, 2))
        model.interrupt = False
        model(torch.ones(1, 2)).sum().backward()
    assert [call.forward for call in recording.calls("part")] == [0, 1]
    assert recording["", 0].note == "its forward was broken off"
    assert recording["", 1].grad_output is not None


def test_a_keyboard_interrupt_that_the_model_catches() -> None:
    class Interrupted(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            del x
            raise KeyboardInterrupt

    class Patient(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.slow, self.fast = Interrupted(), nn.Linear(2, 2)

        def forward(self, x: Tensor) -> Tensor:
            y = self.fast(x)
            with contextlib.suppress(KeyboardInterrupt):
                y = self.slow(y)
            return y

    model, x = Patient(), torch.ones(1, 2, requires_grad=True)
    with gradlib.record(model) as recording:
        y = model(x)
        y.sum().backward()
    assert recording["slow"].note == "its forward was broken off"
    assert recording["slow"].grad_output is None
    assert recording[""].note == ""
    assert_close(recording[""].grad_output, (torch.ones(1, 2),))
    assert_close(recording[""].grad_input, (x.grad,))


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


def test_a_copy_of_the_model_does_not_record() -> None:
    net = Net()
    with gradlib.record(net) as recording:
        twin = copy.deepcopy(net)
        twin(torch.randn(4, 3)).sum().backward()
        assert net.state_dict().keys() == twin.state_dict().keys()
    assert len(recording) == 0
    assert hooks_of(twin) == []


def test_a_module_that_is_not_initialised_yet() -> None:
    lazy = nn.LazyLinear(2)
    model = nn.Sequential(nn.Linear(2, 3), lazy)
    with gradlib.record(model) as recording:
        model(torch.ones(1, 2)).sum().backward()
    assert_close(recording["1"].param_grads["bias"], grad_of(lazy.bias))
    assert_close(recording["1"].param_grads_total["bias"], grad_of(lazy.bias))


def test_a_parameter_replaced_in_the_block() -> None:
    model = nn.Linear(2, 1)
    with gradlib.record(model) as recording:
        model.weight = nn.Parameter(torch.ones(1, 2))
        model(torch.ones(1, 2)).sum().backward()
    assert_close(recording[""].param_grads_total["weight"], grad_of(model.weight))


def test_passes_that_reach_no_call_leave_nothing_behind() -> None:
    model = nn.Linear(2, 1, bias=False)
    with gradlib.record(model) as recording:
        for size in (2, 3):  # a second weight of another shape, under the same name
            model.weight = nn.Parameter(torch.ones(1, size))
            model(torch.ones(1, size))
            model.weight.square().sum().backward()
            assert_close(model.weight.grad, torch.full((1, size), 2.0))
    assert [call.passes for call in recording] == [(), ()]


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
