"""Chains that are recalled: whatever has changed since, they are those of the call."""

import builtins
import copy
import gc
import pickle
import random
import sys
import threading
import types
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any, cast

import numpy
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations, parametrize

import gradlib
from gradlib.jacobian.fast.chains import find, forms, recalled
from gradlib.random_state import seed_all

from .lines import double

# As it is, without what holds it against a fresh one in each of these tests.
chain_of = recalled.chain_of


SCALE = 0.7
LAYERS: dict[str, Any] = {"act": torch.tanh}


def helper(h: Tensor, slope: float = 0.2, *, shift: float = 1.5) -> Tensor:
    """Do what somebody has written twice otherwise."""
    return F.leaky_relu(h, slope) + shift


def other_helper(h: Tensor, slope: float = 0.2, *, shift: float = 1.5) -> Tensor:
    """Do something else."""
    return F.leaky_relu(h, slope) - shift


class Inner(nn.Module):
    """A module of one's own, in another one."""

    power = 2

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.act = nn.LayerNorm(4), nn.ELU(0.4)

    def forward(self, h: Tensor) -> Tensor:
        return self.act(self.norm(h)) ** self.power


class Net(nn.Module):
    """A module of one's own, which reads all there is to be read."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 3)
        self.inner, self.drop = Inner(), nn.Dropout(0.0)
        self.between = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
        self.listed = nn.ModuleList([nn.Linear(4, 4), nn.SiLU()])
        self.named = nn.ModuleDict({"a": nn.Linear(4, 4)})
        self.plain = [nn.Linear(4, 4).double(), nn.Sigmoid()]
        self.by_key = {"a": [torch.tanh]}
        self.pair = (nn.Linear(4, 4).double(), 0.3)
        self.act: Any = F.silu
        self.own: Any = lambda h: h.sin()
        self.bound: Any = self.inner.forward
        self.slope = 0.3
        self.deep = True

    @staticmethod
    def static(h: Tensor) -> Tensor:
        return h.tanh()

    def method(self, h: Tensor) -> Tensor:
        return self.act(h) * self.slope

    def forward(self, x: Tensor) -> Tensor:
        x = self.inner(torch.flatten(self.first(x), 1))
        x = self.between(self.drop(x)) if self.deep else x
        for layer in self.listed:
            x = layer(x)
        x = self.named["a"](self.static(x))
        for layer in self.plain[:2]:
            x = layer(x)
        x = self.pair[0](x) * self.pair[1]
        x = self.by_key["a"][0](self.bound(self.own(self.method(x))))
        if self.training:
            x = torch.relu(x)
        return self.last(helper(x) * SCALE if len(self.plain) < 3 else -x)


def make() -> Net:
    """Return a net in evaluation, as random layers are none."""
    seed_all(0)
    return Net().double().eval()


def _convolving() -> nn.Sequential:
    seed_all(0)
    layers = nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4), nn.LeakyReLU(0.2)
    more = nn.GroupNorm(2, 4), nn.MaxPool2d(2), nn.Hardtanh(-1, 1), nn.ReLU()
    ending = nn.AvgPool2d(3, 2, 1), nn.AdaptiveAvgPool2d(1), nn.Flatten()
    return nn.Sequential(*layers, *more, *ending, nn.Linear(4, 3)).double().eval()


def recalls(fn: Any, x: Tensor) -> bool:
    """Tell whether a chain is recalled, and has been noted before."""
    known = recalled._known_of(fn)
    return known is not None and recalled.recalled(known, fn, x) is not None


def learn(fn: Any, x: Tensor) -> None:
    """Have a function be met, and noted."""
    for _ in range(2):
        chain_of(fn, (x,))


def require_right(fn: Any, x: Tensor) -> None:
    """Hold the Jacobian against that of the loop, where there is one."""
    find = partial(gradlib.per_sample_jacobian, fn, x, check=False)
    try:
        truth = find(mode="loop")
    except (RuntimeError, TypeError, ValueError, AttributeError, LookupError) as error:
        for _ in range(2):
            with pytest.raises(type(error)):
                find()
        return
    for _ in range(2):  # the second time it may be recalled in its new form
        torch.testing.assert_close(find(), truth, rtol=1e-9, atol=1e-9)


def _other_class(net: Any) -> None:
    class Other(Inner):
        def forward(self, h: Tensor) -> Tensor:
            return self.act(self.norm(h))

    net.inner.__class__ = Other


def _in_class(name: str, value: Any) -> Callable[[Any], None]:
    """Change the class of this net alone."""

    def change(net: Any) -> None:
        vars_of = {name: value}
        net.__class__ = type("Changed", (Net,), vars_of)

    return change


def _bound_now(net: Any) -> None:
    _in_class("own", vars(net).pop("own"))(net)


def _hook(net: Any) -> None:
    net.between[1].register_forward_hook(lambda _m, _x, y: 2 * y)


def _twice(_module: object, h: Tensor) -> Tensor:
    return 2 * h


def _replaced(net: Any) -> None:
    net.first.weight = nn.Parameter(torch.ones(4, 4).double())


def _wider(net: Any) -> None:
    net.first.weight = nn.Parameter(torch.ones(5, 4).double())
    net.first.bias = None


class Mine(nn.Parameter):
    """A class of somebody's own."""


CHANGES: dict[str, Callable[[Any], object]] = {
    "nothing": lambda _: None,
    "a number": lambda net: setattr(net, "slope", 0.6),
    "a number of another kind": lambda net: setattr(net, "slope", True),
    "a branch": lambda net: setattr(net, "deep", False),
    "the mode": lambda net: net.train(),
    "the mode of a layer": lambda net: net.drop.train(),
    "the mode of itself alone": lambda net: setattr(net, "training", True),
    "a function": lambda net: setattr(net, "act", F.gelu),
    "a function of one's own": lambda net: setattr(net, "own", lambda h: h.cos()),
    "its code": lambda net: setattr(
        net.own, "__code__", (lambda h: h.cos() * 2).__code__
    ),
    "a bound method": lambda net: setattr(net, "bound", Inner().double().forward),
    "a method that is bound": lambda net: setattr(net, "bound", net.method),
    "an attribute that hides a method": lambda net: vars(net).update(
        method=lambda h: h.tanh()
    ),
    "a function that hides itself": lambda net: vars(net).update(method=Net.method),
    "a static method": _in_class("static", staticmethod(lambda h: h.sin())),
    "a method": _in_class("method", _twice),
    "a method that is static": _in_class("method", staticmethod(Net.method)),
    "a function that is a method": _bound_now,
    "a class of torch's": _in_class("__module__", "torch.nn.modules.mine"),
    "a property": _in_class("own", property(lambda _: torch.exp)),
    "another forward": _in_class("forward", lambda it, x: it.last(it.first(x))),
    "how it finds attributes": _in_class(
        "__getattr__", lambda it, name: nn.Module.__getattr__(it, name)
    ),
    "how it is called": _in_class(
        "__call__", lambda it, x: 2 * nn.Module.__call__(it, x)
    ),
    "a class": _other_class,
    "a constant of an instance": lambda net: setattr(net.inner, "power", 3),
    "a layer": lambda net: setattr(net, "first", nn.Linear(4, 4).double()),
    "a layer of another class": lambda net: setattr(
        net, "between", nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
    ),
    "another layer of a container": lambda net: net.between.append(nn.Tanh()),
    "one less": lambda net: net.between.__delitem__(1),
    "the order of a container": lambda net: net.between.append(net.between.pop(0)),
    "another layer in a list": lambda net: net.listed.append(nn.Tanh()),
    "a layer by name": lambda net: net.named.update({"a": nn.Tanh()}),
    "a part of a list": lambda net: net.plain.__setitem__(1, nn.Tanh()),
    "a longer list": lambda net: net.plain.append(nn.Tanh()),
    "a shorter list": lambda net: net.plain.pop(),
    "a list in a dict": lambda net: net.by_key.update(a=[torch.sin]),
    "its part": lambda net: net.by_key["a"].__setitem__(0, torch.sin),
    "nothing in a dict": lambda net: net.by_key.clear(),
    "a tuple": lambda net: setattr(net, "pair", (net.pair[0], 0.5)),
    "a longer tuple": lambda net: setattr(net, "pair", (nn.Tanh(), 0.3, 1)),
    "the class of a list": lambda net: setattr(net, "plain", tuple(net.plain)),
    "one layer for two": lambda net: setattr(net, "first", net.between[0]),
    "a hook": _hook,
    "a hook on itself": lambda net: net.register_forward_hook(lambda _m, _x, y: 2 * y),
    "a hook before it": lambda net: net.inner.register_forward_pre_hook(
        lambda _m, args: (2 * args[0],)
    ),
    "a parametrization": lambda net: parametrizations.weight_norm(net.first),
    "a forward of a layer": lambda net: vars(net.first).update(forward=torch.sin),
    "a weight": lambda net: net.first.weight.data.mul_(2),
    "another weight": _replaced,
    "data": lambda net: setattr(net.first.weight, "data", torch.ones(4, 4).double()),
    "a weight of another shape": _wider,
    "a weight of another dtype": lambda net: net.first.float(),
    "a net of another dtype": lambda net: net.float(),
    "a weight of another class": lambda net: setattr(
        net.first, "weight", Mine(net.first.weight.data)
    ),
    "no bias": lambda net: setattr(net.first, "bias", None),
    "a bias of another class": lambda net: setattr(
        net.first, "bias", Mine(net.first.bias.data)
    ),
    "sparse": lambda net: setattr(
        net.first, "weight", nn.Parameter(net.first.weight.detach().to_sparse())
    ),
    "on another device": lambda net: net.first.to("meta"),
    "a tensor that hides a weight": lambda net: vars(net.first).update(
        weight=torch.ones(4, 4).double()
    ),
    "an option": lambda net: setattr(net.inner.act, "alpha", 0.9),
    "an option of another kind": lambda net: setattr(net.inner.act, "alpha", 1),
    "an option with a graph": lambda net: setattr(
        net.inner.act, "alpha", torch.tensor(0.5, requires_grad=True)
    ),
    "a shape that is normed": lambda net: setattr(
        net.inner.norm, "normalized_shape", (2, 2)
    ),
    "how close to zero": lambda net: setattr(net.inner.norm, "eps", 0.5),
    "no scale": lambda net: setattr(net.inner.norm, "weight", None),
    "in place": lambda net: setattr(net.inner.act, "inplace", True),
    "in place, and refused": lambda net: net.inner.act.__dict__.update(
        inplace=True, alpha=-0.5
    ),
}


@pytest.mark.parametrize("wrapped", [False, True])
@pytest.mark.parametrize("name", CHANGES)
def test_what_has_changed_in_a_net(name: str, wrapped: bool) -> None:
    net, x = make(), double(5, 4)
    fn: Any = (lambda x: net(x)) if wrapped else net
    learn(fn, x)
    assert recalls(fn, x)
    require_right(fn, x)
    CHANGES[name](net)
    given = x.to(net.last.weight.dtype)
    require_right(fn, given)


GONE: dict[str, Callable[[Any], object]] = {
    "of a dict": lambda net: net.by_key.clear(),
    "of a list": lambda net: net.by_key["a"].clear(),
    "an attribute": lambda net: delattr(net, "slope"),
}


@pytest.mark.parametrize("name", GONE)
def test_what_was_not_there_once_is_no_chain_only_until_it_is(name: str) -> None:
    def of(net: Net) -> Callable[[Tensor], Tensor]:
        return lambda x: net(x)

    without, x = make(), double(5, 4)
    GONE[name](without)
    learn(of(without), x)
    learn(of(make()), x)
    assert recalls(of(make()), x)


CONVOLVED: dict[str, Callable[[Any], object]] = {
    "nothing": lambda _: None,
    "stride": lambda net: setattr(net[0], "stride", (2, 2)),
    "padding": lambda net: setattr(net[0], "padding", (0, 0)),
    "a named padding": lambda net: setattr(net[0], "padding", "same"),
    "dilation": lambda net: setattr(net[0], "dilation", (2, 2)),
    "padding mode": lambda net: net.__setitem__(
        0, nn.Conv2d(1, 4, 3, padding=1, padding_mode="circular").double()
    ),
    "kernel": lambda net: net.__setitem__(0, nn.Conv2d(1, 4, 5, padding=1).double()),
    "groups": lambda net: net.__setitem__(
        0, nn.Sequential(nn.Conv2d(1, 4, 1), nn.Conv2d(4, 4, 3, groups=2)).double()
    ),
    "statistics of its own": lambda net: net[1].train(),
    "statistics": lambda net: net[1].running_var.mul_(3),
    "other statistics": lambda net: setattr(
        net[1], "running_mean", torch.ones(4).double()
    ),
    "no statistics": lambda net: setattr(net[1], "running_mean", None),
    "statistics of another dtype": lambda net: setattr(
        net[1], "running_mean", torch.ones(4)
    ),
    "how close to zero": lambda net: setattr(net[1], "eps", 0.5),
    "slope": lambda net: setattr(net[2], "negative_slope", 0.7),
    "groups that are normed": lambda net: setattr(net[3], "num_groups", 4),
    "window": lambda net: setattr(net[4], "kernel_size", 3),
    "its stride": lambda net: setattr(net[4], "stride", 1),
    "its rounding": lambda net: setattr(net[4], "ceil_mode", True),
    "its result": lambda net: setattr(net[4], "return_indices", True),
    "its padding": lambda net: setattr(net[4], "padding", 1),
    "its dilation": lambda net: setattr(net[4], "dilation", 2),
    "limits": lambda net: setattr(net[5], "max_val", 0.01),
    "lower limits": lambda net: setattr(net[5], "min_val", 0.0),
    "in place": lambda net: setattr(net[6], "inplace", True),
    "means of other windows": lambda net: setattr(net[7], "kernel_size", (2, 3)),
    "their stride": lambda net: setattr(net[7], "stride", 1),
    "their rounding": lambda net: setattr(net[7], "ceil_mode", True),
    "their edges": lambda net: setattr(net[7], "padding", 0),
    "what counts": lambda net: setattr(net[7], "count_include_pad", False),
    "what they are divided by": lambda net: setattr(net[7], "divisor_override", 4),
    "size": lambda net: setattr(net[8], "output_size", 2),
    "the same size": lambda net: setattr(net[8], "output_size", (1, 1)),
    "no size": lambda net: setattr(net[8], "output_size", 1.0),
    "axes": lambda net: setattr(net[9], "start_dim", 0),
    "last axis": lambda net: setattr(net[9], "end_dim", 2),
    "a layout": lambda net: net.to(memory_format=torch.channels_last),
}


@pytest.mark.parametrize("name", CONVOLVED)
def test_what_has_changed_in_a_net_of_convolutions(name: str) -> None:
    net, x = _convolving(), double(2, 1, 8, 8)
    learn(net, x)
    assert recalls(net, x)
    CONVOLVED[name](net)
    require_right(net, x)
    require_right(net, double(2, 1, 9, 7))


def _in_torch(monkeypatch: pytest.MonkeyPatch, space: Any, name: str) -> None:
    were = getattr(space, name)

    def other(*args: Any, **kwargs: Any) -> Any:
        found = were(*args, **kwargs)
        return 2 * found if isinstance(found, Tensor) else found

    monkeypatch.setattr(space, name, other)


@pytest.mark.parametrize(
    ("space", "name"),
    [
        *((F, it) for it in ("linear", "layer_norm", "elu", "silu", "leaky_relu")),
        *((torch, it) for it in ("tanh", "sigmoid", "layer_norm", "flatten")),
        *((Tensor, it) for it in ("tanh", "sin", "__mul__", "__add__", "__pow__")),
        *((it, "forward") for it in (nn.Linear, nn.Tanh, nn.ELU, nn.Sequential)),
        *((it, "__call__") for it in (nn.Linear, nn.Module)),
        *((nn.Module, it) for it in ("_call_impl", "__getattr__")),
        *((it, "__iter__") for it in (nn.Sequential, nn.ModuleList)),
        (builtins, "len"),
    ],
    ids=str,
)
def test_what_torch_has_may_be_replaced(
    space: Any, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    net, x = make(), double(5, 4)
    learn(net, x)
    assert recalls(net, x)
    with monkeypatch.context() as patch:
        if name == "len":
            patch.setattr(builtins, name, lambda it: sum(1 for _ in it))
        else:
            _in_torch(patch, space, name)
        assert not recalls(net, x) or name in ("_call_impl", "__iter__")
        chain = find.chain_of(net, (x,))  # holds it against a fresh one
    assert chain is None or name == "__iter__"
    require_right(net, x)


def test_what_code_finds_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    net, x = make(), double(5, 4)
    learn(net, x)
    spaces = globals()
    changes: dict[str, Any] = {
        "SCALE": 0.9,
        "helper": other_helper,
        "F": types.SimpleNamespace(leaky_relu=lambda h, slope: h.sin() * slope),
        "len": lambda _: 7,
    }
    for name, value in changes.items():
        assert recalls(net, x)
        with monkeypatch.context() as patch:
            patch.setitem(spaces, name, value)
            assert not recalls(net, x)
            require_right(net, x)
        learn(net, x)
    defaults = helper.__defaults__, helper.__kwdefaults__
    longer = (*cast(Any, defaults[0]), 0.4)
    for given in (
        ((0.4,), defaults[1]),
        (longer, defaults[1]),
        (defaults[0], {"shift": 3.5}),
    ):
        helper.__defaults__, helper.__kwdefaults__ = cast(Any, given)
        try:
            require_right(net, x)
        finally:
            helper.__defaults__, helper.__kwdefaults__ = defaults
        learn(net, x)
    cast(Any, helper.__kwdefaults__)["shift"] = 4.5
    require_right(net, x)
    cast(Any, helper.__kwdefaults__)["shift"] = 1.5
    monkeypatch.setattr(helper, "__code__", other_helper.__code__)
    assert not recalls(net, x)
    require_right(net, x)


def test_variables_of_an_outer_function() -> None:
    net, scale, x = make(), 2.0, double(5, 4)

    def fn(x: Tensor) -> Tensor:
        return net(x) * scale  # noqa: F821 (it is deleted below)

    learn(fn, x)
    assert recalls(fn, x)
    scale = 3.0
    assert not recalls(fn, x)
    require_right(fn, x)
    net = nn.Linear(4, 2).double()
    require_right(fn, x)
    del net
    with pytest.raises(NameError):
        gradlib.per_sample_jacobian(fn, x)


def test_how_a_net_finds_attributes_that_is_not_called() -> None:
    class Own(nn.Module):
        first: Any

    net, other, x = Own(), nn.Linear(4, 4).double(), double(5, 4)
    net.first = nn.Linear(4, 4).double()

    def fn(x: Tensor) -> Tensor:
        return net.first(x)

    learn(fn, x)
    assert recalls(fn, x)
    cast(Any, Own).__getattr__ = lambda *_: other
    require_right(fn, x)


def test_the_same_code_of_other_nets() -> None:
    x = double(5, 4)

    def of(net: nn.Module) -> Callable[[Tensor], Tensor]:
        return lambda x: net(x).tanh()

    nets = [make() for _ in range(3)] + [nn.Linear(4, 2).double()]
    learn(of(nets[0]), x)
    assert recalls(of(nets[1]), x)
    for net in (*nets, *nets):
        with torch.no_grad():
            for it in net.parameters():
                it.mul_(1.1)
        require_right(of(net), x)


@pytest.mark.parametrize(
    "change",
    [
        lambda x: x[:2],
        lambda x: x.float(),
        lambda x: nn.Parameter(x),
        lambda x: x.to("meta"),
        lambda x: x.to_sparse(),
        lambda x: x.mT.contiguous().mT,
        lambda x: x.as_subclass(Mine),
        lambda x: x[:, :1],
        lambda x: x.unsqueeze(1),
    ],
)
def test_other_inputs(change: Callable[[Tensor], Tensor]) -> None:
    net, x = make(), double(5, 4)
    learn(net, x)
    find.chain_of(net, (change(x),))  # holds it against a fresh one


def test_views_of_another_layout() -> None:
    conv = nn.Conv2d(2, 2, 2).double()
    last, x = nn.Linear(32, 3).double(), double(2, 2, 5, 5)

    def viewed(x: Tensor) -> Tensor:
        return last(conv(x).tanh().view(x.size(0), -1))

    learn(viewed, x)
    assert recalls(viewed, x)
    assert not recalls(viewed, x.to(memory_format=torch.channels_last))
    nn.Module.to(conv, memory_format=torch.channels_last)  # pyright: ignore (stubs)
    assert not recalls(viewed, x)
    if not x.is_cpu:  # in float64 a GPU puts channels first all the same
        require_right(viewed, x)
        return
    with pytest.raises(RuntimeError, match="view size"):
        gradlib.per_sample_jacobian(viewed, x)


def test_somebody_looks_on() -> None:
    net, x = make(), double(5, 4)
    learn(net, x)
    with torch.autocast("cpu", torch.bfloat16):
        assert chain_of(net, (x,)) is None
    handle = nn.modules.module.register_module_forward_hook(lambda *_: None)
    assert chain_of(net, (x,)) is None
    handle.remove()
    assert chain_of(net, (x,)) is not None
    with parametrize.cached():
        require_right(net, x)


def test_somebody_debugs() -> None:
    net, x = make(), double(5, 4)
    learn(net, x)
    assert chain_of(net, (x,)) is not None
    before = sys.gettrace()
    sys.settrace(lambda *_: None)
    try:
        found = chain_of(net, (x,))
    finally:
        sys.settrace(before)
    assert found is None


def test_weights_that_are_no_parameters() -> None:
    net, x = make(), double(5, 4)
    learn(net, x)
    for name in ("weight", "bias"):
        own = vars(net.first)["_parameters"]
        own[name] = 2 * own[name].detach()
        require_right(net, x)
    assert recalls(net, x)


def test_weights_of_a_call() -> None:
    net, x = make(), double(5, 4)
    learn(net, x)
    given = {name: 2 * it.detach() for name, it in net.named_parameters()}

    def fn(x: Tensor) -> Tensor:
        return cast(Tensor, torch.func.functional_call(net, given, (x,)))

    require_right(fn, x)
    require_right(net, x)


def test_nothing_is_kept_and_nobody_sees_it() -> None:
    net, x = make(), double(5, 4)
    before = {*vars(net)}, [*net.state_dict()]
    fn: Any = lambda x: net(x)  # noqa: E731, F821 (it is one)
    for it in (fn, net, net.forward, net.between):
        learn(it, x)
        assert recalls(it, x)
    assert before == ({*vars(net)}, [*net.state_dict()])
    net.own = None
    for other in (copy.deepcopy(net), pickle.loads(pickle.dumps(net.between))):
        assert not recalls(other, x)
        require_right(other, x)
    net = make()
    net.own = net.method  # it leads back to the net
    learn(net, x)
    gone = [weakref.ref(it) for it in (x, *net.modules(), *net.parameters())]
    gone += [weakref.ref(it) for it in (fn, fn.__closure__[0].cell_contents)]
    code = weakref.ref(type(net))
    del fn, net, it, other, x
    gc.collect()
    assert code() is Net
    assert not any(it() is not None for it in gone)


def test_classes_and_code_are_not_kept() -> None:
    scope: dict[str, Any] = {"nn": nn, "torch": torch}
    exec(
        "class Local(nn.Module):\n"
        "    def __init__(self):\n"
        "        super(Local, self).__init__()\n"
        "        self.layer = nn.Linear(4, 3).double()\n"
        "    def forward(self, x):\n"
        "        return torch.tanh(self.layer(x))\n"
        "net = Local()\n"
        "def fn(x):\n"
        "    return net(x)\n",
        scope,
    )
    x = double(5, 4)
    for it in (scope["fn"], scope["net"]):
        learn(it, x)
        assert recalls(it, x)
    gone = [weakref.ref(scope[name]) for name in ("Local", "fn", "net")]
    known = len(vars(recalled)["_known"])
    del it
    scope.clear()
    gc.collect()
    assert not any(it() is not None for it in gone)
    assert len(vars(recalled)["_known"]) < known


class Met:
    """It is nobody known."""

    def seen(self) -> None:
        """See something."""


class Watched(nn.Module):
    """Somebody may look at what it does, who is no module."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)
        self.watch: Any = Met().seen

    def forward(self, x: Tensor) -> Tensor:
        x = self.layer(x)
        return x.tanh() if self.watch is None else x.sigmoid()


def test_what_nobody_can_tell_again_is_not_recalled() -> None:
    seed_all(0)
    net, x = Watched().double(), double(3, 4)
    for watch in net.watch, None:
        net.watch = watch
        for _ in range(4):
            require_right(net, x)
        assert recalls(net, x) == (watch is None)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_weights_without_strides_or_shape() -> None:
    rows, columns = double(4, 3).to_sparse_csr(), double(4, 3).to_sparse_csc()
    nested: Any = torch.nested.nested_tensor([double(4), double(3)])
    for fn in (
        lambda x: x.sin() @ rows,
        lambda x: x.sin() @ columns,
        lambda x: x * nested.to_padded_tensor(0.0)[0],
        lambda x: x @ nested.t(),
    ):
        for _ in range(3):
            require_right(fn, double(5, 4))


def test_options_of_any_kind_are_not_recalled() -> None:
    norm: Any = nn.GroupNorm(2, 4)
    norm.num_groups = numpy.int64(2)
    net = nn.Sequential(nn.Linear(4, 4), norm, nn.Linear(4, 3)).double()
    x = double(3, 4)
    for _ in range(4):
        require_right(net, x)
    assert not recalls(net, x)


def test_one_that_never_comes_back_is_not_noted_for_ever(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    net, x, noted = make(), double(5, 4), 0
    real = recalled.form_of

    def counted(*args: Any) -> Any:
        nonlocal noted
        noted += 1
        return real(*args)

    monkeypatch.setattr(recalled, "TRIES", 3)
    monkeypatch.setattr(recalled, "form_of", counted)
    for number in range(10):
        net.slope = number / 7
        assert chain_of(net, (x,)) is not None
    assert noted == 3
    assert not recalls(net, x)


def _mean(h: Tensor) -> Tensor:
    return h - h.mean()


REFUSED: dict[str, Callable[[Any], Callable[[], object]]] = {
    "the mode": lambda net: net.drop.train() and net.drop.eval,
    "a hook": lambda net: net.first.register_forward_hook(_mean).remove,
    "a hook on itself": lambda net: net.register_forward_hook(_mean).remove,
    "a function": lambda net: _put(net, "act", _mean),
    "a layer": lambda net: _put(net, "first", nn.Bilinear(4, 4, 4)),
    "a layer's weight": lambda net: _put(
        net.first, "weight", nn.Parameter(torch.ones(4, 5).double())
    ),
    "its dtype": lambda net: _put(net.first, "bias", nn.Parameter(torch.ones(4))),
    "an option": lambda net: _put(net.inner.norm, "normalized_shape", (5,)),
}


def _put(of: Any, name: str, value: Any) -> Callable[[], object]:
    """Replace an attribute, and return what puts the other one back."""
    before = getattr(of, name)
    setattr(of, name, value)
    return lambda: setattr(of, name, before)


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_no_chain_is_not_read_again(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    net, x, found = make(), double(5, 4), 0
    real = recalled.found_on

    def counted(fn: Any, x: Tensor) -> Any:
        nonlocal found
        found += 1
        return real(fn, x)

    monkeypatch.setattr(recalled, "found_on", counted)
    mend = REFUSED[name](net)
    for _ in range(4):
        assert chain_of(net, (x,)) is None
    assert found == 2  # met, and noted
    assert chain_of(net, (double(6, 4),)) is None  # another form
    assert found == 3
    mend()
    assert chain_of(net, (x,)) is not None


def test_what_is_no_chain_is_noted_once(monkeypatch: pytest.MonkeyPatch) -> None:
    net, x, noted = make(), double(5, 4), 0
    real = recalled.Witnesses

    def counted(fn: Any) -> Any:
        nonlocal noted
        noted += 1
        return real(fn)

    monkeypatch.setattr(recalled, "Witnesses", counted)
    learn(net, x)
    for _ in range(3):
        net.train()
        for _ in range(5):
            assert chain_of(net, (x,)) is None
        net.eval()
        assert recalls(net, x)
        assert chain_of(net, (x,)) is not None
    assert noted == 2


def test_several_forms_are_known(monkeypatch: pytest.MonkeyPatch) -> None:
    net = make()
    batches = [double(size, 4) for size in range(1, recalled.MOST + 2)]
    chain_of(net, (batches[0],))
    for x in batches:
        chain_of(net, (x,))
    assert [recalls(net, x) for x in batches] == [False, *[True] * recalled.MOST]
    monkeypatch.setattr(forms, "are_same", lambda _: False)
    assert not any(recalls(net, x) for x in batches)


def test_threads() -> None:
    nets, x, wrong = [make() for _ in range(2)], double(5, 4), list[str]()
    nets[1].slope = 0.9
    truths = [gradlib.per_sample_jacobian(it, x, mode="loop") for it in nets]

    def work(number: int) -> None:
        for turn in range(50):
            net = nets[(number + turn) % 2]
            chain = chain_of(lambda x, it=net: it(x), (x,))
            if chain is None or chain.linears[-1].weight is not net.last.weight:
                wrong.append("another net")
        found = gradlib.per_sample_jacobian(nets[number % 2], x, check=False)
        if not torch.allclose(found, truths[number % 2]):
            wrong.append("another Jacobian")

    threads = [threading.Thread(target=work, args=(it,)) for it in range(4)]
    for it in threads:
        it.start()
    for it in threads:
        it.join()
    assert not wrong


@pytest.mark.parametrize("seed", range(20))
def test_changes_by_chance(seed: int) -> None:
    chance, x = random.Random(seed), double(3, 4)
    # Without a bias torch multiplies by weights that have no numbers, of "meta".
    left_out = ("dtype", "device")
    changes = [
        it for name, it in CHANGES.items() if not any(odd in name for odd in left_out)
    ]
    while True:
        net = make()
        fn: Any = (lambda x, it=net: it(x)) if chance.random() < 0.5 else net
        for _ in range(chance.randint(1, 6)):
            learn(fn, x)
            if chance.random() < 0.8:
                try:
                    chance.choice(changes)(net)
                except (AssertionError, *recalled.ERRORS, RuntimeError):
                    break  # what it changes is gone
            require_right(fn, x)
            if chance.random() < 0.3:
                x = double(chance.randint(1, 4), 4)
        if chance.random() < 0.3:
            break


WRONG_WEIGHTS: dict[str, Callable[[nn.Linear], object]] = {
    "a number": lambda it: setattr(
        it, "weight", nn.Parameter(torch.tensor(2.0).double())
    ),
    "nested": lambda it: setattr(
        it, "weight", nn.Parameter(torch.nested.nested_tensor([double(4, 4)]))
    ),
    "none": lambda it: setattr(it, "weight", None),
    "gone": lambda it: delattr(it, "weight"),
    "no bias": lambda it: delattr(it, "bias"),
}


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("spoil", WRONG_WEIGHTS.values(), ids=WRONG_WEIGHTS)
@pytest.mark.parametrize("calls_before", [0, 2])
def test_a_weight_that_torch_refuses_is_torchs_error(
    spoil: Callable[[nn.Linear], object], calls_before: int
) -> None:
    net, x = (
        nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2)).double(),
        double(5, 4),
    )
    for _ in range(calls_before):
        gradlib.per_sample_jacobian(net, x, check=False)
    spoil(cast(nn.Linear, net[0]))
    with pytest.raises((AttributeError, RuntimeError, TypeError)) as torchs:
        net(x)
    for _ in range(3):  # it is found, noted, and found again
        with pytest.raises(torchs.type) as ours:
            gradlib.per_sample_jacobian(net, x, check=False)
        assert str(ours.value) == str(torchs.value)
