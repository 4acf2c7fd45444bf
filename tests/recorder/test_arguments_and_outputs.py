"""Arguments and outputs that are overwritten, nested, returned or used twice."""

import copy
from collections import OrderedDict
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, distributions, nn
from torch.testing import assert_close

import gradlib
from gradlib.recorder.unopened import MOST

from .first_nets import Net, loss_of
from .truth import grad_of


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
    said = "backward pass 0 gave no gradient to output['both'][1][0] from outside of "
    assert call.note == said + "this call"


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


def test_a_module_that_returns_its_input() -> None:
    model = nn.Sequential(nn.Identity(), nn.Linear(4, 1))
    x = torch.randn(2, 4, requires_grad=True)
    with gradlib.record(model) as recording:
        model(x).sum().backward()
    assert_close(recording["0"].grad_output, (x.grad,))
    assert_close(recording["0"].grad_input, (x.grad,))
    assert_close(recording["1"].grad_input_total, (x.grad,))


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


class Attrs:
    """An object that keeps a value in slots, nested in others."""

    __slots__ = ("empty", "first", "itself", "others")

    def __init__(self, first: Any, others: Any) -> None:
        self.first, self.others, self.itself = first, [{"others": others}], self


class Own(dict[str, Any]):
    """A dict whose own code only the model may run."""

    def values(self) -> Any:
        raise AssertionError


class Normals(nn.Module):
    """Returns a distribution, returns an object that holds one, or keeps one."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.mean = nn.Linear(3, 3)
        self.scale = nn.Parameter(torch.ones(3))
        self.kind = kind
        self.last: Any = None

    def forward(self, x: Tensor) -> Any:
        mean, scale = self.mean(x) + x, self.scale.exp()
        made = distributions.Normal(mean, scale)
        match self.kind:
            case "nested":
                return distributions.Independent(made, 1)
            case "slots":
                return Attrs(mean, Attrs(scale, None))
            case "namespace":
                return SimpleNamespace(loc=mean, kept=Own(scale=scale))
            case "kept":
                self.last = made
                return made.mean.detach()
            case _:
                return made

    def loss(self, made: Any) -> Tensor:
        if self.kind == "slots":
            made = distributions.Normal(made.first, made.others[0]["others"].first)
        elif self.kind == "namespace":
            made = distributions.Normal(made.loc, made.kept["scale"])
        elif self.kind == "kept":
            made = self.last
        return made.log_prob(torch.ones(3)).square().sum()


@pytest.mark.parametrize("kind", ["returned", "nested", "slots", "namespace", "kept"])
def test_what_comes_through_an_object_that_is_not_opened(kind: str) -> None:
    """A policy, for example, returns a distribution, which the loss uses."""
    model = Normals(kind)
    x = torch.randn(2, 3, requires_grad=True)
    with gradlib.record(model) as recording:
        model.loss(model(x)).backward()
    call = recording[""]
    assert_close(call.grad_input[0], grad_of(x))
    assert_close(call.param_grads["scale"], grad_of(model.scale))
    assert "no gradient to scale" not in call.note
    if kind != "kept":
        assert "tensors in it, if there are any, are not seen" in call.note


@pytest.mark.parametrize("returns", [False, True])
def test_what_a_model_writes_into_an_object_that_it_is_given(returns: bool) -> None:
    """A graph network, for example, writes into the data that it gets."""

    class Writes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(3))

        def forward(self, data: SimpleNamespace) -> Tensor | None:
            data.scaled = data.x * self.scale
            return data.x.sum() if returns else None

    model = Writes()
    data = SimpleNamespace(x=torch.randn(2, 3))
    with gradlib.record(model) as recording:
        model(data)
        data.scaled.square().sum().backward()
    call = recording[""]
    assert_close(call.param_grads["scale"], grad_of(model.scale))
    assert "no gradient to scale" not in call.note


def test_in_an_object_that_holds_the_world_the_nearest_is_found() -> None:
    class Holds(nn.Module):
        def forward(self, x: Tensor) -> Any:
            far = SimpleNamespace(x=x)
            for _ in range(2 * MOST):
                far = SimpleNamespace(further=far)
            return SimpleNamespace(near=SimpleNamespace(y=x * 3), model=self, far=far)

    model = Holds()
    x = torch.randn(2, 3, requires_grad=True)
    with gradlib.record(model) as recording:
        model(x).near.y.sum().backward()
    assert_close(recording[""].grad_input[0], grad_of(x))


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


def test_no_code_of_an_object_that_is_not_opened_is_run() -> None:
    asked: list[str] = []

    class Watched:
        __slots__ = ("content",)

        def __init__(self, content: Tensor) -> None:
            self.content = content

        def __getattr__(self, name: str) -> Any:
            asked.append(name)
            raise AttributeError(name)

    class Wraps(nn.Module):
        def forward(self, x: Tensor) -> Any:
            return Watched(2 * x)

    model, x = Wraps(), torch.ones(2, requires_grad=True)
    with gradlib.record(model) as recording:
        model(x).content.sum().backward()
    assert "__dict__" not in asked
    assert_close(recording[""].grad_input[0], torch.full((2,), 2.0))


class Pair(NamedTuple):
    a: Tensor
    b: Tensor


class Scaled(Pair):
    """A named tuple with room for attributes."""


class GivesMore(nn.Module):
    """Uses an attribute of what it is given, and returns something with one."""

    def forward(self, given: Any) -> Any:
        made: Any = Scaled(given.a.sin(), given.b * given.scale)
        made.more = given.a.cos()
        return made


def test_of_a_named_tuple_its_fields_are_kept() -> None:
    given: Any = Scaled(*(torch.randn(3, requires_grad=True) for _ in range(2)))
    given.scale = torch.tensor(3.0, requires_grad=True)
    model = GivesMore()
    with gradlib.record(model) as recording:
        made = model(given)
        (made.a + made.b + made.more).sum().backward()
    call = recording[""]
    for found in (call.args[0], call.output, call.grad_input[0]):
        assert type(found) is Scaled
        assert not vars(found)
    assert_close(call.grad_input_total[0].a, given.a.grad)
    assert_close(call.grad_input[0].b, given.b.grad)
    assert "what the call had put elsewhere" in call.note
    (skipped,) = recording.verify().skipped
    assert skipped.reason.endswith("'Scaled' object has no attribute 'scale'")
