"""The networks that need a GPU, as large as those that people train."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks import jacobian_nets, nets


class Bottleneck(nn.Module):
    """Three convolutions with batch normalisation, and a shortcut around them."""

    def __init__(self, ins: int, width: int, stride: int) -> None:
        """Make the layers, which give four times `width` channels."""
        super().__init__()
        outs = 4 * width
        self.body = nn.Sequential(
            *_normalised(ins, width, 1),
            nn.ReLU(inplace=True),
            *_normalised(width, width, 3, stride),
            nn.ReLU(inplace=True),
            *_normalised(width, outs, 1),
        )
        self.around = nn.Sequential(
            *(() if ins == outs else _normalised(ins, outs, 1, stride))
        )

    def forward(self, x: Tensor) -> Tensor:
        """Return the block's output."""
        return F.relu(self.body(x) + self.around(x))


def resnet(blocks: tuple[int, ...], outs: int) -> nn.Sequential:
    """Return a residual classifier of images; with (3, 4, 6, 3) blocks ResNet-50."""
    layers: list[nn.Module] = [
        *_normalised(3, 64, 7, 2),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(3, 2, padding=1),
    ]
    ins = 64
    for stage, count in enumerate(blocks):
        for number in range(count):
            width = 64 * 2**stage
            stride = 2 if stage and not number else 1
            layers.append(Bottleneck(ins, width, stride))
            ins = 4 * width
    layers += [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(ins, outs)]
    return nn.Sequential(*layers)


def encoder(layers: int, width: int) -> nn.TransformerEncoder:
    """Return blocks of attention over tokens, without dropout."""
    layer = nn.TransformerEncoderLayer(
        width, 8, 4 * width, dropout=0.0, batch_first=True, norm_first=True
    )
    return nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)


def recorded(device: torch.device) -> list[nets.Net]:
    """Return the networks to record: those of the CPU's table, and larger ones."""
    torch.manual_seed(0)
    images = torch.randn(32, 3, 224, 224, device=device)
    classifier = resnet((3, 4, 6, 3), 1000).to(device)
    return [
        nets.mlp(device, modules=150, width=256, batch=64),
        nets.transformer(device, layers=4, width=128, batch=8),
        nets.mlp(device, modules=150, width=16, batch=64),
        nets.transformer(device, layers=12, width=768, batch=16),
        nets.Net(
            "ResNet-50, 32 images",
            classifier,
            images,
            torch.randn(32, 1000, device=device),
        ),
    ]


def differentiated(device: torch.device) -> list[jacobian_nets.Net]:
    """Return the networks to compute Jacobians of: the CPU's, and larger ones."""
    torch.manual_seed(0)
    blocks = nn.Sequential(encoder(12, 512), nn.Flatten(), nn.Linear(16 * 512, 10))
    larger = [
        # With so many ReLUs, rounding switches a few, whichever way is taken.
        ("ResNet-50 to 10, 64x64", resnet((3, 4, 6, 3), 10), (16, 3, 64, 64), 1e-2),
        ("12 transformer blocks, 16 tokens of 512, to 10", blocks, (16, 16, 512), 1e-4),
    ]
    return jacobian_nets.nets(device) + [
        jacobian_nets.Net(
            name,
            model.to(device).eval().requires_grad_(False),
            torch.randn(*shape, device=device),
            close,
        )
        for name, model, shape, close in larger
    ]


def _normalised(
    ins: int, outs: int, size: int, stride: int = 1
) -> tuple[nn.Conv2d, nn.BatchNorm2d]:
    conv = nn.Conv2d(ins, outs, size, stride, padding=size // 2, bias=False)
    return conv, nn.BatchNorm2d(outs)
