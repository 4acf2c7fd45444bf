"""The networks whose Jacobians are computed, small and large, of every common kind."""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional as F


@dataclass(frozen=True)
class Net:
    """A network and a batch for it."""

    name: str
    model: nn.Module
    x: Tensor


def nets(device: torch.device) -> list[Net]:
    """Return all networks, in eval mode, with weights that require no grad."""
    torch.manual_seed(0)
    return [
        Net(
            name,
            make().to(device).eval().requires_grad_(False),
            torch.randn(*shape, device=device),
        )
        for name, make, shape in _ALL
    ]


def mlp(widths: list[int], activation: type[nn.Module]) -> nn.Sequential:
    """Return linear layers with an activation between them."""
    layers: list[nn.Module] = []
    for before, after in pairwise(widths):
        layers += [nn.Linear(before, after), activation()]
    return nn.Sequential(*layers[:-1])


def cnn() -> nn.Sequential:
    """Return a small convolutional classifier of 28 x 28 images."""
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(16, 32, 3, stride=2, padding=1),
        nn.ReLU(),
        nn.Conv2d(32, 32, 3, stride=2, padding=1),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(32 * 7 * 7, 10),
    )


class Residual(nn.Module):
    """Two convolutions with group normalisation, and a way around them."""

    def __init__(self, width: int) -> None:
        """Make the layers."""
        super().__init__()
        self.conv1 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.norm1 = nn.GroupNorm(4, width)
        self.conv2 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.norm2 = nn.GroupNorm(4, width)

    def forward(self, x: Tensor) -> Tensor:
        """Return the block's output."""
        y = F.relu(self.norm1(self.conv1(x)))
        return F.relu(x + self.norm2(self.conv2(y)))


def resnet() -> nn.Sequential:
    """Return a residual classifier of 32 x 32 images."""
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1, bias=False),
        nn.GroupNorm(4, 16),
        nn.ReLU(),
        Residual(16),
        nn.Conv2d(16, 32, 3, stride=2, padding=1, bias=False),
        Residual(32),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(32, 10),
    )


def transformer() -> nn.TransformerEncoder:
    """Return two blocks of attention over tokens."""
    layer = nn.TransformerEncoderLayer(
        64, 4, 128, dropout=0.0, batch_first=True, norm_first=True, activation="gelu"
    )
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)


Make = Callable[[], nn.Module]

_ALL: list[tuple[str, Make, tuple[int, ...]]] = [
    ("MLP 3-20-2", lambda: mlp([3, 20, 2], nn.ReLU), (10, 3)),
    ("score net 32-256-256-1", lambda: mlp([32, 256, 256, 1], nn.SiLU), (256, 32)),
    ("MLP 64-256-256-10", lambda: mlp([64, 256, 256, 10], nn.ReLU), (256, 64)),
    ("PINN 2-64x4-1", lambda: mlp([2, 64, 64, 64, 64, 1], nn.Tanh), (4096, 2)),
    ("decoder 10-256-784", lambda: mlp([10, 256, 784], nn.ReLU), (64, 10)),
    (
        "autoencoder 784-256-32-256-784",
        lambda: mlp([784, 256, 32, 256, 784], nn.ReLU),
        (32, 784),
    ),
    ("CNN 28x28 to 10", cnn, (64, 1, 28, 28)),
    ("ResNet with GroupNorm 32x32 to 10", resnet, (16, 3, 32, 32)),
    ("transformer, 2 blocks, 16 tokens of 64", transformer, (8, 16, 64)),
]
