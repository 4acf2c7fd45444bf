"""A net of which code names layers, and what its Jacobian is held against."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import gradlib
from gradlib.random_state import seed_all

Function = Callable[[Tensor], Tensor]


def double(*shape: int) -> Tensor:
    """Return random numbers."""
    return torch.randn(*shape, dtype=torch.float64)


def of_net(of: Callable[[Any, Tensor], Tensor], net: Any) -> Function:
    """Return a function of a net and an input, with the net given."""
    return lambda x: of(net, x)


def by_loop(fn: Function, x: Tensor) -> Tensor:
    """Return the Jacobian, computed by one backward pass for each row."""
    jacobian: Tensor = gradlib.per_sample_jacobian(fn, x, mode="loop")
    return jacobian


def require_same(fn: Function, x: Tensor) -> None:
    """Hold the Jacobian of a function against that of the loop."""
    found = gradlib.per_sample_jacobian(fn, x, check=False)
    reference = gradlib.per_sample_jacobian(fn, x, mode="loop", check=False)
    torch.testing.assert_close(found, reference, rtol=1e-12, atol=1e-12)


class Net(nn.Module):
    """A module of one's own, of which each test uses something."""

    kind = "relu"

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 6), nn.Linear(6, 4)
        self.third = nn.Linear(4, 4)
        self.drop = nn.Dropout()
        self.layers = nn.ModuleList([nn.Linear(4, 4) for _ in range(3)])
        self.by_name = nn.ModuleDict({"a": nn.Linear(4, 4), "b": nn.Tanh()})
        self.inner = nn.Sequential(nn.Linear(4, 3), nn.SiLU(), nn.Linear(3, 4))
        self.plain = [nn.Linear(4, 4).double(), nn.Linear(4, 4).double()]
        self.sizes = [4, 6]
        self.slope = 0.3
        self.act: Any = torch.tanh
        self.own_act: Any = lambda x: x.sigmoid()
        self.nothing: Any = None
        self.calls = 0
        self.seen: list[Any] = []
        self.unknown = nn.Softmin(1)
        self.single = nn.Linear(4, 1)
        self.acts = {"relu": torch.relu}

    @staticmethod
    def static(x: Tensor) -> Tensor:
        return torch.tanh(x)

    def encode(self, x: Tensor) -> Tensor:
        return torch.relu(self.first(x))

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.encode(x))

    @property
    def head(self) -> nn.Module:
        self.calls += 1
        return self.third


def make() -> Net:
    """Return a net in evaluation, as random layers are none."""
    seed_all(0)
    return Net().double().eval()
