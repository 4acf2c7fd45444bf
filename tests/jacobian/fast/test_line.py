"""Layers that code names: found by running it on stand-ins, which can do no harm."""

import math
import random
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType, SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.functional import gelu
from torch.nn.utils import parametrizations

import gradlib
from gradlib.jacobian.fast.chains import stand_ins
from gradlib.jacobian.fast.chains.line import layers_of

from .test_chain import chain

Function = Callable[[Tensor], Tensor]


def double(*shape: int) -> Tensor:
    """Return random numbers."""
    return torch.randn(*shape, dtype=torch.float64)


def require_same(fn: Function, x: Tensor) -> None:
    """Hold the Jacobian of a function against that of the loop."""
    found = gradlib.per_sample_jacobian(fn, x, check=False)
    reference = gradlib.per_sample_jacobian(fn, x, mode="loop", check=False)
    torch.testing.assert_close(found, reference, rtol=1e-12, atol=1e-12)


@contextmanager
def kept(*tensors: Tensor) -> Iterator[None]:
    """Require that nobody writes to tensors meanwhile."""
    before = [it.detach().clone() for it in tensors]
    yield
    assert all(map(torch.equal, tensors, before))


class Net(nn.Module):
    """A module of one's own, of which each test uses something."""

    kind = "relu"

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 6), nn.Linear(6, 4)
        self.third = nn.Linear(4, 4)
        self.drop = nn.Dropout()
        self.layers = nn.ModuleList([nn.Linear(4, 4) for _ in range(3)])
        self.by_name = nn.ModuleDict({"a": nn.Linear(4, 4), "b": nn.Tanh()})
        self.inner = nn.Sequential(nn.Linear(4, 3), nn.SiLU(), nn.Linear(3, 4))
        self.plain = [nn.Linear(4, 4).double(), nn.Linear(4, 4).double()]
        self.sizes = [4, 6]
        self.slope = 0.3
        self.act: Any = torch.tanh
        self.own_act: Any = lambda x: x.sigmoid()
        self.nothing: Any = None
        self.calls = 0
        self.seen: list[Any] = []
        self.unknown = nn.Softmin(1)
        self.single = nn.Linear(4, 1)
        self.acts = {"relu": torch.relu}

    @staticmethod
    def static(x: Tensor) -> Tensor:
        return torch.tanh(x)

    def encode(self, x: Tensor) -> Tensor:
        return torch.relu(self.first(x))

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.encode(x))

    @property
    def head(self) -> nn.Module:
        self.calls += 1
        return self.third


class Nested(nn.Module):
    """It has another one inside."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.last = Net(), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(F.elu(self.net(x), alpha=0.4))


class Named(nn.Sequential):
    """A container with a class of its own."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(4, 5), nn.GELU(), nn.Linear(5, 3))


def helper(x: Tensor, slope: float = 0.2) -> Tensor:
    """Do what somebody has written twice otherwise."""
    return F.leaky_relu(x, slope)


def _loop(net: Net, x: Tensor) -> Tensor:
    for number, layer in enumerate(net.layers):
        x = layer(x)
        if number < len(net.layers) - 1:
            x = torch.tanh(x)
    return x


def _pairs(net: Net, x: Tensor) -> Tensor:
    for layer, slope in zip(net.plain, (0.1, 0.3), strict=True):
        x = helper(layer(x), slope=slope)
    return x


def _branches(net: Net, x: Tensor) -> Tensor:
    x = net.first(x)
    if net.training or net.slope > 1:
        x = torch.relu(x)
    if net.nothing:
        x = x * 2
    return net.second(F.dropout(x, 0.5, training=net.training))


def _in_place(net: Net, x: Tensor) -> Tensor:
    x = net.first(x)
    x = x.relu_()
    return F.silu(net.second(x), inplace=True)


def _comprehended(net: Net, x: Tensor) -> Tensor:
    for layer in net.layers[1:]:
        x = layer(x).sigmoid()
    return net.layers[-1](x)


def _asserts(net: Net, x: Tensor) -> Tensor:
    assert x.shape == (5, 4), "no batch of five"
    return net.third(x)


def _unpacks(net: Net, x: Tensor) -> Tensor:
    batch, width = x.shape
    return net.third(x.reshape(batch, width))


SCALE = 0.7

ELEMENTWISE: list[Function] = [
    torch.sin,
    torch.cos,
    torch.exp,
    torch.square,
    lambda x: x.sin(),
    lambda x: x.exp(),
    lambda x: x**3,
    lambda x: x.pow(2),
    lambda x: torch.pow(x, 4),
    lambda x: x * 2.5,
    lambda x: SCALE * x,
    lambda x: x / 3,
    lambda x: x + 1,
    lambda x: 0.5 + x,
    lambda x: x - 0.5,
    lambda x: 2 - x,
    lambda x: -x,
]

FOUND: dict[str, Callable[[Net, Tensor], Tensor]] = {
    "the module": lambda net, x: net(x),
    "a method": lambda net, x: net.second(net.encode(x)),
    "functions": lambda net, x: net.second(F.gelu(net.first(x), approximate="tanh")),
    "a function by its name": lambda net, x: net.third(gelu(x)),
    "one of another space": lambda net, x: net.third(nn.functional.relu6(x)),
    "all axes squeezed": lambda net, x: net.single(x).squeeze(),
    "casts that change nothing": lambda net, x: net.third(x.double()).double().tanh(),
    "a layout": lambda net, x: net.third(x.contiguous()).contiguous(),
    "a softmax": lambda net, x: F.softmax(net.third(x), dim=1),
    "its logarithm": lambda net, x: net.third(x).log_softmax(-1),
    "a softmax of torch's": lambda net, x: torch.softmax(torch.tanh(net.third(x)), 1),
    "a softmax of one entry": lambda net, x: F.log_softmax(net.single(x), dim=1),
    "other functions": lambda net, x: F.mish(
        net.third(F.logsigmoid(net.third(F.selu(net.third(F.hardswish(x))))))
    ),
    "one that divides": lambda net, x: net.third(F.softsign(net.third(x))),
    "a helper": lambda net, x: net.second(helper(net.first(x))),
    "a keyword": lambda net, x: net.second(helper(slope=SCALE, x=net.first(x))),
    "an attribute": lambda net, x: net.third(net.act(x)),
    "an attribute of its own": lambda net, x: net.third(net.own_act(x)),
    "a loop": _loop,
    "pairs": _pairs,
    "branches": _branches,
    "a part of a list": _comprehended,
    "in place": _in_place,
    "a container": lambda net, x: net.inner(x),
    "a layer of a container": lambda net, x: net.inner[0](x),
    "by name": lambda net, x: net.by_name["b"](net.by_name["a"](x)),
    "flattened": lambda net, x: net.third(torch.flatten(x, 1)),
    "flattened by the method": lambda net, x: net.third(x.flatten(start_dim=1)),
    "viewed": lambda net, x: net.third(x.view(x.size(0), -1)),
    "reshaped": lambda net, x: net.third(x.reshape(x.shape[0], -1)),
    "reshaped by its length": lambda net, x: net.third(x.reshape(len(x), -1)),
    "a lambda in it": lambda net, x: (lambda h: net.third(h).tanh())(x),
    "hardtanh": lambda net, x: net.third(F.hardtanh(x, -0.2, max_val=0.4)),
    "softplus": lambda net, x: net.third(F.softplus(x, 2)),
    "idle": lambda net, x: net.third(net.drop(x)),
    "a class attribute": lambda net, x: (
        net.third(torch.relu(x)) if net.kind == "relu" else net.third(x)
    ),
    "a static method": lambda net, x: net.third(net.static(x)),
    "a shape": lambda net, x: net.third(x if x.shape[-1] == len(x) else torch.relu(x)),
    "part of a shape": lambda net, x: net.third(x) if x.shape[1:] == (4,) else x,
    "a size": lambda net, x: net.third(x if x.size(-1) == len(x) else torch.relu(x)),
    "all sizes": lambda net, x: net.third(x) if x.size()[1] == 4 else x,
    "axes": lambda net, x: net.third(x) if x.dim() == x.ndim == len(x.shape) else x,
    "an assertion": _asserts,
    "unpacked": _unpacks,
    "viewed by its width": lambda net, x: net.third(x.view(-1, 4)),
    "viewed by a tuple": lambda net, x: net.third(x.view((len(x), -1))),
    "a clone": lambda net, x: net.third(x.clone()),
    "by a name that is made": lambda net, x: getattr(net, "th" + "ird")(x),
    "a dict": lambda net, x: net.third(net.acts["relu"](x)),
    "a list that is made": lambda net, x: list(net.plain)[-1](x),
    "comprehended": lambda net, x: [it for it in net.plain if len(net.plain)][1](x),
    "after in place": lambda net, x: net.second(F.relu(net.first(x), inplace=True)),
}


def make() -> Net:
    """Return a net in evaluation, as random layers are none."""
    torch.manual_seed(0)
    return Net().double().eval()


@pytest.mark.parametrize("name", FOUND)
def test_code_that_names_layers(name: str) -> None:
    net, of = make(), FOUND[name]
    x = double(5, 4)
    before = x.clone()
    assert chain(lambda x: of(net, x), x) is not None
    require_same(lambda x: of(net, x), x)
    assert torch.equal(x, before)
    assert net.calls == 0


@pytest.mark.parametrize("rows", [1, 6])
@pytest.mark.parametrize("number", range(len(ELEMENTWISE)))
def test_every_operation(number: int, rows: int) -> None:
    torch.manual_seed(0)
    of = ELEMENTWISE[number]
    first, last = nn.Linear(4, 5).double(), nn.Linear(5, rows).double()

    def often(x: Tensor) -> Tensor:
        return of(last(of(first(torch.tanh(of(x))))))

    def alone(x: Tensor) -> Tensor:
        return last(of(first(x)))

    for fn in (often, alone):
        _require_right(fn, first.weight)


def _require_right(fn: Function, weight: Tensor) -> None:
    x = (double(3, 4) / 10).requires_grad_()
    before = x.detach().clone()
    assert chain(fn, x) is not None
    require_same(fn, x)
    found = gradlib.per_sample_jacobian(fn, x)
    out = torch.full_like(found, torch.nan)
    gradlib.per_sample_jacobian(fn, x, out=out)
    torch.testing.assert_close(out, found)
    assert torch.equal(x, before)
    grads = [
        torch.autograd.grad(
            gradlib.per_sample_jacobian(fn, x, mode=mode, create_graph=True).sum(),
            [x, weight],
            materialize_grads=True,
        )
        for mode in ("auto", "loop")
    ]
    torch.testing.assert_close(*grads, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", ["last", "one", "dots", "first", "function"])
def test_an_output_of_one_entry_may_be_squeezed(name: str) -> None:
    net = make()
    of: dict[str, Function] = {
        "last": lambda x: net.single(x).squeeze(-1),
        "one": lambda x: net.single(x).squeeze(dim=1),
        "dots": lambda x: net.single(x)[..., 0],
        "first": lambda x: net.single(x)[:, 0],
        "function": lambda x: torch.squeeze(net.single(x.flatten(1)), -1),
    }
    x = double(5, 4)
    for it in (x, x[:1], x.view(5, 2, 2) if name == "function" else x):
        assert chain(of[name], it) is not None
        require_same(of[name], it)
        assert gradlib.per_sample_jacobian(of[name], it).shape == it.shape
        out = torch.full_like(it, torch.nan)
        assert gradlib.per_sample_jacobian(of[name], it, out=out) is out
        assert not out.isnan().any()
        graph = gradlib.per_sample_jacobian(of[name], it, create_graph=True)
        assert torch.equal(graph.detach(), out)


def test_modules_of_ones_own() -> None:
    torch.manual_seed(0)
    x = double(5, 4)
    for model in (Net(), Nested(), Named(), nn.Sequential(Net(), nn.ELU(), Nested())):
        net = model.double().eval()
        assert chain(net, x) is not None
        require_same(net, x)
        assert chain(net.forward, x) is not None
        require_same(net.forward, x)
    assert chain(make().encode, x) is not None


class Wide(nn.Module):
    """What it does depends on the shape that it is given."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x) if x.shape[1:] == (6,) else x


def test_the_shape_is_that_of_the_place() -> None:
    net, x, wide = make(), double(5, 4), Wide()
    for model in (
        nn.Sequential(net.first, wide, net.second, wide),
        nn.Sequential(nn.Sequential(net.first, nn.Sequential(wide, net.second)), wide),
    ):
        for fn in (model, lambda x, it=model: it(x)):
            assert chain(fn, x) is not None
            require_same(fn, x)
    images = double(2, 1, 3, 3)
    conv = nn.Sequential(nn.Conv2d(1, 6, 2), nn.Flatten(), nn.Linear(24, 6), Wide())
    assert chain(conv.double(), images) is not None
    require_same(conv, images)


def test_what_is_flattened_on_the_way() -> None:
    torch.manual_seed(0)
    last = nn.Linear(4, 3).double()
    x = double(3, 2, 2)
    assert chain(lambda x: last(x.view(x.size(0), -1)), x) is not None
    require_same(lambda x: last(x.view(x.size(0), -1)), x)
    assert chain(lambda x: last(x.view(len(x), -1)), x.mT.contiguous().mT) is None


@pytest.mark.parametrize("channels", [1, 2])
def test_what_is_viewed_in_one_layout_only(channels: int) -> None:
    conv, last = nn.Conv2d(channels, 2, 2).double(), nn.Linear(32, 3).double()
    x = double(2, channels, 5, 5)

    def viewed(x: Tensor) -> Tensor:
        return last(torch.relu(conv(x)).view(x.size(0), -1))

    def reshaped(x: Tensor) -> Tensor:
        return last(torch.relu(conv(x)).reshape(x.size(0), -1))

    assert chain(viewed, x) is not None
    require_same(viewed, x)
    nn.Module.to(conv, memory_format=torch.channels_last)  # pyright: ignore (stubs)
    assert chain(viewed, x) is None
    if x.is_cpu:  # in float64 a GPU puts channels first all the same
        with pytest.raises(RuntimeError, match="view size is not compatible"):
            viewed(x)
    assert chain(reshaped, x) is not None
    require_same(reshaped, x)


def test_it_is_the_code_of_this_call() -> None:
    net, x = make(), double(5, 4)

    def fn(x: Tensor) -> Tensor:
        return net.second(F.relu(net.first(x)) if net.slope < 1 else net.first(x))

    require_same(fn, x)
    bent = gradlib.per_sample_jacobian(fn, x)
    net.slope = 2.0
    require_same(fn, x)
    assert not torch.equal(gradlib.per_sample_jacobian(fn, x), bent)
    net.second = nn.Linear(6, 2).double()
    require_same(fn, x)
    with torch.no_grad():
        net.first.weight.mul_(2)
    require_same(fn, x)
    net.train()
    assert chain(lambda x: net.third(net.drop(x)), x) is None
    assert chain(lambda x: net.third(F.dropout(x, 0.5, net.training)), x) is None
    assert chain(lambda x: net.third(F.dropout(x)), x) is None


# --- What is no line: it happens once, in the way that goes through a graph.

COUNTS = 0


def _counts(net: Net, x: Tensor) -> Tensor:
    global COUNTS
    COUNTS += 1
    return net(x)


def _keeps(net: Net, x: Tensor) -> Tensor:
    net.seen.append(x)
    return net(x)


def _sets(net: Net, x: Tensor) -> Tensor:
    net.calls += 1
    return net(x)


def _sets_by_name(net: Net, x: Tensor) -> Tensor:
    net.calls = 7
    return net(x)


def _sets_a_slot(net: Net, x: Tensor) -> Tensor:
    net.inner.real = 7  # pyright: ignore (any name)
    return net(x)


def _prints(net: Net, x: Tensor) -> Tensor:
    print("called")
    return net(x)


def _without_graph(net: Net, x: Tensor) -> Tensor:
    with torch.no_grad():
        h = net.first(x)
    return net.second(h + 0 * net.first(x))


def _hooked(net: Net, x: Tensor) -> Tensor:
    h = net.first(x)
    if h.requires_grad:
        h.register_hook(lambda grad: 2 * grad)
    return net.second(h)


def _caught(net: Net, x: Tensor) -> Tensor:
    try:
        x = net.third(x) * 2
    except Exception:
        x = net.third(x)
    return x


def _caught_bare(net: Net, x: Tensor) -> Tensor:
    try:
        x = x.softmax(1)
    except:  # noqa: E722 (that is what is tested)
        x = net.first(x)
        return net.second(x)
    return x


def _last_is_plain(net: Net, x: Tensor) -> Tensor:
    for layer in net.layers:
        x = layer(x)
        if layer is not net.layers[-1]:
            x = torch.relu(x)
    return x


def _compares_lists(net: Net, x: Tensor) -> Tensor:
    return net.third(torch.relu(x)) if net.sizes == [4, 6] else net.third(x)


def _compares_modules(net: Net, x: Tensor) -> Tensor:
    return net.third(torch.relu(x)) if net.third == net.third else net.third(x)


def _has_many(net: Net, x: Tensor) -> Tensor:
    return net.third(torch.relu(x)) if net.seen else net.third(x)


def _matches_shape(net: Net, x: Tensor) -> Tensor:
    match x.shape:
        case (_, _):
            x = torch.relu(x)
        case _:
            pass
    return net.third(x)


def _matches_list(net: Net, x: Tensor) -> Tensor:
    match net.sizes:
        case [_, *_]:
            x = torch.relu(x)
        case _:
            pass
    return net.third(x)


def _matches_class(net: Net, x: Tensor) -> Tensor:
    match net.slope:
        case float():
            x = torch.relu(x)
        case _:
            pass
    return net.third(x)


def _walks(net: Net) -> Iterator[Function]:
    net.calls += 1
    yield torch.relu


def _generates(net: Net, x: Tensor) -> Tensor:
    for act in _walks(net):
        x = act(x)
    return net.third(x)


def _expresses(net: Net, x: Tensor) -> Tensor:
    for layer in (it for it in net.plain):
        x = layer(x)
    return x


def _returns_a_function(net: Net, x: Tensor) -> Tensor:
    def made() -> Function:
        def act(x: Tensor) -> Tensor:
            global COUNTS
            COUNTS += 1
            return torch.relu(x)

        return act

    return net.third(made()(x))


def _scales_in_place(net: Net, x: Tensor) -> Tensor:
    h = net.first(x)
    h *= 2
    return net.second(h)


def _grows(net: Net, x: Tensor) -> Tensor:
    while x.size(0) < 20:
        x = torch.flatten(x, 0)
    return net.third(x.view(5, 4))


def _after_in_place(net: Net, x: Tensor) -> Tensor:
    h = net.first(x)
    h.relu_()
    return net.second(h)


def _default(net: Net, x: Tensor, seen: list[int] = [1]) -> Tensor:  # noqa: B006 (it is tested)
    seen.append(1)
    return net(x) if len(seen) < 3 else net.third(x)


def _named_as_a_builtin(net: Net, x: Tensor) -> Tensor:
    return net.third(torch.relu(x)) if abs(4) > 0 else net.third(x)


abs: Any = math.sin  # noqa: A001 (that is what is tested)

PRESERVED: dict[str, Any] = {"memory_format": torch.preserve_format}

NOT_FOUND: dict[str, Callable[[Net, Tensor], Tensor]] = {
    "a global": _counts,
    "a list": _keeps,
    "an attribute": _sets,
    "an attribute that is set": _sets_by_name,
    "an attribute that stand-ins have": _sets_a_slot,
    "printing": _prints,
    "without a graph": _without_graph,
    "a hook": _hooked,
    "an error": _caught,
    "any error": _caught_bare,
    "the same object": _last_is_plain,
    "equal lists": _compares_lists,
    "equal modules": _compares_modules,
    "equal parts of lists": lambda net, x: (
        net.third(torch.relu(x)) if net.sizes[:1] == [4] else net.third(x)
    ),
    "a list that may be empty": _has_many,
    "in place, by another name": _after_in_place,
    "the kind of a shape": _matches_shape,
    "the kind of a list": _matches_list,
    "the kind of a number": _matches_class,
    "a generator": _generates,
    "an expression that generates": _expresses,
    "a function made on the way": _returns_a_function,
    "more and more samples": _grows,
    "times a number, in place": _scales_in_place,
    "no base": lambda net, x: net.third(torch.relu(x) if x._base is None else x),
    "no number": lambda net, x: net.third(x) + 1e39,
    "a default": _default,
    "a property": lambda net, x: net.head(x),
    "twice": lambda net, x: net.third(x) if net.third(x).relu_ else x,
    "detached": lambda net, x: net.second(net.first(x).detach() + 0 * net.first(x)),
    "several axes squeezed": lambda net, x: net.third(x).squeeze(),
    "a cast": lambda net, x: net.third(x.float().double()),
    "a cast with a layout": lambda net, x: net.third(x.double(**PRESERVED)),
    "another method": lambda net, x: net.third(x).softmax(1).cumsum(1),
    "a softmax over samples": lambda net, x: net.third(x).softmax(0),
    "a softmax in the middle": lambda net, x: net.third(F.softmax(net.third(x), 1)),
    "a softmax in another dtype": lambda net, x: F.softmax(
        net.third(x), 1, dtype=torch.float32
    ).double(),
    "a softmax before a function": lambda net, x: net.third(x).softmax(-1).tanh(),
    "a softmax with a number": lambda net, x: net.third(x).log_softmax(1) * 2,
    "a weight in front": lambda net, x: (net.third.weight @ x.mT).mT,
    "a layer that is not known": lambda net, x: net.third(net.unknown(x)),
    "another batch": lambda net, x: net.third(x.reshape(1, -1).reshape(5, -1)),
    "a flat batch": lambda net, x: net.third(torch.flatten(x).view(-1, 4)),
    "a class": lambda net, x: net.third(x) if x.__class__ is Tensor else x,
    "text": lambda net, x: net.third(x) if f"{x}" else x,
    "repeated text": lambda net, x: net.third(x) if repr(x) else x,
    "a number of another kind": lambda net, x: net.third(x * True),
    "a power of another kind": lambda net, x: net.third(x).sigmoid() ** 2.5,
    "no power": lambda net, x: net.third(x) ** 0,
    "over a number of another kind": lambda net, x: net.third(True / (x + 9)),
    "a remainder": lambda net, x: net.third(x) % 2,
    "every other output": lambda net, x: net.third(x)[:, ::2],
    "an output squeezed in the middle": lambda net, x: net.third(
        net.single(x).squeeze(-1)[:, None].repeat(1, 4)
    ),
    "a truth": lambda net, x: net.third(x) if net.third else x,
    "samples": lambda net, x: net.third(torch.stack([*iter(x)])),
    "a builtin that is another": _named_as_a_builtin,
    "no layer": lambda _, x: x.clone(),
    "a method that is no layer": lambda net, x: (
        net.third(x) if len(net.sizes) == 2 and net.sizes.count(4) else x
    ),
    "the module itself": lambda net, x: net.third(x) if net.forward.__self__ else x,
    "random": lambda net, x: net.third(F.dropout(x, 1.0)),
}


@pytest.mark.parametrize("name", NOT_FOUND)
def test_code_that_does_something_else(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    net, of = make(), NOT_FOUND[name]
    x = double(5, 4)
    state, inner = dict(vars(net), seen=[]), dict(vars(net.inner))
    count, default = COUNTS, list(_default.__defaults__[0])  # pyright: ignore (it has some)

    def fn(x: Tensor) -> Tensor:
        return of(net, x)

    assert chain(fn, x) is None
    assert (vars(net), vars(net.inner)) == (state, inner)
    assert (count, default) == (COUNTS, _default.__defaults__[0])  # pyright: ignore (the same)
    assert capsys.readouterr().out == ""
    if name != "a default":  # that one does something else each time
        require_same(fn, x)


def test_all_axes_squeezed_with_one_sample() -> None:
    net = make()
    assert chain(lambda x: net.single(x).squeeze(), double(2, 4)) is not None
    with pytest.raises(gradlib.NotPerSampleError):
        gradlib.per_sample_jacobian(lambda x: net.single(x).squeeze(), double(1, 4))


def test_attributes_that_hide_methods() -> None:
    net, x = make(), double(5, 4)
    vars(net)["encode"] = lambda x: net.first(x).tanh()
    assert chain(net, x) is not None
    require_same(net, x)


def test_a_batch_that_is_flattened_away() -> None:
    net = make()
    assert chain(lambda x: net.third(torch.flatten(x, 1)), double(5, 4)) is not None
    assert chain(lambda x: net.third(torch.flatten(x)), double(5, 4)) is None


def test_variables_of_an_outer_function() -> None:
    net, x, calls = make(), double(5, 4), 0

    def fn(x: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        return net(x)

    assert chain(fn, x) is None
    assert calls == 0
    gradlib.per_sample_jacobian(fn, x, check=False)
    assert calls == 1


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
            x = torch.tanh(layer(x))  # pyright: ignore (any)
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


class NoGraph(Net):
    """Autograd sees nothing of it."""

    @torch.no_grad()
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x)


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


def test_a_shape_that_does_not_fit_ends_it() -> None:
    half = nn.Linear(8, 4).double()

    def fn(x: Tensor) -> Tensor:
        while x.shape[1] > 2:
            x = torch.relu(half(x))
        return x

    with pytest.raises(RuntimeError, match="cannot be multiplied"):
        gradlib.per_sample_jacobian(fn, double(5, 8))


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


def test_a_bias_that_does_not_fit() -> None:
    for bias in (torch.zeros(4), torch.zeros(3).double(), torch.zeros(4, 1).double()):
        first = nn.Linear(4, 4).double()
        first.bias = nn.Parameter(bias)
        assert (
            chain(nn.Sequential(first, nn.Linear(4, 3).double()), double(5, 4)) is None
        )


def test_what_torch_refuses() -> None:
    net, x = make(), double(5, 4)
    fns: list[Function] = [
        lambda x: net.single(x).squeeze(True),
        lambda x: net.single(x)[:, 0.0],  # pyright: ignore (wrong)
        lambda x: net.third(cast(Any, torch).relu(x, True)),
        lambda x: net.third(F.dropout(x, 2.0, training=False)),
        lambda x: net.third(x.view(3, -1)),
        lambda x: net.second(x),
        lambda x: net.third(x, x),
        lambda x: net.third(x, input=x),
        lambda x: net.third(cast(Any, F).gelu(x, "tanh")),
        lambda x: net.third(cast(Any, F).hardtanh(x, -1, maximum=2)),
        lambda x: net.third(x) if x.size(0, 1) else x,  # pyright: ignore (wrong)
        lambda x: net.third(x.pow(n=2)),  # pyright: ignore (wrong)
        lambda x: net.third(x) + 2**70,
    ]
    for fn in fns:
        assert chain(fn, x) is None
        with pytest.raises(
            (RuntimeError, TypeError, ValueError, IndexError, OverflowError)
        ):
            fn(x)


def test_a_forward_without_a_graph_is_refused() -> None:
    net, x = NoGraph().double().eval(), double(5, 4)
    assert chain(net, x) is None
    with pytest.raises(gradlib.IndependentOutputError):
        gradlib.per_sample_jacobian(net, x)


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


def test_layers_of_a_list_are_those_of_their_names() -> None:
    layers, x = nn.ModuleList(), double(5, 4)
    for name in ("1", "0"):
        layers.add_module(name, nn.Linear(4, 4).double())

    def fn(x: Tensor) -> Tensor:
        return layers[-1](torch.tanh(layers[0](x)))  # pyright: ignore (any)

    assert chain(fn, x) is not None
    require_same(fn, x)


@pytest.mark.parametrize(
    ("first", "second"), [(2.0, 2), (2, 2.0), (True, 1), (1, True)]
)
def test_equal_numbers_of_other_kinds(first: Any, second: Any) -> None:
    net, x = make(), double(5, 4)
    for number in (first, second):
        found = [
            chain(lambda x, n=number: net.third(x) ** n, x),
            chain(lambda x, n=number: net.third(x * n), x),
        ]
        kind = type(number)
        assert [it is not None for it in found] == [kind is int, kind is not bool]


def test_what_is_overwritten_may_be_needed() -> None:
    net, x = make(), double(5, 4)
    for before in (nn.Tanh(), nn.ReLU(), nn.Sigmoid()):
        layers = nn.Sequential(net.third, before)
        model = nn.Sequential(layers, nn.ReLU(inplace=True))
        assert chain(model, x) is None
        assert chain(lambda x, it=layers: F.relu(it(x), inplace=True), x) is None
        with pytest.raises(gradlib.NoSuchWayError, match="inplace"):
            gradlib.per_sample_jacobian(model, x)
    assert chain(nn.Sequential(net.third, nn.ReLU(inplace=True)), x) is not None
    images = double(5, 2, 2)
    flat = nn.Sequential(nn.Tanh(), nn.Flatten(), nn.ReLU(inplace=True), net.third)
    assert chain(flat, images) is None
    for act in (nn.LeakyReLU(-0.3, inplace=True), nn.ELU(-1.0, inplace=True)):
        assert chain(nn.Sequential(net.third, act), x) is None


def test_the_sign_of_zero() -> None:
    net, x = make(), double(5, 4)
    for zero in (0.0, -0.0):
        require_same(lambda x, c=zero: net.third(torch.tanh(x)) * c, x)
        assert chain(lambda x, c=zero: net.third(x) / c, x) is None


def test_an_error_of_somebody_else_is_not_taken() -> None:
    class LateError(Exception):
        pass

    def late(*_: object) -> None:
        raise LateError

    def fn(x: Tensor) -> Tensor:
        for _ in range(10**9):
            pass
        return x

    before = signal.signal(signal.SIGALRM, late)
    signal.setitimer(signal.ITIMER_REAL, 0.05)
    try:
        with pytest.raises(LateError):
            layers_of(fn, double(5, 4))
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def test_what_has_many_parts_takes_no_time(monkeypatch: pytest.MonkeyPatch) -> None:
    listed = nn.ModuleList(nn.Linear(4, 4).double() for _ in range(200))
    many, x, asked = tuple(range(10**5)), double(2, 4), 0
    known = vars(stand_ins)["_known"]

    def counted(value: object) -> Any:
        nonlocal asked
        asked += 1
        return known(value)

    def fn(x: Tensor) -> Tensor:
        for i in range(len(listed)):
            x = listed[i](x)  # pyright: ignore (any)
        return x

    monkeypatch.setattr(stand_ins, "_known", counted)
    found = layers_of(fn, x)
    assert found == [*listed]
    assert asked < 2 * len(listed)
    asked = 0
    assert chain(lambda x: fn(x) if many else x, x) is None
    assert asked < 50


def test_monitored_code_is_not_run_on_stand_ins(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    net, x = make(), double(5, 4)
    tools: dict[int, str] = {}
    monitoring = SimpleNamespace(DEBUGGER_ID=0, get_tool=tools.get)
    monkeypatch.setattr(sys, "monitoring", monitoring, raising=False)
    assert chain(lambda x: net(x), x) is not None
    tools[0] = "a debugger"
    assert chain(lambda x: net(x), x) is None


def test_who_debugs_sees_no_stand_ins() -> None:
    net, x = make(), double(5, 4)
    seen: list[str] = []

    def trace(frame: FrameType, *_: object) -> Any:
        seen.append(type(frame.f_locals.get("x")).__name__)
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        found = chain(lambda x: net(x), x)
    finally:
        sys.settrace(before)
    assert found is None
    assert "StandIn" not in seen


ACTS = ("torch.relu(h)", "h.tanh()", "F.silu(h)", "net.act(h)", "helper(h)", "h")
ACTS += ("0.3 * h - 1", "torch.sin(h) / 3", "1 - h ** 2", "-h", "h * h")
ACTS += ("h * torch.sigmoid(h)", "h / (1 + h * h)", "1 / (2 + torch.sin(h))")
ODD = (
    "h = h.contiguous(memory_format=torch.contiguous_format)",
    "h = h.detach() + h",
    "net.calls += 1",
    "k = len(h)",
    "pass",
)


@pytest.mark.parametrize("seed", range(60))
def test_random_code(seed: int) -> None:
    chance = random.Random(seed)
    lines, names = ["h = x"], ["net.third", "net.layers[0]", "net.inner", "net"]
    names += ["net.plain[1]", "net.by_name['a']"]
    for _ in range(chance.randint(1, 4)):
        lines.append(f"h = {chance.choice(names)}(h)")
        lines.append(f"h = {chance.choice(ACTS)}")
        if chance.random() < 0.15:
            lines.append(chance.choice(ODD))
        if chance.random() < 0.2:
            lines.append(f"if net.slope > {chance.random()}: h = torch.sigmoid(h)")
        if chance.random() < 0.1:
            lines.append("g = net.third(h)")
    if chance.random() < 0.3:
        end = chance.choice(["torch.softmax(h, 1)", "F.log_softmax(h, dim=-1)"])
        lines.append(f"h = {end}")
    code = "\n    ".join(["def fn(x):", *lines, "return h"])
    net = make()
    scope = {"net": net, "torch": torch, "F": F, "helper": helper}
    exec(code, scope)
    fn, x = scope["fn"], double(3, 4)
    odd = any(line in code for line in (*ODD[:3], "g ="))
    assert (chain(fn, x) is None) == odd
    assert net.calls == 0
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
