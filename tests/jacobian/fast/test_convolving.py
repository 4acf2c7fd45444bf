"""The way back through a convolution is torch's, by whichever kernel it goes."""

import random
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import gradlib
from gradlib.jacobian.fast import plain_convolution
from gradlib.jacobian.fast import way_back as files
from gradlib.jacobian.fast.convolution import Convolution
from gradlib.jacobian.fast.way_back import way_back
from gradlib.random_state import seed_all

from .operations import ON_CPU


def drawn(seed: int) -> Convolution:
    """Return a convolution of images, as chance has it."""
    chance = random.Random(seed)
    groups = chance.choice([1, 1, 1, 2])
    ins, outs = (groups * chance.choice([1, 4, 10, 17]) for _ in range(2))
    taps = [chance.choice([1, 2, 3, 5]) for _ in range(2)]
    stride = [chance.choice([1, 2, 3]) for _ in range(2)]
    dilation = [chance.choice([1, 1, 2]) for _ in range(2)]
    padding = [chance.randint(0, count) for count in taps]
    size = [ins, *(chance.randint(10, 16) for _ in range(2))]
    seed_all(seed)
    weight = torch.randn(outs, ins // groups, *taps, dtype=torch.float64)
    return Convolution(weight, size, stride, padding, dilation, False, [0, 0], groups)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("seed", range(60))
def test_a_convolution(seed: int, dtype: torch.dtype) -> None:
    it = drawn(seed)
    x = torch.randn(3, *it.size, dtype=torch.float64, requires_grad=True)
    how: Any = it.stride, it.padding, it.dilation, it.groups
    y = nn.functional.conv2d(x, it.weight, None, *how)
    v = torch.randn_like(y)
    (expected,) = torch.autograd.grad(y, x, v)
    with torch.no_grad():
        found = way_back(it._replace(weight=it.weight.to(dtype)))(v.to(dtype))
    assert found.dtype == dtype
    assert found.is_contiguous()
    tolerance = 1e-4 if dtype == torch.float32 else 1e-10
    torch.testing.assert_close(found.double(), expected, rtol=tolerance, atol=tolerance)


WAYS = {
    **dict.fromkeys(("_by_kernel", "_by_shifts"), plain_convolution),
    **dict.fromkeys(("_turned", "_transposed", "_as_torch_does"), files),
}
"""The functions that go back, with their files."""


@pytest.fixture
def gone(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The ways that were gone."""
    names: list[str] = []
    for name, file in WAYS.items():
        there = getattr(file, name)

        def noted(*args: Any, name: str = name, there: Any = there, **how: Any) -> Any:
            names.append(name)
            return there(*args, **how)

        monkeypatch.setattr(file, name, noted)
    return names


@pytest.mark.cpu  # elsewhere they all go torch's way
def test_every_way_is_gone(gone: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plain_convolution, "MANY", 2**8)
    for seed in range(60):
        it = drawn(seed)
        it = it._replace(weight=it.weight.float())
        x = torch.randn(9, *it.size)
        how: Any = it.stride, it.padding, it.dilation, it.groups
        with torch.no_grad():
            way_back(it)(nn.functional.conv2d(x, it.weight, None, *how))
    assert {*gone} == {*WAYS}


class Images(TorchDispatchMode):
    """Notes how many images go through each convolution, there and back."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: list[int] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if "conv" in str(func):
            self.counts.append(len(args[0]))
        return func(*args, **(kwargs or {}))


def test_columns_that_samples_share_go_through_once() -> None:
    net = nn.Sequential(
        nn.Conv2d(1, 6, 3, padding=1),
        nn.ReLU(),
        nn.ConvTranspose2d(6, 2, 2, 2),
    ).requires_grad_(False)
    x = torch.randn(5, 1, 4, 4)
    with Images() as images:
        found = gradlib.per_sample_jacobian(net, x, check=False)
    looks = [] if ON_CPU else [5, 5]  # without a check, a GPU's result alone is proven
    assert images.counts == [5, 5, *looks, 16, 16 * 5]
    expected = [torch.func.jacrev(lambda s: net(s[None])[0])(s) for s in x]
    assert_close: Any = torch.testing.assert_close
    assert_close(found, torch.stack(expected))


def test_the_result_is_no_view_of_what_samples_share() -> None:
    net = nn.Sequential(
        nn.Conv2d(1, 6, 3, padding=1), nn.ConvTranspose2d(6, 2, 2, 2)
    ).requires_grad_(False)
    x = torch.randn(5, 1, 4, 4)
    found: Tensor = gradlib.per_sample_jacobian(net, x, check=False)
    one, another = found[0].clone(), found[1].clone()
    found[0] += 1
    assert torch.equal(found[0], one + 1)
    assert torch.equal(found[1], another)
