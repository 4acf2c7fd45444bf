"""Small convolutions: plain products, and channels first in memory around them."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gradlib
from gradlib.jacobian.fast import layouts, plain_convolution, way_back
from gradlib.jacobian.fast.chains import convolutions, mapped, through_maps
from gradlib.jacobian.fast.chains.bends import Bend
from gradlib.jacobian.fast.chains.convolutions import convolution_of
from gradlib.jacobian.fast.layouts import channels_last
from gradlib.jacobian.fast.plain_convolution import plain_images, small_images

from .test_chain import require_same
from .test_joined import NETS, drawn
from .test_line import double

MANY = 2**30
LAYOUTS: dict[str, dict[str, int]] = {
    "all plain": dict.fromkeys(
        ("IMAGES", "CHANNELS", "PATCHES", "PRODUCTS", "APART"), MANY
    ),
    "some plain": {"CHANNELS": 2},
    "channels first, none plain": {"IMAGES": 0, "FEW": 0, "CHANNELS": MANY},
    "channels last, none plain": {"CHANNELS": 0, "FEW": 0},
}


@pytest.fixture(params=LAYOUTS)
def layout(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Which convolutions are plain products, and which channels are first."""
    for name, value in LAYOUTS[request.param].items():
        monkeypatch.setattr(plain_convolution, name, value)
    return request.param


@pytest.fixture
def called(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The plain kernels that were called."""
    names: list[str] = []

    class Noting:
        def __getattr__(self, name: str) -> Any:
            names.append(name)
            return getattr(torch.ops.aten, name)

    monkeypatch.setattr(plain_convolution, "aten", Noting())
    return names


IMAGES = [it for it in NETS if len(NETS[it][1]) == 3 and it != "as in the tutorials"]


@pytest.mark.usefixtures("layout")
@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("name", IMAGES)
def test_nets(name: str, rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    make, shape = NETS[name]
    model, x = drawn(make()), double(3, *shape)
    model = nn.Sequential(model, nn.Linear(model(x).shape[1], rows).double()).eval()
    whole = require_same(model, x)
    require_same(model, x.to(memory_format=torch.channels_last))
    monkeypatch.setattr("gradlib.jacobian.fast.chains.result.MAPS_IN_CACHE", 1)
    torch.testing.assert_close(require_same(model, x), whole)
    graphed = gradlib.per_sample_jacobian(model, x, create_graph=True)
    torch.testing.assert_close(graphed, whole)


OPTIONS: list[dict[str, Any]] = [
    {},
    {"stride": 2, "padding": 2},
    {"stride": (2, 3), "padding": (1, 0), "bias": False},
    {"kernel_size": (1, 4), "padding": (0, 3)},
    {"kernel_size": 5, "stride": 3, "padding": 4},
    {"dilation": 2},
    {"groups": 2},
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_options(options: dict[str, Any], layout: str, called: list[str]) -> None:
    chosen: dict[str, Any] = {"kernel_size": 3} | options
    convolution = nn.Conv2d(2, 4, **chosen)
    body = nn.Sequential(convolution, nn.Tanh(), nn.Flatten())
    features = body(torch.zeros(1, 2, 12, 13)).numel()
    model = body.append(nn.Linear(features, 1)).double()
    x = double(3, 2, 12, 13)
    require_same(model, x)
    is_plain = "plain" in layout.split(",")[0] and not {"dilation", "groups"} & {
        *options
    }
    is_plain = is_plain and x.is_cpu  # other devices have no such kernels
    forth_and_back = ["_slow_conv2d_forward", "_slow_conv2d_backward"]
    assert called[:2] == (forth_and_back if is_plain else [])


@pytest.mark.parametrize(
    ("ins", "images", "threads", "options", "is_plain"),
    [
        (1, 20, 1, {}, True),
        (3, 9, 1, {"stride": 2, "padding": 2}, True),
        (4, 20, 1, {}, False),  # of 16 outputs each tap goes back to too many
        (4, 20, 1, {"stride": (1, 2)}, True),  # the library is slower still
        (5, 20, 1, {"stride": 2}, False),
        (2, 20, 1, {"stride": 2, "groups": 2}, False),
        (2, 20, 1, {"stride": 2, "dilation": 2}, False),
        (1, 20, 1, {"dilation": 2}, False),
        (1, 400, 1, {}, False),  # too many
        (1, 400, 2, {}, True),
        (1, 400, 1, {"stride": 2}, True),
    ],
)
def test_back_to_few_channels(
    ins: int,
    images: int,
    threads: int,
    options: dict[str, Any],
    is_plain: bool,
    called: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    first = nn.Conv2d(ins, 16, 3, **options)
    model = nn.Sequential(first, nn.Tanh(), nn.Flatten())
    x = double(images, ins, 12, 12)
    model.append(nn.Linear(model(x.float()).shape[1], 1)).double()
    require_same(model, x)
    is_plain = is_plain and x.is_cpu  # other devices have no such kernels
    assert called[:1] == ["_slow_conv2d_backward"] * is_plain


@pytest.mark.parametrize(
    ("ins", "images", "size", "options", "are_apart"),
    [
        (6, 9, (12, 13), {}, True),
        (6, 9, (13, 12), {"groups": 2}, True),
        (6, 8, (12, 12), {}, False),
        (9, 9, (12, 12), {}, False),
        (6, 9, (12, 12), {"padding": 1}, False),
        (6, 9, (13, 13), {}, False),  # nothing is left over
    ],
)
def test_what_strides_leave_over(
    ins: int,
    images: int,
    size: tuple[int, int],
    options: dict[str, Any],
    are_apart: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    put_in: list[int] = []
    pad = nn.functional.pad

    def noting(*args: Any) -> Tensor:
        put_in.append(1)
        return pad(*args)

    monkeypatch.setattr(nn.functional, "pad", noting)
    first = nn.Conv2d(ins, 6, 3, stride=2, **options)
    body = nn.Sequential(first, nn.Tanh(), nn.Flatten())
    x = double(images, ins, *size)
    body.append(nn.Linear(body(x.float()).shape[1], 1)).double()
    require_same(body, x)
    assert bool(put_in) is (are_apart and x.is_cpu)


@pytest.mark.cpu  # other devices have no such kernels
def test_gradients_do_not_flow_through_plain_products(called: list[str]) -> None:
    model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.Flatten(), nn.Linear(200, 1))
    x = torch.randn(2, 1, 12, 12)
    gradlib.per_sample_jacobian(model, x, create_graph=True, check=False)
    assert not called
    gradlib.per_sample_jacobian(model, x, check=False)
    assert called


@pytest.mark.parametrize(
    ("make", "size", "images"),
    [
        (lambda: nn.Conv2d(1, 8, 3, padding=1), (1, 16, 16), 8),
        (lambda: nn.Conv2d(8, 8, 3, padding=1), (8, 16, 16), 2),
        (lambda: nn.Conv2d(8, 8, 3, padding=1, stride=2), (8, 16, 16), 8),
        (lambda: nn.Conv2d(8, 64, 3, padding=1), (8, 16, 16), 0),  # too much work
        (lambda: nn.Conv2d(9, 9, 3, padding=1), (9, 16, 16), 0),
        (lambda: nn.Conv2d(8, 8, 5, stride=3), (8, 12, 12), 5),  # 3 x 3, as 64
        (lambda: nn.Conv2d(2, 8, 3, groups=2), (2, 16, 16), 0),
        (lambda: nn.Conv2d(1, 8, 3, dilation=2), (1, 16, 16), 0),
    ],
)
def test_which_are_plain(
    make: Callable[[], nn.Conv2d], size: tuple[int, ...], images: int
) -> None:
    assert plain_images(convolution_of(make(), size)) == images


def test_forward_fewer_are_plain_with_strides() -> None:
    strided = convolution_of(nn.Conv2d(3, 8, 5, 2, padding=2), (3, 20, 20))
    dense = convolution_of(nn.Conv2d(3, 8, 5, padding=2), (3, 10, 10))
    assert plain_images(strided) == 5
    assert plain_images(strided, forth=True) == 2
    assert plain_images(dense, forth=True) == 5


def test_groups_and_dilation_may_be_small() -> None:
    grouped, apart = nn.Conv2d(8, 8, 3, 2, groups=2), nn.Conv2d(1, 8, 5, dilation=2)
    assert small_images(convolution_of(grouped, (8, 17, 17))) == 8
    assert small_images(convolution_of(apart, (1, 20, 20))) == 8


@pytest.mark.cpu  # elsewhere they are last, however few the images are
@pytest.mark.parametrize("rows", [1, 3])
def test_channels_stay_first_on_the_way(
    rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    are_first: list[bool] = []
    steps = through_maps._CHANNELS_FIRST.steps
    grouped = steps[nn.GroupNorm]

    def noting(module: nn.GroupNorm, x: Tensor) -> Any:
        are_first.append(x.is_contiguous())
        return grouped(module, x)

    monkeypatch.setitem(steps, nn.GroupNorm, noting)
    body = nn.Conv2d(2, 8, 3), nn.GroupNorm(2, 8), nn.ReLU(), nn.Conv2d(8, 8, 3)
    ending = nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, rows)
    model = nn.Sequential(*body, *ending).double()
    require_same(model, double(10, 2, 12, 12))
    assert are_first == [True]
    are_first.clear()
    monkeypatch.setattr(mapped, "FEW", 10 * 8 * 10 * 10 * rows - 1)  # one too many
    require_same(model, double(10, 2, 12, 12))
    assert not are_first


BACK: dict[str, tuple[tuple[int, int], dict[str, Any], str]] = {
    "few outputs": ((6, 8), {"padding": 1}, "turned"),
    "one output": ((20, 1), {}, "turned"),
    "padding as far as taps reach": ((6, 8), {"padding": 2}, "turned"),
    "taps on one axis": ((6, 8), {"kernel_size": (1, 4), "padding": (0, 3)}, "turned"),
    "gaps": ((6, 8), {"dilation": 2}, "turned"),
    "groups": ((6, 10), {"groups": 2}, "turned"),
    "single taps": ((6, 10), {"kernel_size": 1}, "turned"),
    "padding beyond that": ((6, 8), {"padding": (0, 3)}, "transposed"),
    "more outputs": ((6, 9), {}, "transposed"),
    "blocks that are fuller": ((24, 25), {}, "transposed"),
    "a single block": ((16, 17), {}, "transposed"),
    "half a block more": ((24, 24), {"padding": 1}, "transposed, channels last"),
    "hardly more blocks": ((17, 40), {}, "transposed, channels last"),
    "strides": ((24, 24), {"stride": 2}, "transposed, channels last"),
    "strides and groups": ((24, 24), {"stride": 2, "groups": 2}, "as torch does"),
}
"""Input and output channels, options, and how the library goes back."""


@pytest.mark.cpu  # elsewhere channels are last
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", BACK)
def test_back_where_channels_are_first(
    name: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    (ins, outs), options, way = BACK[name]
    for limit in ("IMAGES", "FEW", "LITTLE"):  # no plain products
        monkeypatch.setattr(plain_convolution, limit, 0)
    ways: list[str] = []

    def watch(file: Any, function: str, said: str) -> None:
        done = getattr(file, function)
        monkeypatch.setattr(
            file,
            function,
            lambda *them, **how: ways.append(said) or done(*them, **how),
        )

    watch(way_back, "_turned", "turned")
    watch(way_back, "_transposed", "transposed")
    watch(way_back, "_as_torch_does", "as torch does")
    for file in (layouts, way_back):
        watch(file, "channels_last", "channels last")
    chosen: dict[str, Any] = {"kernel_size": 3} | options
    module = nn.Conv2d(ins, outs, **chosen, dtype=dtype).requires_grad_(False)
    x = torch.randn(3, ins, 9, 12, dtype=dtype, requires_grad=True)
    with torch.no_grad():
        step, y = convolutions.convolved(module, x, last=False)
        torch.testing.assert_close(y, module(x))
        v = torch.randn(3, 2, *y.shape[1:], dtype=dtype)
        ways.clear()
        found, _ = step.pull(v, False)
    assert y.is_contiguous()
    assert found.is_contiguous()
    assert ", ".join(ways) == (way if dtype == torch.float32 else "as torch does")
    for i in range(2):
        (expected,) = torch.autograd.grad(module(x), x, v[:, i])
        torch.testing.assert_close(found[:, i], expected)


LAST: dict[str, tuple[tuple[int, int], dict[str, Any], str]] = {
    "one output": ((6, 1), {}, "turned"),
    "groups": ((6, 4), {"groups": 2}, "turned"),
    "single taps": ((6, 8), {"kernel_size": 1}, "turned"),
    "several outputs": ((6, 2), {}, "transposed"),
    "strides and one output": ((6, 1), {"stride": 2}, "transposed"),
}
"""The same where channels are last in memory."""


@pytest.mark.cpu  # a GPU always goes back by transposed convolutions
@pytest.mark.parametrize("name", LAST)
def test_back_where_channels_are_last(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (ins, outs), options, way = LAST[name]
    for limit in ("IMAGES", "FEW", "LITTLE"):  # no plain products
        monkeypatch.setattr(plain_convolution, limit, 0)
    ways: list[str] = []
    for function in ("_turned", "_transposed"):
        done = getattr(way_back, function)
        monkeypatch.setattr(
            way_back,
            function,
            lambda *them, done=done, said=function, **how: (
                ways.append(said[1:]) or done(*them, **how)
            ),
        )
    chosen: dict[str, Any] = {"kernel_size": 3} | options
    module = nn.Conv2d(ins, outs, **chosen).requires_grad_(False)
    x = torch.randn(3, ins, 9, 12, requires_grad=True)
    with torch.no_grad():
        step, y = convolutions.convolved(module, channels_last(x))
        v = torch.randn(3, 1, *y.shape[1:])
        found, _ = step.pull(v, False)
    assert found[:, 0].is_contiguous(memory_format=torch.channels_last)
    assert ways == [way]
    (expected,) = torch.autograd.grad(module(x), x, v[:, 0])
    torch.testing.assert_close(found[:, 0], expected)


@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors")
def test_no_rows_at_all() -> None:
    model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.Flatten(), nn.Linear(144, 0))
    x = torch.randn(3, 1, 8, 8)
    found = gradlib.per_sample_jacobian(model, x, check=False)
    assert found.shape == (3, 0, 1, 8, 8)


@pytest.mark.cpu  # a GPU's convolutions return them as they like
def test_channels_are_last_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    are_last: list[bool] = []
    pull = Bend.pull

    def noting(bend: Bend, v: Tensor, ours: bool) -> tuple[Tensor, bool]:
        both = v[0], bend.value  # the first vectors are the same for all samples
        last = torch.channels_last
        are_last.extend(it.is_contiguous(memory_format=last) for it in both)
        return pull(bend, v, ours)

    monkeypatch.setattr(Bend, "pull", noting)
    body = nn.Conv2d(2, 8, 3), nn.Tanh(), nn.Conv2d(8, 8, 3), nn.Tanh()
    model = nn.Sequential(*body, nn.Flatten(), nn.Linear(512, 3)).double()
    require_same(model, double(10, 2, 12, 12))
    assert are_last == [True] * 4
