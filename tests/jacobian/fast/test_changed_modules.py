"""Modules and functions that somebody has changed are not taken for what they were."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations

from .lines import Net, double, make, require_same
from .test_chain import chain

Function = Callable[[Tensor], Tensor]


class Called(Net):
    """It is called in another way."""

    def __call__(self, x: Tensor) -> Tensor:
        return 2 * super().__call__(x)


class Found(Net):
    """Its attributes are found in another way."""

    def __getattr__(self, name: str) -> Any:
        found = super().__getattr__(name)
        return (lambda x: 2 * found(x)) if name == "second" else found  # pyright: ignore (any)


class Twice(nn.ModuleList):
    """It gives another order than it has."""

    def __iter__(self) -> Any:
        return reversed([*super().__iter__()])


class Turned(nn.ModuleList):
    """It counts from the end."""

    def _get_abs_string_index(self, idx: Any) -> str:
        return super()._get_abs_string_index(len(self) - 1 - idx)


class Looked(Net):
    """Its attributes are found in another way."""

    def __getattribute__(self, name: str) -> Any:
        return super().__getattribute__("own_act" if name == "act" else name)

    def forward(self, x: Tensor) -> Tensor:
        return self.third(self.act(x))


class Run(Net):
    """It is called in another way."""

    def _call_impl(self, *args: Any, **kwargs: Any) -> Any:
        return 2 * super()._call_impl(*args, **kwargs)


class Hidden(Net):
    """A property hides an attribute."""

    def forward(self, x: Tensor) -> Tensor:
        return self.third(self.slopes(x))

    @property
    def slopes(self) -> Any:
        return torch.relu


class Ordered(Net):
    """It goes through a list."""

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


class Static(Net):
    """It is given no self."""

    @staticmethod
    def forward(x: Tensor) -> Tensor:  # pyright: ignore (no self)
        return NETS[-1].third(x)


class Forward(Net):
    """Its forward is found in another way."""

    def __getattribute__(self, name: str) -> Any:
        found = super().__getattribute__(name)
        return (lambda x: 2 * found(x)) if name == "forward" else found


NETS: list[Net] = []


class Cut(Net):
    """Autograd sees nothing of a part of it."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        return self.second(h.detach() + h)


def _changed(change: Callable[[Net], object]) -> Net:
    net = make()
    change(net)
    return net


def _in_another_order() -> nn.Module:
    net = Ordered()
    assert chain(net.double(), double(5, 4)) is not None
    net.layers = Twice(net.layers)
    return net


def _hidden() -> nn.Module:
    net = Hidden().double()
    vars(net)["slopes"] = torch.tanh
    return net


CHANGED: dict[str, Callable[[], nn.Module]] = {
    "called otherwise": lambda: Called().double().eval(),
    "looked up otherwise": lambda: Found().double().eval(),
    "run otherwise": lambda: Run().double().eval(),
    "looked at otherwise": lambda: Looked().double().eval(),
    "in another order": _in_another_order,
    "its forward is another": lambda: Forward().double(),
    "a property": _hidden,
    "a part of it cut": lambda: Cut().double().eval(),
    "a hook": lambda: _changed(
        lambda net: net.first.register_forward_hook(lambda *_: None)
    ),
    "a hook on itself": lambda: _changed(
        lambda net: net.register_full_backward_hook(lambda *_: None)
    ),
    "another forward": lambda: _changed(
        lambda net: vars(net).update(forward=lambda x: net.third(x).exp())
    ),
    "another forward of a layer": lambda: _changed(
        lambda net: vars(net.first).update(forward=lambda x: x.repeat(1, 2)[:, :6])
    ),
    "weight norm": lambda: _changed(
        lambda net: parametrizations.weight_norm(net.first)
    ),
}


@pytest.mark.parametrize("name", CHANGED)
def test_modules_that_are_not_what_they_seem(name: str) -> None:
    net, x = CHANGED[name](), double(5, 4)
    assert chain(net, x) is None
    require_same(net, x)


def test_a_forward_that_is_given_no_self() -> None:
    NETS.append(make())
    net, x = Static().double(), double(5, 4)
    assert chain(net, x) is not None
    require_same(net, x)


def _convolving() -> nn.Sequential:
    torch.manual_seed(0)
    conv = nn.Conv2d(1, 2, 3, padding=1)
    return nn.Sequential(conv, nn.ReLU(), nn.Flatten(), nn.Linear(50, 3)).double()


def _padded(model: nn.Sequential) -> None:
    conv: Any = model[0]

    def circular(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return F.conv2d(F.pad(x, (1, 1, 1, 1), mode="circular"), weight, bias)

    conv._conv_forward = circular


def _strided(model: nn.Sequential) -> None:
    conv: Any = model[0]
    conv.stride = 1


def _with_a_tensor(model: nn.Sequential) -> None:
    vars(model[3])["weight"] = torch.zeros(3, 50).double()


def _bent(model: nn.Sequential) -> None:
    act: Any = nn.ELU()
    act.alpha = torch.tensor(0.5)
    model[1] = act


def _called(model: nn.Sequential) -> None:
    last: Any = model[3]
    before = last._call_impl
    last._call_impl = lambda x: 2 * before(x)


@pytest.mark.parametrize("change", [_padded, _strided, _with_a_tensor, _bent, _called])
def test_layers_that_somebody_has_changed(change: Callable[..., None]) -> None:
    model, x = _convolving(), double(2, 1, 5, 5)
    assert chain(model, x) is not None
    change(model)
    assert chain(model, x) is None
    require_same(model, x)


@pytest.mark.parametrize("name", ["linear", "conv2d"])
def test_operations_that_somebody_has_replaced(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, x, calls = _convolving(), double(2, 1, 5, 5), 0
    before = vars(F)[name]

    def counted(*args: Any) -> Tensor:
        nonlocal calls
        calls += 1
        return 2 * before(*args)

    monkeypatch.setattr(F, name, counted)
    require_same(model, x)
    assert calls == 2


def test_the_call_of_a_class_may_be_another(monkeypatch: pytest.MonkeyPatch) -> None:
    net, x = make(), double(5, 4)
    were = nn.Module.__call__
    monkeypatch.setattr(nn.Linear, "__call__", lambda it, x: 2 * were(it, x))
    assert chain(nn.Sequential(net.first), x) is None
    assert chain(lambda x: net.first(x), x) is None
    require_same(net.first, x)


def test_functions_that_somebody_has_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    net, x = make(), double(5, 4)
    assert chain(lambda x: net.third(F.relu(x)), x) is not None
    monkeypatch.setattr(F, "relu", lambda x: x * 3)
    assert chain(lambda x: net.third(F.relu(x)), x) is None
    require_same(lambda x: net.third(F.relu(x)), x)


REPLACED: list[tuple[Any, str, Function]] = [
    (F, "softmax", nn.Sequential(nn.Linear(4, 3), nn.Softmax(1)).double()),
    (F, "relu", nn.Sequential(nn.Linear(4, 3), nn.ReLU()).double()),
    (F, "mish", nn.Sequential(nn.Linear(4, 3), nn.Mish()).double()),
    (F, "dropout", nn.Sequential(nn.Linear(4, 3), nn.Dropout()).double().eval()),
    (torch, "relu", nn.Sequential(nn.Linear(4, 3), nn.ReLU()).double()),
    (torch, "relu", lambda x: F.relu(torch.exp(x) * 2)),
    (torch.Tensor, "softmax", nn.Sequential(nn.Linear(4, 3), nn.Softmax(1)).double()),
    (torch.Tensor, "tanh", lambda x: F.tanh(x)),
    (torch.Tensor, "flatten", nn.Sequential(nn.Linear(4, 3), nn.Flatten()).double()),
    (nn.Sequential, "__iter__", nn.Sequential(nn.Linear(4, 3), nn.ReLU()).double()),
]


@pytest.mark.parametrize(
    ("space", "name", "fn"), REPLACED, ids=[f"{it[0]} {it[1]}" for it in REPLACED]
)
def test_what_layers_call_may_be_replaced(
    space: Any, name: str, fn: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    last, x = nn.Linear(4, 4).double(), double(5, 4)

    def whole(x: Tensor) -> Tensor:
        return fn(last(x))

    assert chain(whole, x) is not None
    were = getattr(space, name)

    def other(*args: Any, **kwargs: Any) -> Any:
        found = were(*args, **kwargs)
        return 2 * found if isinstance(found, Tensor) else reversed([*found])

    monkeypatch.setattr(space, name, other)
    assert chain(whole, x) is None
    if name != "__iter__":  # whose layers do not fit one another then
        require_same(whole, x)


def test_methods_that_somebody_has_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    net, x = make(), double(5, 4)
    fns: list[Function] = [
        lambda x: net.third(x.relu()),
        lambda x: net.third(3 * x),
        lambda x: net.third(torch.relu(x) if max(1, 2) == 2 else x),
    ]
    assert all(chain(fn, x) is not None for fn in fns)
    monkeypatch.setattr(Tensor, "relu", lambda x: x * 3)
    monkeypatch.setattr(Tensor, "__rmul__", lambda x, _: x + x)
    monkeypatch.setattr("builtins.max", min)
    for fn in fns:
        assert chain(fn, x) is None
        require_same(fn, x)


def test_a_list_that_counts_in_its_own_way() -> None:
    torch.manual_seed(0)
    layers = Turned([nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)]).double()
    x = double(5, 4)

    def fn(x: Tensor) -> Tensor:
        return layers[0](layers[1](layers[2](x)))

    assert chain(fn, x) is None
    require_same(fn, x)


def test_a_function_with_builtins_of_its_own() -> None:
    space: dict[str, Any] = {"act": nn.Tanh(), "last": nn.Linear(4, 3).double()}
    program = """
def fn(x):
    for _ in range(1):
        x = act(x)
    return last(x)
"""
    exec(program, space)
    x = double(5, 4)
    assert chain(space["fn"], x) is not None
    space["__builtins__"] = {"range": lambda n: [0] * (n + 1)}
    exec(program, space)
    assert chain(space["fn"], x) is None
    require_same(space["fn"], x)
