"""Going back through a Jacobian, held against finite differences of the Jacobian."""

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.testing import assert_close

import gradlib


class Applies(nn.Module):
    """A module of one function of torch."""

    def __init__(self, name: str, *args: Any) -> None:
        super().__init__()
        self.function: Any = getattr(torch, name, None) or getattr(F, name)
        self.args = args

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x, *self.args)


def evaluated(norm: nn.BatchNorm1d) -> nn.Module:
    norm(torch.randn(50, norm.num_features))
    return norm.eval()


# What torch's third derivative goes wrong for, and what it is right for.
WRONG: dict[str, nn.Module] = {
    "LayerNorm": nn.LayerNorm(6),
    "layer_norm": Applies("layer_norm", (6,)),
    "InstanceNorm1d": nn.Sequential(
        nn.Unflatten(1, (2, 3)), nn.InstanceNorm1d(2), nn.Flatten()
    ),
}
RIGHT: dict[str, nn.Module] = {
    "GroupNorm": nn.GroupNorm(2, 6),
    "RMSNorm": nn.RMSNorm(6),
    "BatchNorm1d in evaluation": evaluated(nn.BatchNorm1d(6)),
    "normalize": Applies("normalize"),
    "softmax": nn.Softmax(1),
}
MODES = ("auto", "reverse", "loop", "forward", "split")


def net(name: str) -> nn.Module:
    """Return a net that widens, as one does of which forward is the cheapest."""
    torch.manual_seed(0)
    layer = (WRONG | RIGHT)[name]
    inner, outer = nn.Linear(4, 6), nn.Linear(6, 40)
    return nn.Sequential(inner, layer, nn.Tanh(), outer).double()


def test_a_function_in_another_dtype() -> None:
    wide, x = nn.Linear(17, 40), torch.randn(8, 17)
    for mode in MODES:
        found = gradlib.per_sample_jacobian(
            lambda x: wide(x).double(), x, mode=mode, create_graph=True, check=False
        )
        assert found.dtype == torch.float32
        assert found.requires_grad


def loss(model: nn.Module, x: Tensor, **options: Any) -> Tensor:
    return gradlib.per_sample_jacobian(model, x, **options).square().sum()


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", WRONG | RIGHT)
def test_gradients_of_a_loss_of_the_jacobian(
    name: str, mode: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gradlib.jacobian.choice.LITTLE", 0)
    model, x, weight = case(net, name)
    if name in WRONG and mode in ("forward", "split"):
        with pytest.raises(gradlib.NoSuchWayError, match="third derivative"):
            loss(model, x, create_graph=True, mode=mode)
        return
    found = torch.autograd.grad(
        loss(model, x, create_graph=True, mode=mode), [x, weight]
    )
    assert_close(found, gradients(net, name), rtol=1e-6, atol=1e-7)


def case(make: Callable[[str], nn.Module], name: str) -> tuple[nn.Module, Tensor, Any]:
    """Return a module, its input, and the first of its weights."""
    model, x = make(name), torch.randn(3, 4).double().requires_grad_()
    return model, x, next(model.parameters())


@cache
def gradients(make: Callable[[str], nn.Module], name: str) -> tuple[Tensor, ...]:
    """Return those of the loss, for all modes, by the input and the first weight."""
    model, x, weight = case(make, name)
    return differences(model, x, x), differences(model, x, weight)


def differences(model: nn.Module, x: Tensor, along: Tensor) -> Tensor:
    step, entries = 1e-5, along.detach().view(-1)
    found = torch.empty_like(entries)
    for i in range(len(entries)):
        sides: list[float] = []
        for sign in (1, -1):
            entries[i] += sign * step
            total = loss(model, x.detach(), mode="reverse", check=False)
            sides.append(total.item())
            entries[i] -= sign * step
        found[i] = (sides[0] - sides[1]) / (2 * step)
    return found.view_as(along)


class Force(nn.Module):
    """The slope of an energy: a Jacobian of it in a loss is a third derivative."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.energy = nn.Sequential(*[*net(name).children()][:3])

    def forward(self, x: Tensor) -> Tensor:
        if not x.requires_grad:
            x = x.detach().requires_grad_()
        with torch.enable_grad():
            energy = self.energy(x).square().sum()
            return torch.autograd.grad(energy, x, create_graph=True)[0]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", WRONG | RIGHT)
def test_gradients_of_a_loss_of_the_jacobian_of_a_force(name: str, mode: Any) -> None:
    model, x, weight = case(Force, name)
    if name in WRONG:
        with pytest.raises(gradlib.NoSuchWayError, match="BackwardBackward0, which"):
            loss(model, x, create_graph=True, mode=mode)
        return
    found = torch.autograd.grad(
        loss(model, x, create_graph=True, mode=mode), [x, weight]
    )
    assert_close(found, gradients(Force, name), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("mode", ["auto", "reverse", "loop"])
def test_gradients_of_a_loss_of_the_jacobian_of_a_script(mode: Any) -> None:
    model, x = net("LayerNorm"), torch.randn(3, 4).double()
    weight: Any = model.get_parameter("0.weight")
    scripted: Any = torch.jit.script(model)
    for _ in range(3):  # it is put together anew for what it meets
        scripted(x).sum().backward()
    for _ in range(2):
        total = loss(scripted, x, create_graph=True, mode=mode)
        (grad,) = torch.autograd.grad(total, weight)
        assert_close(grad, differences(model, x, weight), rtol=1e-6, atol=1e-7)


@pytest.mark.filterwarnings("ignore:check=True did not look")
@pytest.mark.parametrize("mode", ["auto", "reverse", "loop"])
def test_a_loss_of_the_jacobian_by_the_weights_of_a_script(mode: Any) -> None:
    model, x = net("LayerNorm"), torch.randn(3, 4).double()
    scripted: Any = torch.jit.script(model)
    for _ in range(3):
        scripted(x).sum().backward()

    def gradient(one: nn.Module, way: str) -> Tensor:
        found = gradlib.per_sample_jacobian(
            one, x, argnums="parameters", mode=way, create_graph=True
        )["1.weight"]
        weight = dict(one.named_parameters())["0.weight"]
        (grad,) = torch.autograd.grad(found.square().sum(), weight)
        return grad

    assert_close(gradient(scripted, mode), gradient(model, "loop"))


def test_the_ways_through_a_script_are_refused_that_nobody_can_look_into() -> None:
    scripted: Any = torch.jit.script(net("LayerNorm"))
    x = torch.randn(3, 4).double()
    for _ in range(3):
        scripted(x).sum().backward()
    with pytest.raises(gradlib.NoSuchWayError, match="DifferentiableGraphBackward"):
        loss(scripted, x, create_graph=True, mode="forward")


@pytest.mark.parametrize("create_graph", [1, 0, numpy.bool_(1)])
@pytest.mark.parametrize(
    "fn", [nn.Linear(3, 2), lambda x: nn.Linear(3, 2)(x).cumsum(1)]
)
def test_what_is_true_or_false_of_python_counts(fn: Any, create_graph: Any) -> None:
    x = torch.ones(4, 3, requires_grad=True)
    made = gradlib.per_sample_jacobian(fn, x, create_graph=create_graph)
    assert made.requires_grad == bool(create_graph)
