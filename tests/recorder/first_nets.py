"""Small nets to record, and a loss of what they return."""

import torch
from torch import Tensor, nn

from gradlib.private.hooks import HOOKS


class Net(nn.Module):
    """fc1, fc2 and fc3 of the first thread."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1 = nn.Linear(3, 20)
        self.relu1 = nn.ReLU()
        self.fc2 = nn.Linear(20, 30)
        self.relu2 = nn.ReLU()
        self.fc3 = nn.Linear(30, 2)

    def forward(self, x: Tensor) -> Tensor:
        h = self.relu1(self.fc1(x))
        return self.fc3(self.relu2(self.fc2(h)))


class Residual(nn.Module):
    """``x + f(x)``: the input of `f` has a second use."""

    def __init__(self) -> None:
        super().__init__()
        self.f = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.f(x)


class Thrice(nn.Module):
    """Calls one module three times."""

    def __init__(self) -> None:
        super().__init__()
        self.f = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(3):
            x = torch.tanh(self.f(x))
        return x


def loss_of(output: Tensor) -> Tensor:
    """Weigh the entries differently, so that no two gradients agree by chance."""
    return (output * torch.arange(1.0, output.numel() + 1).view_as(output)).sum()


def hooks_of(model: nn.Module) -> list[object]:
    """Return every hook that a model, its modules and its parameters hold."""
    left: list[object] = []
    for module in model.modules():
        for kind in HOOKS:
            left += getattr(module, kind).values()
    for parameter in model.parameters():
        left += (parameter._backward_hooks or {}).values()
    return left
