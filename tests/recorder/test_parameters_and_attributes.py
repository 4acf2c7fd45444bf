"""Parameters that are returned, shared or replaced, and tensors kept in attributes."""

from collections import OrderedDict
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.testing import assert_close

import gradlib
from gradlib.tree import tensors_in

from .first_nets import loss_of
from .truth import grad_of


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
    said = "it returned place as it was: the two are one tensor, and its uses outside "
    assert said + "of this call count in the gradients of both" in call.note
    assert "to place" not in call.note
    if reduce is None:
        assert recording.verify(numerical=True).agreed == len(recording)


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


class Pair(NamedTuple):
    number: float
    made: Tensor


class Named(OrderedDict[str, Tensor]):
    """As many models return their outputs."""


@pytest.mark.parametrize("base", [nn.Module, nn.Identity], ids=["user's", "torch's"])
@pytest.mark.parametrize(
    "leave",
    [
        lambda module, made: module.made.append(made),
        lambda module, made: module.named.update(aux=[made, "text"]),
        lambda module, made: setattr(module, "pair", (1.0, {"aux": made})),
        lambda module, made: setattr(module, "pair", Pair(1.0, made)),
        lambda module, made: setattr(module, "pair", Named(aux=made)),
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


def test_a_loss_that_a_module_leaves_in_a_buffer() -> None:
    class Balanced(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(3))
            self.register_buffer("balance", torch.zeros(()))

        def forward(self, x: Tensor) -> Tensor:
            self.balance = (x * self.scale).square().sum()
            return 2 * x

    balanced = Balanced()
    model = nn.Sequential(nn.Linear(3, 3), balanced)
    with gradlib.record(model) as recording:
        loss = loss_of(model(torch.randn(2, 3)))
        (loss + balanced.balance).backward()
    call = recording["1"]
    assert_close(call.grad_input, call.grad_input_total)
    assert_close(call.param_grads["scale"], grad_of(balanced.scale))
    assert recording.verify().agreed == 3


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


def test_a_parameter_that_was_swapped_has_lost_its_hooks() -> None:
    """As the documentation says: torch leaves them with the tensor it was."""
    model, x = nn.Linear(3, 2), torch.randn(4, 3)
    with gradlib.record(model) as recording:
        model(x).sum().backward()
        torch.utils.swap_tensors(model.weight, nn.Parameter(torch.randn(2, 3)))
        model(x).sum().backward()
    first, second = recording.calls("")
    assert_close(
        first.param_grads, second.param_grads | {"weight": x.sum(0).expand(2, 3)}
    )
    assert second.param_grads["weight"] is second.param_grads_total["weight"] is None
    assert second.note.endswith("backward pass 1 gave no gradient to weight")
