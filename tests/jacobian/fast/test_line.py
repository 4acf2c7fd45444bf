"""Layers that code names: found by running it on stand-ins, which can do no harm."""

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.functional import gelu

import gradlib
from gradlib.random_state import seed_all

from .lines import Net, double, make, require_same
from .test_chain import chain

Function = Callable[[Tensor], Tensor]


@contextmanager
def kept(*tensors: Tensor) -> Iterator[None]:
    """Require that nobody writes to tensors meanwhile."""
    before = [it.detach().clone() for it in tensors]
    yield
    assert all(map(torch.equal, tensors, before))


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
    seed_all(0)
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
    seed_all(0)
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
    seed_all(0)
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


def test_layers_of_a_list_are_those_of_their_names() -> None:
    layers, x = nn.ModuleList(), double(5, 4)
    for name in ("1", "0"):
        layers.add_module(name, nn.Linear(4, 4).double())

    def fn(x: Tensor) -> Tensor:
        return layers[-1](torch.tanh(layers[0](x)))

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
