"""Functions as people write them for a problem of their own: short, and no chains."""

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.jacobian_nets import Kind, Net, made, mlp


class RadialBasis(nn.Module):
    """A sum of Gaussian bumps."""

    def __init__(self) -> None:
        """Draw the centers, and the weight of each."""
        super().__init__()
        self.centers = nn.Parameter(torch.randn(32, 8))
        self.weight = nn.Parameter(torch.randn(32, 4))

    def forward(self, x: Tensor) -> Tensor:
        """Return the weighted sums."""
        squares = (x[:, None] - self.centers).square().sum(-1)
        return torch.exp(-squares) @ self.weight


class GraphConvolution(nn.Module):
    """Two linear layers for every node of a graph, and means over its neighbours."""

    def __init__(self) -> None:
        """Draw the graph, and make the layers."""
        super().__init__()
        neighbours = torch.rand(10, 10)
        self.means = nn.Parameter(neighbours / neighbours.sum(1, keepdim=True))
        self.first, self.second = nn.Linear(4, 16), nn.Linear(16, 3)

    def forward(self, x: Tensor) -> Tensor:
        """Return what each node becomes."""
        return self.means @ self.second(F.relu(self.means @ self.first(x)))


class OnSphere(nn.Module):
    """An embedding of length one."""

    def __init__(self) -> None:
        """Make the layers."""
        super().__init__()
        self.net = mlp([16, 32, 8], nn.Tanh)

    def forward(self, x: Tensor) -> Tensor:
        """Return the embedding."""
        return F.normalize(self.net(x), dim=-1)


class FourierFeatures(nn.Module):
    """A network of the sines and cosines of a point in space."""

    def __init__(self) -> None:
        """Make the layers."""
        super().__init__()
        self.net = mlp([36, 64, 64, 4], nn.ReLU)

    def forward(self, x: Tensor) -> Tensor:
        """Return the color and density there."""
        waves = [2**k * math.pi * x for k in range(6)]
        both = [wave for it in waves for wave in (it.sin(), it.cos())]
        return self.net(torch.cat(both, 1))


class DeepSet(nn.Module):
    """A function of a set: a network of the mean of what each member becomes."""

    def __init__(self) -> None:
        """Make the layers."""
        super().__init__()
        self.each, self.all = mlp([4, 32, 32], nn.ReLU), mlp([32, 32, 5], nn.ReLU)

    def forward(self, x: Tensor) -> Tensor:
        """Return the function of each set."""
        return self.all(self.each(x).mean(1))


class EulerSteps(nn.Module):
    """Eight steps along a vector field."""

    def __init__(self) -> None:
        """Make the field."""
        super().__init__()
        self.field = mlp([6, 64, 6], nn.Tanh)

    def forward(self, x: Tensor) -> Tensor:
        """Return where each point goes."""
        for _ in range(8):
            x = x + 0.1 * self.field(x)
        return x


class Experts(nn.Module):
    """Four networks, and a gate that weighs them."""

    def __init__(self) -> None:
        """Make the networks."""
        super().__init__()
        self.gate = nn.Linear(10, 4)
        self.experts = nn.ModuleList(mlp([10, 32, 5], nn.GELU) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        """Return the weighted sum."""
        shares = self.gate(x).softmax(-1)
        said = torch.stack([expert(x) for expert in self.experts], 1)
        return (shares[:, :, None] * said).sum(1)


class Recurrent(nn.Module):
    """The last state of a GRU."""

    def __init__(self) -> None:
        """Make the layers."""
        super().__init__()
        self.rnn, self.last = nn.GRU(5, 16, batch_first=True), nn.Linear(16, 2)

    def forward(self, x: Tensor) -> Tensor:
        """Return two numbers for each series."""
        return self.last(self.rnn(x)[0][:, -1])


class Series(nn.Module):
    """Convolutions along time, and a mean over it."""

    def __init__(self) -> None:
        """Make the layers."""
        super().__init__()
        self.first = nn.Conv1d(3, 16, 5, padding=2)
        self.second = nn.Conv1d(16, 16, 5, padding=2)
        self.last = nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        """Return four numbers for each series."""
        return self.last(F.relu(self.second(F.relu(self.first(x)))).mean(-1))


class HyperNetwork(nn.Module):
    """A linear layer whose weight comes from a part of the input."""

    def __init__(self) -> None:
        """Make the layer that gives the weight."""
        super().__init__()
        self.weight = nn.Linear(3, 4 * 6)

    def forward(self, x: Tensor) -> Tensor:
        """Return the layer's output."""
        weight = self.weight(x[:, :3]).view(-1, 4, 6)
        return (weight @ x[:, 3:, None]).squeeze(-1).tanh()


class Pooled(nn.Module):
    """The mean of an attention over tokens."""

    def __init__(self) -> None:
        """Make the layers."""
        super().__init__()
        self.attention = nn.MultiheadAttention(16, 2, batch_first=True)
        self.last = nn.Linear(16, 3)

    def forward(self, x: Tensor) -> Tensor:
        """Return three numbers for each sequence."""
        return self.last(self.attention(x, x, x, need_weights=False)[0].mean(1))


class Splines(nn.Module):
    """A sum of piecewise linear functions, one of each input."""

    knots: Tensor

    def __init__(self) -> None:
        """Draw the heights at the knots."""
        super().__init__()
        self.register_buffer("knots", torch.linspace(-2, 2, 8))
        self.heights = nn.Parameter(torch.randn(4, 8, 3))

    def forward(self, x: Tensor) -> Tensor:
        """Return three sums."""
        hats = F.relu(1 - (x[..., None] - self.knots).abs() * 1.75)
        return torch.einsum("bik,iko->bo", hats, self.heights)


class Coupling(nn.Module):
    """Two coupling layers of a flow."""

    def __init__(self) -> None:
        """Make the networks."""
        super().__init__()
        self.first, self.second = mlp([3, 32, 6], nn.Tanh), mlp([3, 32, 6], nn.Tanh)

    def forward(self, x: Tensor) -> Tensor:
        """Return where each point goes."""
        a, b = x.chunk(2, 1)
        scale, shift = self.first(a).chunk(2, 1)
        b = b * scale.tanh().exp() + shift
        scale, shift = self.second(b).chunk(2, 1)
        return torch.cat([a * scale.tanh().exp() + shift, b], 1)


class Arm(nn.Module):
    """Where an arm of seven joints ends, in a plane."""

    def forward(self, x: Tensor) -> Tensor:
        """Return its two coordinates, from the angles."""
        angles = x.cumsum(-1)
        return torch.stack([angles.cos().sum(-1), angles.sin().sum(-1)], -1)


_ALL: list[Kind] = [
    ("radial basis functions", RadialBasis, (64, 8)),
    ("graph convolution", GraphConvolution, (16, 10, 4)),
    ("embedding of length one", OnSphere, (64, 16)),
    ("Fourier features", FourierFeatures, (256, 3)),
    ("deep set", DeepSet, (32, 12, 4)),
    ("Euler steps", EulerSteps, (64, 6)),
    ("mixture of experts", Experts, (64, 10)),
    ("GRU", Recurrent, (16, 12, 5)),
    ("convolutions along time", Series, (16, 3, 32)),
    ("hypernetwork", HyperNetwork, (64, 9)),
    ("attention, pooled", Pooled, (16, 8, 16)),
    ("splines", Splines, (64, 4)),
    ("coupling flow", Coupling, (64, 6)),
    ("arm of seven joints", Arm, (256, 7)),
]


def written_nets(device: torch.device) -> list[Net]:
    """Return all of them."""
    return made(_ALL, device)
