"""Residual blocks and norms in chains: ways that part at a tensor and are added up."""

import random
from collections.abc import Callable
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import gradlib
from gradlib.jacobian.fast.chains import place, result
from gradlib.jacobian.fast.chains.assembled import found_on
from gradlib.jacobian.fast.chains.convolutions import convolution_of
from gradlib.jacobian.fast.chains.layers import Stage
from gradlib.jacobian.fast.plain_convolution import goes_by_shifts
from gradlib.random_state import seed_all

from .test_chain import chain, require_same
from .test_line import double, kept

Function = Callable[[Tensor], Tensor]


class Around(nn.Module):
    """A way through some layers, and one around them."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.layers = nn.Sequential(*layers)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.layers(x)


class Basic(nn.Module):
    """The block of a ResNet, as torchvision's has it."""

    def __init__(self, before: int, after: int, stride: int = 1) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(before, after, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(after)
        self.relu = nn.ReLU(inplace=True)
        self.conv2 = nn.Conv2d(after, after, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(after)
        self.downsample = None
        if stride != 1:
            self.downsample = nn.Sequential(
                nn.Conv2d(before, after, 1, stride, bias=False), nn.BatchNorm2d(after)
            )

    def forward(self, x: Tensor) -> Tensor:
        identity = x
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(out))
        if self.downsample is not None:
            identity = self.downsample(x)
        out += identity
        return self.relu(out)


class Tutorial(nn.Module):
    """A classifier of digits, as most have written it."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(1, 3, 3), nn.Conv2d(3, 4, 3)
        self.drop, self.fc = nn.Dropout(), nn.Linear(4 * 3 * 2, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = F.max_pool2d(F.relu(self.conv1(x)), 2)
        x = F.relu(self.drop(self.conv2(x)))
        x = torch.flatten(x, 1)
        return F.log_softmax(self.fc(x), dim=1)


class Averaging(nn.Module):
    """A net that takes its mean over all places by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.fc = nn.Conv2d(1, 4, 3), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        h = self.conv(x).tanh()
        return self.fc(h.mean((2, 3)))


class Mean(nn.Module):
    """A mean over all places, in code."""

    def forward(self, x: Tensor) -> Tensor:
        return x.mean(dim=(-1, -2), keepdim=True)


ENDING = nn.Flatten(), nn.Linear(4, 3)


def drawn(model: nn.Module) -> nn.Module:
    """Give a net weights and statistics that nobody begins with."""
    seed_all(1)
    for module in model.modules():
        for name, tensor in (*module.named_parameters(), *module.named_buffers()):
            if tensor.is_floating_point() and tensor.dim() == 1:
                low = 0.5 if name.endswith("var") else -1
                nn.init.uniform_(tensor, low, 2)
    return model.double().eval()


def classifier(*layers: nn.Module, channels: int = 4) -> nn.Module:
    """Return a net for images of one channel, that ends as most do."""
    ending = nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, 3)
    return nn.Sequential(nn.Conv2d(1, 4, 3), *layers, *ending)


NETS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "residual layers": (
        lambda: nn.Sequential(
            nn.Linear(6, 8),
            Around(nn.LayerNorm(8), nn.Linear(8, 5), nn.GELU(), nn.Linear(5, 8)),
            Around(nn.Linear(8, 8), nn.Tanh()),
            nn.LayerNorm(8, elementwise_affine=False),
            nn.Linear(8, 3),
            nn.SiLU(),
            nn.Linear(3, 2),
        ),
        (6,),
    ),
    "one entry": (
        lambda: nn.Sequential(Around(nn.Linear(6, 6), nn.Tanh()), nn.Linear(6, 1)),
        (6,),
    ),
    "one entry behind a norm": (
        lambda: nn.Sequential(nn.Linear(6, 8), nn.GroupNorm(2, 8), nn.Linear(8, 1)),
        (6,),
    ),
    "the sum comes last": (lambda: Around(nn.Linear(6, 6), nn.Tanh()), (6,)),
    "what is elementwise comes last": (
        lambda: nn.Sequential(Around(nn.Linear(6, 6)), nn.Tanh(), nn.ELU()),
        (6,),
    ),
    "a norm comes last": (
        lambda: nn.Sequential(nn.Linear(6, 4), nn.LayerNorm(4, bias=False)),
        (6,),
    ),
    "a softmax comes last": (
        lambda: nn.Sequential(Around(nn.Linear(6, 6), nn.Tanh()), nn.Softmax(1)),
        (6,),
    ),
    "nested": (
        lambda: nn.Sequential(
            Around(nn.Linear(6, 6), Around(nn.Tanh(), nn.Linear(6, 6)), nn.ELU()),
            nn.Linear(6, 3),
        ),
        (6,),
    ),
    "batch norm": (
        lambda: nn.Sequential(
            nn.Linear(6, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 3)
        ),
        (6,),
    ),
    "batch norm without parameters": (
        lambda: nn.Sequential(nn.BatchNorm1d(6, affine=False), nn.Linear(6, 3)),
        (6,),
    ),
    "group norm": (
        lambda: classifier(nn.GroupNorm(2, 4), nn.ReLU(), nn.GroupNorm(1, 4)),
        (1, 8, 7),
    ),
    "group norm without parameters": (
        lambda: classifier(nn.GroupNorm(4, 4, affine=False), nn.Sigmoid()),
        (1, 8, 7),
    ),
    "one entry behind norms without parameters": (
        lambda: nn.Sequential(
            classifier(nn.GroupNorm(2, 4, affine=False), nn.SiLU()), nn.Linear(3, 1)
        ),
        (1, 8, 7),
    ),
    "one entry behind norms of images": (
        lambda: nn.Sequential(
            nn.Conv2d(1, 4, 3),
            nn.GroupNorm(2, 4),
            Around(nn.Conv2d(4, 4, 3, padding=1), nn.GroupNorm(1, 4)),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            nn.Linear(4, 1),
        ),
        (1, 24, 25),
    ),
    "norms of rows": (
        lambda: nn.Sequential(nn.GroupNorm(2, 4), nn.Flatten(), nn.Linear(24, 2)),
        (4, 6),
    ),
    "a norm comes first": (
        lambda: nn.Sequential(nn.LayerNorm(6), nn.Linear(6, 3)),
        (6,),
    ),
    "ResNet": (
        lambda: classifier(
            nn.BatchNorm2d(4), nn.ReLU(True), Basic(4, 4), Basic(4, 6, 2), channels=6
        ),
        (1, 8, 7),
    ),
    "windows": (
        lambda: classifier(nn.ReLU(), nn.MaxPool2d(2), nn.Tanh(), nn.MaxPool2d(2, 1)),
        (1, 8, 9),
    ),
    "windows of another kind": (
        lambda: nn.Sequential(
            nn.MaxPool2d((3, 2), (2, 1), 1, (1, 2)), nn.Flatten(), nn.Linear(36, 2)
        ),
        (1, 8, 9),
    ),
    "means of windows": (
        lambda: classifier(nn.Tanh(), nn.AvgPool2d(2), nn.Tanh(), nn.AvgPool2d(2, 1)),
        (1, 8, 9),
    ),
    "means of windows of another kind": (
        lambda: nn.Sequential(
            nn.AvgPool2d((3, 2), (2, 1), 1, count_include_pad=False),
            Around(nn.Conv2d(1, 1, 1), nn.AvgPool2d(3, 1, 1)),
            *(nn.Flatten(), nn.Linear(40, 2)),
        ),
        (1, 8, 9),
    ),
    "means of parts": (
        lambda: nn.Sequential(
            *(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.AdaptiveAvgPool2d((2, 5))),
            *(nn.Tanh(), nn.Flatten(), nn.Linear(40, 3)),
        ),
        (1, 8, 7),
    ),
    "as in the tutorials": (lambda: Tutorial(), (1, 12, 11)),
    "a mean in code": (lambda: Averaging(), (1, 7, 6)),
    "means that stay maps": (
        lambda: nn.Sequential(
            nn.Conv2d(1, 4, 3), Around(Mean(), nn.Conv2d(4, 4, 1)), *ENDING
        ),
        (1, 3, 3),
    ),
    "flattened without a mean": (
        lambda: nn.Sequential(
            nn.Conv2d(1, 2, 3),
            Around(nn.Conv2d(2, 2, 3, padding=1), nn.GroupNorm(1, 2)),
            nn.Flatten(),
            nn.Linear(60, 4),
        ),
        (1, 8, 7),
    ),
}


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("name", NETS)
def test_nets_with_norms_and_ways_around(name: str, batch: int) -> None:
    make, shape = NETS[name]
    model, x = drawn(make()), double(batch, *shape)
    found = require_same(model, x)
    out = torch.empty_like(found)
    assert gradlib.per_sample_jacobian(model, x, out=out) is out
    # A GPU's convolutions and windows add up in another order each time.
    close = 0.0 if x.is_cpu else 1e-12
    size = float(found.abs().max())
    torch.testing.assert_close(out, found, rtol=close, atol=close * size)


@pytest.mark.parametrize("name", NETS)
def test_memory_in_any_order(name: str) -> None:
    make, shape = NETS[name]
    model, x = drawn(make()), double(6, *shape)
    orders = [
        x[::2],
        x[:1].expand(3, *shape),
        x.movedim(0, -1).contiguous().movedim(-1, 0),
        torch.cat([x, x], -1)[..., shape[-1] // 2 : -(shape[-1] - shape[-1] // 2)],
    ]
    if x.dim() == 4:
        orders.append(x.to(memory_format=torch.channels_last))
    for given in orders:
        assert given.shape[1:] == shape
        require_same(model, given)


FLAT = {"tiny": (1e-4, 10), "zero": (0, 100), "far away": (1, 1e4)}


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("name", FLAT)
@pytest.mark.parametrize("norm", [nn.LayerNorm(8), nn.GroupNorm(2, 8)], ids=repr)
def test_norms_of_flat_vectors(norm: nn.Module, name: str, rows: int) -> None:
    seed_all(0)
    model = nn.Sequential(norm, nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, rows)).float()
    spread, mean = FLAT[name]
    x = torch.randn(4, 8) * spread + mean
    require_as_exact(model, x)


BRIGHT = {"flat": (0, 255), "nearly flat": (2, 200), "far away": (1, 1e4)}


@pytest.mark.parametrize("name", BRIGHT)
@pytest.mark.parametrize("rows", [1, 3])
def test_norms_of_bright_images(name: str, rows: int) -> None:
    seed_all(0)
    ending = nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, rows)
    model = nn.Sequential(nn.GroupNorm(1, 3), nn.Conv2d(3, 8, 3), *ending)
    spread, mean = BRIGHT[name]
    x = torch.randn(2, 3, 16, 16) * spread + mean

    require_as_exact(model, x)


def require_as_exact(model: nn.Module, x: Tensor) -> None:
    """Hold a chain in float32, and the loop, against the loop in float64."""

    def off(jacobian: Tensor) -> float:
        return float((jacobian - truth).norm() / truth.norm())

    assert chain(model, x) is not None
    found, loop = (
        gradlib.per_sample_jacobian(model, x, mode=mode, check=False).double()
        for mode in ("auto", "loop")
    )
    precise = model.double(), x.double()
    truth = gradlib.per_sample_jacobian(*precise, mode="loop", check=False)
    assert off(found) <= max(1e-5, 3 * off(loop))


def test_convolutions_whose_channels_are_not_last(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("gradlib.jacobian.fast.layouts.WIDE", 1)
    for name in ("ResNet", "group norm", "flattened without a mean"):
        make, shape = NETS[name]
        require_same(drawn(make()), double(3, *shape))


def test_taps_are_multiplied_at_once_where_they_are_few() -> None:
    def goes(ins: int, outs: int, taps: int) -> bool:
        return goes_by_shifts(convolution_of(nn.Conv2d(ins, outs, taps), (ins, 9, 9)))

    assert goes(1, 16, 7)
    assert goes(3, 16, 3)
    assert goes(3, 64, 7)
    assert not goes(3, 16, 1)
    assert not goes(3, 16, 7)  # as many as that take more memory, and time
    assert not goes(4, 4, 3)
    assert not goes(16, 64, 3)


CUTTING = nn.Hardtanh(), nn.ReLU6(), nn.Hardswish(), nn.ReLU()


@pytest.mark.cpu  # a GPU's hardtanh ends them too
@pytest.mark.parametrize("layer", CUTTING, ids=repr)
def test_infinite_vectors_end_at_flat_places(layer: nn.Module) -> None:
    seed_all(0)
    model = nn.Sequential(nn.Linear(4, 4), layer, nn.Linear(4, 3), nn.Linear(3, 3))
    with torch.no_grad():
        for number in (2, 3):  # each is finite in float32, their product is not
            model.get_parameter(f"{number}.weight").mul_(1e20)
    x = torch.randn(3, 4) * 9
    assert chain(model, x) is not None
    found, loop = (
        gradlib.per_sample_jacobian(model, x, mode=mode, check=False)
        for mode in ("auto", "loop")
    )
    assert not loop.isfinite().all()
    assert torch.equal(found.isfinite(), loop.isfinite())


def test_weights_of_another_size_than_their_convolution_says() -> None:
    ending = nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 3)
    model = nn.Sequential(nn.Conv2d(1, 4, 3, padding=2), *ending).double()
    model[0].weight = nn.Parameter(double(4, 1, 5, 5))
    x = double(2, 1, 90, 90)
    assert chain(model, x) is None
    assert gradlib.per_sample_jacobian(model, x).shape == (2, 3, *x.shape[1:])


@pytest.mark.parametrize("name", NETS)
def test_some_samples_at_a_time(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = "gradlib.jacobian.fast.chains.result"
    make, shape = NETS[name]
    model, x = drawn(make()), double(5, *shape)
    whole = require_same(model, x)
    for limit in ("IN_CACHE", "MAPS_IN_CACHE"):
        monkeypatch.setattr(f"{folder}.{limit}", 1)
    torch.testing.assert_close(require_same(model, x), whole, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("name", NETS)
def test_gradients_flow_through_them(name: str) -> None:
    make, shape = NETS[name]
    model, x = drawn(make()), double(2, *shape).requires_grad_()
    weights = [it for it in model.parameters() if it.requires_grad]

    def gradients(mode: Any) -> tuple[Any, ...]:
        jacobian = gradlib.per_sample_jacobian(model, x, mode=mode, create_graph=True)
        loss = jacobian.sin().sum()
        return torch.autograd.grad(
            loss, [x, *weights], allow_unused=True, materialize_grads=True
        )

    assert chain(model, x, create_graph=True) is not None
    ours, theirs = gradients("auto"), gradients("loop")
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("name", NETS)
def test_nothing_is_changed(name: str) -> None:
    make, shape = NETS[name]
    model, x = drawn(make()), double(3, *shape)
    before = {name: it.clone() for name, it in model.state_dict().items()}
    given = x.clone()
    gradlib.per_sample_jacobian(model, x)
    assert torch.equal(x, given)
    for key, it in model.state_dict().items():
        assert torch.equal(it, before[key])


class Parts(nn.Module):
    """Layers for functions that use some of them."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)
        self.norm = nn.LayerNorm(4)
        self.into = nn.ReLU(inplace=True)
        self.wide = nn.Linear(4, 1)


SUMS: dict[str, Callable[[Parts, Tensor], Tensor]] = {
    "a tensor and itself": lambda net, x: net.a(x + x),
    "less what is given": lambda net, x: net.b(x - net.a(x).tanh()),
    "two ways": lambda net, x: net.a(x) + net.b(x).tanh(),
    "one layer twice": lambda net, x: net.a(x) + net.a(x).sigmoid(),
    "a sum of three": lambda net, x: x + net.a(x) + net.b(x),
    "a part of both ways": lambda net, x: (lambda h: h + net.b(h.tanh()))(net.a(x)),
    "numbers too": lambda net, x: 0.5 * x + 2 * net.a(x) - 1,
    "into the new one": lambda net, x: _added(net.a(x), x),
    "into what is not saved": lambda net, x: _added(net.norm(net.a(x)), x).relu(),
    "overwritten after it": lambda net, x: net.into(x + net.a(x)),
    "overwritten on one way": lambda net, x: x + net.b(net.into(net.a(x))),
    "what was flattened": lambda net, x: x + net.a(x.flatten(1)),
}


def _added(one: Tensor, other: Tensor) -> Tensor:
    one += other
    return one


PRODUCTS: dict[str, Callable[[Parts, Tensor], Tensor]] = {
    "a product": lambda net, x: net.a(x) * net.b(x),
    "the square": lambda net, x: net.a(x * x),
    "the cube": lambda _, x: x * x * x,
    "a gate": lambda net, x: net.b(torch.sigmoid(net.a(x)) * x),
    "a gate around": lambda net, x: x + F.silu(net.a(x)) * net.b(x),
    "a quotient": lambda net, x: net.a(x) / net.b(x),
    "a quotient of itself": lambda net, x: net.b(x / (1 + x.square())),
    "one over it": lambda net, x: 1 / (1 + (-net.a(x)).exp()),
    "nested": lambda net, x: (x.sin() * net.a(x) - x.cos()) * (x / x.exp()),
    "of a norm": lambda net, x: net.norm(x) * net.a(x),
    "overwritten after it": lambda net, x: net.into(x * net.a(x)),
    "overwritten before it": lambda net, x: x * net.into(net.a(x)),
    "summed up": lambda net, x: (x * net.a(x)).sum(1),
    "flattened": lambda net, x: x * net.a(x.flatten(1)),
}


def _highway(net: Parts, x: Tensor) -> Tensor:
    gate = torch.sigmoid(net.a(x))
    return gate * net.b(x).tanh() + (1 - gate) * x


def _cell(net: Parts, x: Tensor) -> Tensor:
    reset, update = torch.sigmoid(net.a(x)), torch.sigmoid(net.b(x))
    new = torch.tanh(net.norm(reset * x))
    return (1 - update) * new + update * x


def _deep(net: Parts, x: Tensor) -> Tensor:
    for _ in range(3):
        x = _highway(net, x) * x - x
    return net.a(x)


WOVEN: dict[str, Callable[[Parts, Tensor], Tensor]] = {
    "a part of it twice": lambda net, x: (lambda h: x + h + net.b(h))(net.a(x)),
    "of a product": lambda net, x: (lambda h: x * h * net.b(h))(net.a(x)),
    "its square too": lambda net, x: (lambda h: h * net.b(x) + h**2)(net.a(x).sin()),
    "over it too": lambda net, x: (lambda h: (h + x) / (1 + h**2))(net.a(x)),
    "a highway": _highway,
    "a cell": _cell,
    "one after the other": _deep,
    "on one way": lambda net, x: net.norm(x) + net.b(_highway(net, x)),
    "overwritten after it": lambda net, x: net.into(_highway(net, x)),
    "summed up": lambda net, x: (_highway(net, x) * x).sum(1),
    "to one entry": lambda net, x: net.wide(_cell(net, x)),
}


@pytest.mark.parametrize("name", WOVEN)
def test_ways_that_part_and_meet_again(name: str) -> None:
    net, x = drawn(Parts()), double(3, 4)
    fn: Any = _with_the_net(WOVEN[name], net)
    for batch in (x, x[:1], double(3000, 4), x.T.contiguous().T):
        with kept(batch, *net.parameters()):
            assert chain(fn, batch) is not None
            require_same(fn, batch)


@pytest.mark.parametrize("name", [*WOVEN, *PRODUCTS])
def test_a_few_samples_at_a_time(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(result, "IN_CACHE", 1)
    monkeypatch.setattr(result, "MAPS_IN_CACHE", 1)
    net: Any = drawn(Parts())
    fn: Any = _with_the_net((WOVEN | PRODUCTS)[name], net)
    require_same(fn, double(5, 4))


def test_many_ways_that_meet_are_put_together_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    net: Any = drawn(Parts())
    x, made = double(3, 4), list[Any]()

    def noted(*parts: Any) -> Stage:
        made.append(parts)
        return Stage(*parts)

    def fn(x: Tensor) -> Tensor:
        before, now = x, net.a(x)
        for _ in range(20):
            before, now = now, before + now.tanh()
        return now

    monkeypatch.setattr(place, "Stage", noted)
    assert found_on(fn, x) is not None
    assert len(made) == 1 + 20 * 2  # for each layer, and each sum
    require_same(cast(Any, fn), x)


def test_gradients_flow_where_ways_meet_again() -> None:
    net: Any = drawn(Parts())
    x = double(3, 4).requires_grad_()
    for of in (_highway, WOVEN["over it too"], WOVEN["to one entry"]):
        fn = _with_the_net(of, net)
        found: list[tuple[Tensor, ...]] = []
        for mode in ("auto", "loop"):
            made = gradlib.per_sample_jacobian(fn, x, mode=mode, create_graph=True)
            wanted: Any = x, net.a.weight
            found.append(torch.autograd.grad(made.sin().sum(), wanted))
        torch.testing.assert_close(*found)


def test_matrices_on_a_way_may_be_infinite() -> None:
    """Then the general way is asked."""
    matrix = torch.randn(4, 4, dtype=torch.float64)
    x = torch.randn(3, 4, dtype=torch.float64)

    def fn(x: Tensor) -> Tensor:
        return x + F.relu(x @ matrix)

    for entry in 0.5, torch.inf:
        matrix[1, 2] = entry
        found = chain(fn, x)
        assert any(torch.equal(it, matrix.T) for it in found.may_hide)
        truth = gradlib.per_sample_jacobian(fn, x, mode="loop", check=False)
        found = gradlib.per_sample_jacobian(fn, x)
        torch.testing.assert_close(found, truth, equal_nan=True)


def test_of_images_they_are_no_chain() -> None:
    conv = nn.Conv2d(1, 1, 3, padding=1).double()

    def fn(x: Tensor) -> Tensor:
        h = conv(x)
        return torch.flatten(x + h + conv(h), 1)

    given: Any = fn
    assert chain(given, double(2, 1, 5, 5)) is None
    reference = gradlib.per_sample_jacobian(fn, double(2, 1, 5, 5), mode="loop")
    assert reference.shape == (2, 25, 1, 5, 5)


def _multiplied(one: Tensor, other: Tensor) -> Tensor:
    one *= other
    return one


@pytest.mark.parametrize("name", PRODUCTS)
def test_products(name: str) -> None:
    net, x = drawn(Parts()), double(3, 4)
    fn = _with_the_net(PRODUCTS[name], net)
    for batch in (x, x[:1], x.T.contiguous().T, x.abs() + 1e-3):
        with kept(batch, *net.parameters()):
            assert chain(cast(Any, fn), batch) is not None
            require_same(cast(Any, fn), batch)


def test_gates_of_images() -> None:
    conv, gate = nn.Conv2d(1, 3, 3).double(), nn.Conv2d(1, 3, 3).double()
    last = nn.Linear(3 * 6 * 6, 2).double()

    def gated(x: Tensor) -> Tensor:
        return last(torch.flatten(conv(x) * torch.sigmoid(gate(x)), 1))

    fn: Any = gated
    for x in (double(2, 1, 8, 8), double(40, 1, 8, 8)):
        for given in (x, x.to(memory_format=torch.channels_last)):
            assert chain(fn, given) is not None
            require_same(fn, given)


def test_gradients_flow_through_gates() -> None:
    net: Any = drawn(Parts())
    x = double(3, 4).requires_grad_()
    of = PRODUCTS["nested"], PRODUCTS["a quotient"], PRODUCTS["a gate around"]
    for fn in (_with_the_net(it, net) for it in of):
        found: list[tuple[Tensor, ...]] = []
        for mode in ("auto", "loop"):
            made = gradlib.per_sample_jacobian(fn, x, mode=mode, create_graph=True)
            wanted: Any = x, net.a.weight, net.a.bias
            found.append(torch.autograd.grad(made.sin().sum(), wanted))
        torch.testing.assert_close(*found)


@pytest.mark.parametrize("name", SUMS)
def test_sums(name: str) -> None:
    net, x = drawn(Parts()), double(3, 4)

    def fn(x: Tensor) -> Tensor:
        return SUMS[name](net, x)  # type: ignore[arg-type] (it is one)

    made: Any = _with_the_net(SUMS[name], net)
    assert chain(made, x) is not None
    found = gradlib.per_sample_jacobian(made, x)
    torch.testing.assert_close(
        found, gradlib.per_sample_jacobian(fn, x, mode="loop"), rtol=1e-12, atol=1e-12
    )


def _with_the_net(function: Any, net: nn.Module) -> Function:
    return lambda x: function(net, x)


def _softened(net: Parts, x: Tensor) -> Tensor:
    h = net.a(x)
    g = h.tanh()
    return (h + g) * h.softmax(1) + g


NO_CHAINS: dict[str, Callable[[Parts, Tensor], Tensor]] = {
    "overwritten for both ways": lambda net, x: x + net.into(x),
    "overwritten, and not used": lambda net, x: (net.into(net.b(x)), net.a(x))[1],
    "overwritten, then used": lambda net, x: (
        lambda h: (net.into(h), net.a(x) + h.flatten(1))[1]
    )(net.b(x)),
    "into what both go on from": lambda net, x: _added(x * 1, net.a(x)),
    "into the other way": lambda net, x: (lambda h: _added(h, net.a(h)))(net.b(x)),
    "a part of it twice, in place": lambda net, x: (
        lambda h: x + h + net.into(net.b(h))
    )(net.a(x)),
    "a part of it twice, and into it": lambda net, x: (
        lambda h: _added(x + h, net.b(h))
    )(net.a(x)),
    "of other shapes": lambda net, x: net.a(x) + net.wide(x),
    "another tensor": lambda net, x: net.a(x) + net.b.bias,
    "times what is broadcast": lambda net, x: net.a(x) * net.a(x).sum(1, True),
    "a product in place": lambda net, x: _multiplied(net.a(x), net.b(x)),
    "a softmax on a way": _softened,
}


@pytest.mark.parametrize("name", NO_CHAINS)
def test_what_is_no_chain(name: str) -> None:
    net, x = drawn(Parts()), double(3, 4)
    fn = _with_the_net(NO_CHAINS[name], net.requires_grad_(False))
    if name != "into what both go on from":  # there x * 1 is a tensor of its own
        assert chain(fn, x) is None
    found = gradlib.per_sample_jacobian(fn, x)
    reference = gradlib.per_sample_jacobian(fn, x, mode="loop")
    torch.testing.assert_close(found, reference, rtol=1e-12, atol=1e-12)


POOL: Any = nn.AdaptiveAvgPool2d


class InCode(nn.Module):
    """Does to what a convolution gives what torch refuses."""

    def __init__(self, function: Callable[[Any], Any], width: int) -> None:
        super().__init__()
        self.conv, self.fc = nn.Conv2d(1, 4, 3), nn.Linear(width, 3)
        self.function = [function]

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.function[0](self.conv(x)))


REFUSED: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "flattened with its batch": (
        lambda: nn.Sequential(nn.Flatten(0), nn.LayerNorm(4), nn.Linear(4, 2)),
        (4,),
    ),
    "flattened from nowhere": (
        lambda: nn.Sequential(nn.Flatten(3), nn.LayerNorm(4), nn.Linear(4, 2)),
        (4,),
    ),
    "a size that is no integer": (
        lambda: InCode(lambda h: h.view(len(h), h.shape[1] * h.shape[2] ** 2 / 1), 64),
        (1, 6, 6),
    ),
    "means over axes that are not there": (
        lambda: InCode(lambda h: h.mean((6, 7)), 4),
        (1, 6, 6),
    ),
    "a size of windows that is no integer": (
        lambda: nn.Sequential(POOL(1.0), nn.Flatten(), nn.Linear(1, 3)),
        (1, 6, 6),
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_torch_cannot_read_is_no_chain(name: str) -> None:
    make, shape = REFUSED[name]
    model, x = make().double(), double(3, *shape)
    assert chain(model, x) is None
    with pytest.raises((RuntimeError, IndexError, TypeError)):
        gradlib.per_sample_jacobian(model, x)


LAYERS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "batch norm in training": (lambda: nn.BatchNorm1d(4).train(), (4,)),
    "batch norm without statistics": (
        lambda: nn.BatchNorm1d(4, track_running_stats=False),
        (4,),
    ),
    "batch norm of rows": (lambda: nn.Sequential(nn.BatchNorm1d(4)), (4, 1)),
    "instance norm": (lambda: nn.InstanceNorm2d(4), (4, 3, 3)),
    "a layer norm of images": (lambda: nn.LayerNorm([4, 3, 3]), (4, 3, 3)),
    "windows rounded up": (lambda: nn.MaxPool2d(2, ceil_mode=True), (4, 3, 5)),
    "means rounded up": (lambda: nn.AvgPool2d(2, ceil_mode=True), (4, 3, 5)),
    "means of parts of several sizes": (lambda: POOL((1, 2)), (4, 3, 5)),
    "a subclass": (lambda: type("Norm", (nn.LayerNorm,), {})(4), (4,)),
}


@pytest.mark.parametrize("name", LAYERS)
def test_layers_that_are_not_known(name: str) -> None:
    make, shape = LAYERS[name]
    training, layer = "training" in name, make().double()
    model = nn.Sequential(layer, nn.Flatten(), nn.LazyLinear(2).double())
    x = double(3, *shape)
    model(x)
    model.train(training)
    assert chain(model, x) is None
    found = gradlib.per_sample_jacobian(model, x, check=False)
    reference = gradlib.per_sample_jacobian(model, x, mode="loop", check=False)
    torch.testing.assert_close(found, reference, rtol=1e-12, atol=1e-12)


def test_what_torch_refuses_is_refused() -> None:
    net, x = drawn(Parts()), double(3, 4)
    overwritten = _with_the_net(lambda net, x: _added(net.a(x).tanh(), x), net)
    with pytest.raises(gradlib.NoSuchWayError, match="inplace"):
        gradlib.per_sample_jacobian(overwritten, x, mode="loop")
    assert chain(overwritten, x) is None
    with pytest.raises(gradlib.NoSuchWayError, match="inplace"):
        gradlib.per_sample_jacobian(overwritten, x)
    single = nn.Sequential(nn.Linear(4, 4), nn.GroupNorm(4, 4), nn.Linear(4, 2))
    assert chain(single.double(), x[:1]) is None
    with pytest.raises(ValueError, match="more than 1 value per channel"):
        gradlib.per_sample_jacobian(single, x[:1])
    other = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(3)).double()
    assert chain(other, x) is None
    with pytest.raises(RuntimeError, match="normalized_shape"):
        gradlib.per_sample_jacobian(other, x)


def test_fewer_vectors_from_the_middle_are_taken() -> None:
    narrow = drawn(nn.Sequential(nn.Linear(30, 2), nn.LayerNorm(2), nn.Linear(2, 30)))
    assert chain(narrow, double(3, 30)) is None
    wide = drawn(nn.Sequential(Around(nn.Linear(2, 2)), nn.Linear(2, 30)))
    assert chain(wide, double(3, 2)) is None
    images = nn.Sequential(
        nn.Conv2d(1, 2, 3), nn.Flatten(), nn.Linear(72, 2), nn.Linear(2, 50)
    )
    assert chain(drawn(images), double(3, 1, 8, 8)) is None


def test_statistics_share_no_memory_with_a_result() -> None:
    model, x = drawn(nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 1))), double(1, 4)
    out = model.get_buffer("0.running_mean").view(1, 1, 4)
    assert chain(model, x) is not None
    assert chain(model, x, out=out) is None


# Programs by chance, which torch may refuse.


def program(chance: random.Random) -> Callable[[Parts, Tensor], Tensor]:
    """Return a function that does a few things one after the other."""
    steps = [
        (chance.choice(_DONE), chance.random(), chance.random())
        for _ in range(chance.randint(1, 6))
    ]

    def run(net: Parts, x: Tensor) -> Tensor:
        tensors = [x]
        for done, one, other in steps:
            first = tensors[int(one * len(tensors))]
            tensors.append(done(net, first, tensors[int(other * len(tensors))]))
        return tensors[-1]

    return run


_DONE: list[Callable[[Parts, Tensor, Tensor], Tensor]] = [
    lambda net, a, _: net.a(a),
    lambda net, a, _: net.b(a),
    lambda net, a, _: net.norm(a),
    lambda net, a, _: net.into(a),
    lambda _, a, __: a.tanh(),
    lambda _, a, __: F.gelu(a),
    lambda _, a, __: 2 * a,
    lambda _, a, __: a.flatten(1),
    lambda _, a, __: a.view(len(a), -1),
    lambda _, a, b: a + b,
    lambda _, a, b: b + a,
    lambda _, a, b: a - b,
    lambda _, a, b: _added(a, b),
]


@pytest.mark.parametrize("seed", range(40))
def test_programs_by_chance(seed: int) -> None:
    net, x = drawn(Parts()), double(2, 4)
    for number in range(10):
        fn = _with_the_net(program(random.Random(10 * seed + number)), net)
        require_right(fn, x)


def require_right(fn: Function, x: Tensor) -> bool:
    """Hold a chain, if there is one, against a loop; and tell whether there is one."""
    given = x.clone()
    found = chain(fn, x)
    assert torch.equal(x, given)
    if found is None:
        return False
    ours = gradlib.per_sample_jacobian(fn, x)
    reference = gradlib.per_sample_jacobian(fn, x, mode="loop", check=False)
    torch.testing.assert_close(ours, reference, rtol=1e-10, atol=1e-10)
    return True
