"""The networks whose Jacobians are computed, small and large, of every common kind."""

import random
from collections.abc import Callable, Iterable
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
    close: float = 1e-4
    """The error allowed against float64, as a fraction of the largest entry."""


Kind = tuple[str, Callable[[], nn.Module], tuple[int, ...]]
"""A network's name, what makes it, and the shape of its batch."""


def nets(device: torch.device) -> list[Net]:
    """Return the networks of the table."""
    return made(_ALL, device)


def made(kinds: Iterable[Kind], device: torch.device) -> list[Net]:
    """Return networks, in eval mode, with weights that require no grad."""
    torch.manual_seed(0)
    return [
        Net(
            name,
            make().to(device).eval().requires_grad_(False),
            torch.randn(*shape, device=device),
        )
        for name, make, shape in kinds
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
    """Two convolutions with group normalisation, and a shortcut around them."""

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


class Bottleneck(nn.Module):
    """Convolutions down to a narrow middle and up again."""

    def __init__(self, channels: int, middle: int, size: int) -> None:
        """Make the layers, for images of `size` x `size`."""
        super().__init__()
        self.down = nn.Conv2d(1, channels, 3, stride=2, padding=1)
        self.inner = nn.Linear(channels * (size // 2) ** 2, middle)
        self.outer = nn.Linear(middle, channels * (size // 2) ** 2)
        self.up = nn.ConvTranspose2d(channels, 1, 2, stride=2)

    def forward(self, x: Tensor) -> Tensor:
        """Return images."""
        h = F.silu(self.down(x))
        inner = F.silu(self.outer(F.silu(self.inner(h.flatten(1)))))
        return self.up(inner.view_as(h))


class InCode(nn.Module):
    """A gated block written out with its own tensors, and perhaps a sum of squares."""

    def __init__(self, width: int, inside: int, *, sums: bool) -> None:
        """Draw the tensors."""
        super().__init__()
        size = width, inside
        self.gate = nn.Parameter(torch.randn(size) / width**0.5)
        self.weight = nn.Parameter(torch.randn(size) / width**0.5)
        self.bias = nn.Parameter(torch.randn(inside))
        self.last = nn.Parameter(torch.randn(inside, width) / inside**0.5)
        self.sums = sums

    def forward(self, x: Tensor) -> Tensor:
        """Return vectors, or the sum of their squares."""
        y = (F.silu(x @ self.gate) * (x @ self.weight + self.bias)) @ self.last
        return y.square().sum(1, keepdim=True) if self.sums else y


def random_nets(count: int, device: torch.device) -> list[Net]:
    """Return random networks, of other sizes and kinds than those of `nets`."""
    chance = random.Random(0)
    made: list[Net] = []
    for number in range(count):
        torch.manual_seed(number)
        name, model, shape = _KINDS[number % len(_KINDS)](chance)
        model = model.to(device).eval().requires_grad_(False)
        x = torch.randn(*shape).to(device)
        made.append(Net(f"{number + 1}: {name}", model, x))
    return made


Drawn = tuple[str, nn.Module, tuple[int, ...]]


def _random_mlp(chance: random.Random) -> Drawn:
    widths = [chance.choice([2, 8, 50, 300]) for _ in range(chance.randint(3, 6))]
    activation = chance.choice([nn.ReLU, nn.Tanh, nn.GELU, nn.ELU])
    batch = chance.choice([4, 64, 512])
    name = f"MLP {'-'.join(map(str, widths))}, {activation.__name__}, {batch}"
    return name, mlp(widths, activation), (batch, widths[0])


def _random_cnn(chance: random.Random) -> Drawn:
    size, batch = chance.choice([12, 20, 32]), chance.choice([4, 32])
    channels, outs = chance.choice([1, 3]), chance.choice([1, 5, 20])
    stride, groups = chance.choice([1, 2]), chance.choice([1, 2])
    width = chance.choice([8, 24])
    body = nn.Sequential(
        nn.Conv2d(channels, width, 5, stride, padding=2),
        nn.LeakyReLU(0.1),
        nn.Conv2d(width, width, 3, 2, groups=groups),
        nn.SiLU(),
        nn.Flatten(),
    )
    features = body(torch.zeros(1, channels, size, size)).numel()
    name = f"CNN of {channels} x {size} x {size} to {outs}, {width} wide, {batch}"
    shape = (batch, channels, size, size)
    return name, nn.Sequential(*body, nn.Linear(features, outs)), shape


def _random_residual(chance: random.Random) -> Drawn:
    width, batch = chance.choice([8, 24]), chance.choice([2, 8])
    outs = chance.choice([1, 6])
    model = nn.Sequential(
        nn.Conv2d(1, width, 3, padding=1),
        Residual(width),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(width, 4),
        nn.Linear(4, outs),
    )
    return f"ResNet {width} wide to {outs}, {batch}", model, (batch, 1, 16, 16)


def _random_transformer(chance: random.Random) -> Drawn:
    heads, each = chance.choice([1, 2, 4]), chance.choice([8, 16])
    depth, tokens = chance.choice([1, 3]), chance.choice([4, 10])
    width, batch = heads * each, chance.choice([2, 6])
    layer = nn.TransformerEncoderLayer(
        width, heads, 3 * width, 0.0, "relu", batch_first=True, norm_first=depth == 1
    )
    model = nn.TransformerEncoder(layer, depth, enable_nested_tensor=False)
    name = f"transformer {depth} deep, {heads} heads of {each}, {batch}"
    return name, model, (batch, tokens, width)


def _random_bottleneck(chance: random.Random) -> Drawn:
    channels, middle = chance.choice([2, 6]), chance.choice([3, 12])
    batch = chance.choice([2, 16])
    name = f"images through a narrow middle, {channels} wide, {middle}, {batch}"
    return name, Bottleneck(channels, middle, 16), (batch, 1, 16, 16)


def _random_generator(chance: random.Random) -> Drawn:
    ins, width = chance.choice([4, 16, 64]), chance.choice([4, 16])
    channels, batch = chance.choice([1, 3]), chance.choice([4, 32])
    taps = chance.choice([2, 4])
    model = nn.Sequential(
        nn.Linear(ins, width * 16),
        nn.ReLU(),
        nn.Unflatten(1, (width, 4, 4)),
        nn.ConvTranspose2d(width, width, taps, 2, taps // 2 - 1),
        nn.ReLU(),
        nn.ConvTranspose2d(width, channels, taps, 2, taps // 2 - 1),
    )
    name = f"generator {ins} to {channels} x 16 x 16, {width} wide, {batch}"
    return name, model, (batch, ins)


def _random_image_net(chance: random.Random) -> Drawn:
    size, batch = chance.choice([8, 12]), chance.choice([2, 16])
    channels, outs = chance.choice([1, 3]), chance.choice([1, 2, 4])
    width, stride = chance.choice([8, 16]), chance.choice([1, 2])
    model = nn.Sequential(
        nn.Conv2d(channels, width, 3, padding=1),
        nn.Tanh(),
        nn.Conv2d(width, width, 3, stride, padding=1),
        nn.GELU(),
        nn.Conv2d(width, outs, 3, padding=1),
    )
    place = f"{channels} x {size} x {size}"
    name = f"images of {place} to {outs} channels, {width} wide, {batch}"
    return name, model, (batch, channels, size, size)


def _random_code(chance: random.Random) -> Drawn:
    width, inside = chance.choice([4, 16, 64]), chance.choice([16, 64, 256])
    sums, batch = chance.choice([False, True]), chance.choice([4, 64, 512])
    what = "the energy of a gate" if sums else "a gate"
    name = f"code: {what} {width}-{inside}, {batch}"
    return name, InCode(width, inside, sums=sums), (batch, width)


_KINDS: list[Callable[[random.Random], Drawn]] = [
    _random_mlp,
    _random_cnn,
    _random_generator,
    _random_residual,
    _random_transformer,
    _random_bottleneck,
    _random_image_net,
    _random_code,
]

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
