"""Pools in chains: means of windows, and the largest of each, whoever calls them."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.functional import adaptive_avg_pool2d, avg_pool2d, max_pool2d
from torch.profiler import ProfilerActivity, profile

import gradlib
from gradlib.jacobian.fast.chains import mapped, through_maps
from gradlib.jacobian.fast.chains.shapes import shape_after
from gradlib.random_state import seed_all

from .test_chain import chain, require_same
from .test_line import double
from .test_recalled import learn, recalls

Function = Callable[[Tensor], Tensor]

MEANS: dict[str, Callable[[], nn.Module]] = {
    "apart": lambda: nn.AvgPool2d(2),
    "each axis": lambda: nn.AvgPool2d((3, 2)),
    "overlapping": lambda: nn.AvgPool2d(3, 1),
    "overlapping on one axis": lambda: nn.AvgPool2d(2, (1, 2)),
    "with gaps": lambda: nn.AvgPool2d(2, 3),
    "padded": lambda: nn.AvgPool2d(3, 2, 1),
    "padded, not counted": lambda: nn.AvgPool2d(3, 2, 1, count_include_pad=False),
    "padded on one axis": lambda: nn.AvgPool2d(
        (3, 4), (1, 3), (0, 2), count_include_pad=False
    ),
    "with a remainder": lambda: nn.AvgPool2d(5, 4),
    "single places": lambda: nn.AvgPool2d(1),
    "single places with gaps": lambda: nn.AvgPool2d(1, 2),
    "all places": lambda: nn.AvgPool2d((6, 9)),
    "all places, and an edge": lambda: nn.AvgPool2d((6, 9), 9, (0, 1)),
    "parts": lambda: nn.AdaptiveAvgPool2d((2, 3)),
    "parts of one axis": lambda: nn.AdaptiveAvgPool2d((1, 9)),
    "as many parts": lambda: nn.AdaptiveAvgPool2d((6, 9)),
    "one part": lambda: nn.AdaptiveAvgPool2d((1, 1)),
    "three parts": lambda: nn.AdaptiveAvgPool2d(3),
    "a subclass": lambda: type("Mine", (nn.AvgPool2d,), {})(2),
}


def ended(*layers: nn.Module, channels: int = 2, rows: int = 3) -> nn.Sequential:
    """Return a net for images of 6 x 9 places, that ends with rows."""
    seed_all(0)
    body = nn.Sequential(*layers, nn.Flatten())
    width = body(torch.zeros(1, channels, 6, 9)).shape[1]
    return body.append(nn.Linear(width, rows)).double()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("channels", [1, 2])
@pytest.mark.parametrize("name", MEANS)
def test_means(name: str, channels: int, dtype: torch.dtype) -> None:
    first, last = (
        ended(*before, MEANS[name](), *after, channels=channels).to(dtype)
        for before, after in (
            ([], [nn.Tanh()]),
            ([nn.Conv2d(channels, channels, 1), nn.Tanh()], []),
        )
    )
    x = torch.randn(3, channels, 6, 9, dtype=dtype)
    layouts = x, x.to(memory_format=torch.channels_last), x.mT.contiguous().mT
    for model in (first, last):
        assert gradlib.plan_jacobian(model, x).mode == "chain"
        for given in layouts:
            found = require_same(model, given)
            out = torch.full_like(found, torch.nan)
            gradlib.per_sample_jacobian(model, given, out=out)
            torch.testing.assert_close(out, found)


@pytest.mark.parametrize("name", MEANS)
def test_second_derivatives(name: str) -> None:
    model = ended(nn.Conv2d(2, 2, 1), nn.Tanh(), MEANS[name](), nn.Tanh())
    x = double(2, 2, 6, 9).requires_grad_()
    places = [x, *[*model.parameters()][:-1]]  # the last bias moves no slope

    def twice(mode: Any) -> tuple[Tensor, ...]:
        jacobian = gradlib.per_sample_jacobian(model, x, mode=mode, create_graph=True)
        loss = jacobian.sin().sum()
        once = torch.autograd.grad(loss, places, create_graph=True)
        loss = torch.stack([it.square().sum() for it in once]).sum()
        return *once, *torch.autograd.grad(loss, places)

    assert chain(model, x, create_graph=True) is not None
    for ours, theirs in zip(twice("auto"), twice("loop"), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("contiguous", [torch.contiguous_format, torch.channels_last])
def test_vectors_in_any_order(contiguous: torch.memory_format) -> None:
    x = double(2, 4, 6, 8).contiguous(memory_format=contiguous)
    step, y = through_maps._CHANNELS_LAST.steps[nn.AvgPool2d](nn.AvgPool2d(2), x)
    v = double(2, 3, *y.shape[1:])
    every = [
        v,
        v.movedim(2, -1).contiguous().movedim(-1, 2),
        v.transpose(0, 1).contiguous().transpose(0, 1),
        v.mT.contiguous().mT,
        v[:1].expand_as(v),
        torch.cat([v, v], -1)[..., : v.shape[-1]],
    ]
    for it in every:
        before = it.clone()
        found, ours = step.pull(it, False)
        assert ours
        assert torch.equal(it, before)
        wide = it.repeat_interleave(2, 3).repeat_interleave(2, 4) / 4
        torch.testing.assert_close(found, wide)


IN_CODE: dict[str, Function] = {
    "a function": lambda x: F.avg_pool2d(x, 2),
    "by position": lambda x: F.avg_pool2d(x, (3, 2), 2, (1, 0), False, False),
    "by name": lambda x: F.avg_pool2d(
        x, kernel_size=3, padding=1, count_include_pad=False
    ),
    "another name": lambda x: avg_pool2d(x, 2, stride=1),
    "of another space": lambda x: nn.functional.avg_pool2d(x, 2),
    "as large as it is": lambda x: F.avg_pool2d(x, x.shape[2:]),
    "parts": lambda x: F.adaptive_avg_pool2d(x, (2, 3)),
    "parts by name": lambda x: F.adaptive_avg_pool2d(x, output_size=3),
    "parts by another name": lambda x: adaptive_avg_pool2d(x, (6, 1)),
}


@pytest.mark.parametrize("name", IN_CODE)
def test_means_in_code(name: str) -> None:
    of, x = IN_CODE[name], double(3, 2, 6, 9)
    last = nn.Linear(of(x)[0].numel(), 3).double()

    def fn(x: Tensor) -> Tensor:
        return last(torch.flatten(of(torch.tanh(x)), 1))

    assert gradlib.plan_jacobian(fn, x).mode == "chain"
    learn(fn, x)
    assert recalls(fn, x)
    found = gradlib.per_sample_jacobian(fn, x)
    loop = gradlib.per_sample_jacobian(fn, x, mode="loop")
    torch.testing.assert_close(found, loop, rtol=1e-12, atol=1e-12)


POOL: Any = nn.AvgPool2d
PARTS: Any = nn.AdaptiveAvgPool2d

NOT_KNOWN: dict[str, Callable[[], nn.Module]] = {
    "rounded up": lambda: POOL(2, ceil_mode=True),
    "another divisor": lambda: POOL(2, divisor_override=3),
    "a list": lambda: POOL([2, 3]),
    "a list of strides": lambda: POOL(2, [2, 1]),
    "a list of edges": lambda: POOL(2, padding=[1, 0]),
    "one for both axes": lambda: POOL((2,)),
    "parts of several sizes": lambda: PARTS((2, 2)),
    "more parts than places": lambda: PARTS((12, 9)),
    "as many as there are": lambda: PARTS((None, 3)),
    "a list of parts": lambda: PARTS([2, 3]),
}


@pytest.mark.parametrize("name", NOT_KNOWN)
def test_means_that_are_not_known(name: str) -> None:
    model, x = ended(nn.Tanh(), NOT_KNOWN[name](), rows=1), double(3, 2, 6, 9)
    assert chain(model, x) is None
    assert gradlib.plan_jacobian(model, x).mode != "chain"
    found = gradlib.per_sample_jacobian(model, x)
    loop = gradlib.per_sample_jacobian(model, x, mode="loop")
    torch.testing.assert_close(found, loop, rtol=1e-12, atol=1e-12)


REFUSED: dict[str, Callable[[], nn.Module]] = {
    "a float": lambda: POOL(2.0),
    "a bool": lambda: POOL(True),
    "floats": lambda: POOL((2.0, 2)),
    "a stride that is a bool": lambda: POOL(2, True),
    "an edge that is a float": lambda: POOL(2, padding=1.0),
    "no size": lambda: POOL(0, 1),
    "no stride": lambda: POOL(2, 0),
    "strides back": lambda: POOL((6, 9), -1),
    "an edge inside": lambda: POOL(2, 1, -1),
    "an edge too wide": lambda: POOL(3, 1, 2),
    "larger than all": lambda: POOL(7),
    "three axes": lambda: POOL((2, 2, 2)),
    "a number for a bool": lambda: POOL(2, count_include_pad=1),
    "another number for a bool": lambda: POOL(2, ceil_mode=0),
    "a divisor of zero": lambda: POOL(2, divisor_override=0),
    "parts that are a float": lambda: PARTS(3.0),
    "parts that are a bool": lambda: PARTS(True),
    "bools": lambda: PARTS((True, 3)),
    "three parts": lambda: PARTS((1, 2, 3)),
    "parts below zero": lambda: PARTS(-1),
    "the largest of no size": lambda: nn.MaxPool2d(0, 1),
    "the largest, and strides back": lambda: nn.MaxPool2d((6, 9), -1),
}


@pytest.mark.parametrize("name", REFUSED)
def test_means_that_torch_refuses(name: str) -> None:
    pool, x = REFUSED[name](), double(3, 2, 6, 9)
    model = nn.Sequential(pool, nn.Flatten(), nn.Linear(2, 3)).double()
    assert shape_after([pool], x.shape) is None
    assert chain(model, x) is None
    with pytest.raises((RuntimeError, TypeError)):
        gradlib.per_sample_jacobian(model, x)


def test_images_without_channels_are_not_known() -> None:
    model = nn.Sequential(nn.AvgPool2d(2), nn.Flatten(), nn.Linear(4, 2)).double()
    x = double(3, 4, 4)
    assert chain(model, x) is None
    for pool in (nn.AvgPool2d(2), nn.AdaptiveAvgPool2d(2), nn.MaxPool2d(2)):
        assert shape_after([pool], x.shape) is None
    found = gradlib.per_sample_jacobian(model, x)
    loop = gradlib.per_sample_jacobian(model, x, mode="loop")
    torch.testing.assert_close(found, loop, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("pool", [F.avg_pool2d, F.max_pool2d, F.adaptive_avg_pool2d])
@pytest.mark.parametrize("first", [(3, 1), (3.0, 1), (3, True)])
def test_equal_pairs_of_other_kinds(first: Any, pool: Any) -> None:
    x, last = double(2, 1, 9, 1), nn.Linear(3, 2).double()
    for pair in (first, (3, 1), (3, True), (3.0, 1.0)):
        found = chain(lambda x, of=pair: last(torch.flatten(pool(x, of), 1)), x)
        assert (found is not None) is ({*map(type, pair)} == {int})


CHANGES: dict[str, Callable[[Any], None]] = {
    "size": lambda pool: setattr(pool, "kernel_size", 2),
    "size of another kind": lambda pool: setattr(pool, "kernel_size", 3.0),
    "stride": lambda pool: setattr(pool, "stride", 1),
    "no stride": lambda pool: setattr(pool, "stride", None),
    "edges": lambda pool: setattr(pool, "padding", 0),
    "rounding": lambda pool: setattr(pool, "ceil_mode", True),
    "what counts": lambda pool: setattr(pool, "count_include_pad", False),
    "divisor": lambda pool: setattr(pool, "divisor_override", 5),
    "forward": lambda pool: vars(pool).update(forward=lambda x: 2 * x),
    "class": lambda pool: setattr(pool, "__class__", type("It", (nn.AvgPool2d,), {})),
    "a hook": lambda pool: pool.register_forward_hook(lambda _m, _x, y: 2 * y),
}


@pytest.mark.parametrize("in_code", [False, True])
@pytest.mark.parametrize("name", CHANGES)
def test_options_that_change(name: str, in_code: bool) -> None:
    pool = nn.AvgPool2d(3, 2, 1)
    model = ended(pool, nn.Tanh(), nn.AdaptiveAvgPool2d(1))
    x = double(3, 2, 6, 9)
    fn: Any = (lambda x: model(x)) if in_code else model
    learn(fn, x)
    assert recalls(fn, x)
    CHANGES[name](pool)
    assert not recalls(fn, x)
    for _ in range(2):  # the second time it may be recalled in its new form
        if "kind" in name:
            with pytest.raises(TypeError):
                gradlib.per_sample_jacobian(fn, x)
            continue
        found = gradlib.per_sample_jacobian(fn, x)
        loop = gradlib.per_sample_jacobian(fn, x, mode="loop")
        torch.testing.assert_close(found, loop, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    ("space", "name", "layer"),
    [
        (F, "avg_pool2d", lambda: nn.AvgPool2d(2)),
        (nn.AvgPool2d, "forward", lambda: nn.AvgPool2d(2)),
        (F, "adaptive_avg_pool2d", lambda: nn.AdaptiveAvgPool2d(3)),
        (nn.AdaptiveAvgPool2d, "forward", lambda: nn.AdaptiveAvgPool2d(3)),
    ],
)
@pytest.mark.parametrize("in_code", [False, True])
def test_what_somebody_has_replaced(
    space: Any, name: str, layer: Any, in_code: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, x = ended(nn.Tanh(), layer()), double(3, 2, 6, 9)
    last = model[-1]
    args = [2] if name == "avg_pool2d" else [3]

    def fn(x: Tensor) -> Tensor:
        return last(torch.flatten(getattr(F, name)(x, *args), 1))

    used = fn if in_code and space is F else (lambda x: model(x)) if in_code else model
    learn(used, x)
    assert recalls(used, x)
    were = getattr(space, name)
    monkeypatch.setattr(space, name, lambda *args: 2 * were(*args))
    assert not recalls(used, x)
    assert chain(used, x) is None
    found = gradlib.per_sample_jacobian(used, x)
    loop = gradlib.per_sample_jacobian(used, x, mode="loop")
    torch.testing.assert_close(found, loop, rtol=1e-12, atol=1e-12)


def _none(*_: object, **__: object) -> Tensor:
    raise AssertionError("code that does not use it called it")


@pytest.mark.parametrize(
    ("fn", "names"),
    [
        (lambda x: avg_pool2d(x, 2), ["avg_pool2d"]),
        (
            lambda x: adaptive_avg_pool2d(x, 3),
            ["adaptive_avg_pool2d", "avg_pool2d"],
        ),
        (nn.AdaptiveAvgPool2d(3), ["avg_pool2d"]),
        (lambda x: max_pool2d(x, 2), ["max_pool2d"]),
    ],
)
def test_what_is_replaced_and_not_used(
    fn: Function, names: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    x = double(3, 2, 6, 9)
    last = nn.Linear(fn(x)[0].numel(), 3).double()

    def whole(x: Tensor) -> Tensor:
        return last(torch.flatten(fn(x), 1))

    loop = gradlib.per_sample_jacobian(whole, x, mode="loop")
    for name in names:
        monkeypatch.setattr(F, name, _none)
    assert chain(whole, x) is not None
    found = gradlib.per_sample_jacobian(whole, x, check=False)
    torch.testing.assert_close(found, loop, rtol=1e-12, atol=1e-12)


@pytest.mark.cpu  # whose memory is counted
def test_no_memory_but_that_of_the_result() -> None:
    step, y = through_maps._CHANNELS_LAST.steps[nn.AvgPool2d](
        nn.AvgPool2d(3, 2, 1), torch.randn(4, 8, 32, 32)
    )
    v = torch.randn(4, 5, *y.shape[1:])
    watched = profile(activities=[ProfilerActivity.CPU], profile_memory=True)
    with torch.no_grad(), watched as seen:
        found, _ = step.pull(v, False)
    events: Any = seen.events()
    taken = sum(max(0, it.self_cpu_memory_usage) for it in events)
    assert taken == found.numel() * found.element_size()


def test_what_a_pool_is_said_to_take() -> None:
    model, x = ended(nn.Tanh(), nn.AvgPool2d(2), rows=4), double(5, 2, 6, 9)
    like = x.dtype, x.device
    known = mapped.maps_of([*model][:2], (2, 6, 9), like)
    assert known is not None
    assert known.entries == 2 * 2 * 6 * 9
    assert known.size == (2, 3, 4)
    assert (known.widest, known.narrowest) == (108, 24)
    needed = gradlib.plan_jacobian(model, x)
    assert chain(model, x, max_bytes=needed.bytes) is not None
    assert chain(model, x, max_bytes=needed.bytes - 1) is None
