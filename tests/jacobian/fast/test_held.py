"""What chains with convolutions, pools and norms are said to hold, and what they do."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import gradlib
from benchmarks.gpu_nets import resnet
from benchmarks.memory import measure_memory
from gradlib.jacobian.fast import replayed
from gradlib.jacobian.fast.chains import result

from .test_chain import chain
from .test_joined import Around, Basic


class Dense(nn.Module):
    """Each layer is given what all before it have made."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(16 + 8 * it, 8) for it in range(4)])

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.cat([x, F.relu(layer(x))], 1)
        return x


def normed(width: int) -> list[nn.Module]:
    return [nn.Linear(width, width), nn.LayerNorm(width), nn.GELU()]


def classifier() -> nn.Module:
    layers = nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.Flatten()
    return nn.Sequential(*layers, nn.Linear(8 * 144, 10), nn.Softmax(1))


NETS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "pools": (
        lambda: nn.Sequential(
            *(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
            *(nn.Conv2d(8, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU()),
            *(nn.AvgPool2d(2), nn.Flatten(), nn.Linear(144, 10)),
        ),
        (12, 3, 12, 12),
    ),
    "blocks": (
        lambda: nn.Sequential(
            *(Basic(8, 8), Basic(8, 16, 2), Basic(16, 16), Basic(16, 16)),
            *(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 10)),
        ),
        (12, 8, 12, 12),
    ),
    "around matrices": (
        lambda: nn.Sequential(
            *(Around(nn.Linear(64, 64), nn.Tanh()) for _ in range(6)), nn.Linear(64, 30)
        ),
        (64, 64),
    ),
    "norms": (
        lambda: nn.Sequential(*(3 * normed(64)), nn.Linear(64, 30)),
        (64, 64),
    ),
    "dense": (lambda: nn.Sequential(Dense(), nn.Linear(48, 30)), (64, 16)),
    "softmax": (classifier, (12, 1, 12, 12)),
    "images": (
        lambda: nn.Sequential(
            *(nn.Conv2d(2, 8, 3, padding=1), nn.GELU(), nn.Conv2d(8, 2, 3, padding=1)),
        ),
        (12, 2, 6, 6),
    ),
}


@pytest.mark.cpu  # whose memory is counted here; a GPU's is had in blocks
@pytest.mark.parametrize("name", NETS)
def test_what_is_held_is_what_is_said(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(result, "IN_CACHE", 2**40)  # all samples at once
    make, shape = NETS[name]
    model, x = make().eval().requires_grad_(False), torch.randn(*shape)
    plan = gradlib.plan_jacobian(model, x, check=False)
    assert plan.mode == "chain"

    def ask() -> Tensor:
        return gradlib.per_sample_jacobian(model, x, check=False)

    whole = ask().nbytes
    peak = measure_memory(ask, torch.device("cpu")).peak - whole
    assert plan.bytes / 4 < peak <= plan.bytes


def test_a_deep_net_is_small_enough_for_a_graph() -> None:
    """Of ResNet-50 only a few layers' vectors are there at the same time."""
    gpu: Any = torch.device("meta")  # no CPU, so all samples go at once
    model = resnet((3, 4, 6, 3), 10).eval().requires_grad_(False).to(gpu)
    found = chain(model, torch.empty(16, 3, 64, 64, device=gpu)).chain
    assert result.samples_at_once(found) == 16
    assert result.bytes_of_parts(found) < replayed.MOST
