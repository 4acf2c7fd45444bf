"""Models whose forward runs a backward pass, and what is recorded of them."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

import gradlib


def slope_of(energy: Tensor, x: Tensor) -> Tensor:
    (slope,) = torch.autograd.grad(energy.sum(), x, create_graph=True)
    return slope


class Own(nn.Module):
    """A force field with parameters of its own, and no module inside."""

    def __init__(self, wakes: bool = True) -> None:
        super().__init__()
        self.w, self.wakes = nn.Parameter(torch.tensor([1.0, 2.0, 3.0])), wakes

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = x.requires_grad_() if self.wakes else x
        energy = x.tanh() @ self.w
        return energy, -slope_of(energy, x)


class Inner(nn.Module):
    """A force field whose parameters are those of the modules inside, and a scale."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))
        self.scale = nn.Parameter(torch.tensor(0.7))

    def forward(self, x: Tensor) -> Tensor:
        p = x.detach().requires_grad_()
        return self.scale * slope_of(self.net(p * self.scale), p)


class Apart(nn.Module):
    """A force field whose pass reaches no tensor from outside and no module inside."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.tensor([1.0, 2.0, 3.0]))
        self.scale = nn.Parameter(torch.tensor(0.7))

    def forward(self, x: Tensor) -> Tensor:
        p = x.detach().requires_grad_()
        return x + self.scale * slope_of(p.tanh() @ self.w, p)


class Around(nn.Module):
    """Calls an `Apart` between other modules, with parameters of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.inner = nn.Linear(3, 3), Apart()
        self.last, self.scales = nn.Linear(3, 2), nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.inner(self.first(x) * self.scales) * self.scales)


class Again(Inner):
    """A force field that uses its parameters again, with the result of the pass."""

    def forward(self, x: Tensor) -> Tensor:
        forces = super().forward(x)
        return self.net(x + forces) * self.scale + self.net(x)


class Twice(Inner):
    """A force field that runs two backward passes through the same module."""

    def forward(self, x: Tensor) -> Tensor:
        first = super().forward(x)
        return first + super().forward(x + first)


class Outputs(nn.Module):
    """A model that also returns a tensor that the pass went through."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = x.requires_grad_()
        h = self.net[1](self.net[0](x))
        energy = self.net[2](h)
        return h, slope_of(energy.square(), x)


class Learner(nn.Module):
    """A model that trains copies of its weights for two steps before it answers."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3))

    def forward(self, x: Tensor) -> Tensor:
        fast: dict[str, Tensor] = dict(self.net.named_parameters())
        for _ in range(2):
            loss = functional_call(self.net, fast, (x,)).square().sum()
            slopes = torch.autograd.grad(loss, [*fast.values()], create_graph=True)
            steps = zip(fast.items(), slopes, strict=True)
            fast = {name: it - 0.1 * slope for (name, it), slope in steps}
        return functional_call(self.net, fast, (x,))


class Remembers(Inner):
    """A force field that keeps its output, with the graph, for the next forward."""

    def __init__(self) -> None:
        super().__init__()
        self.state: Any = None

    def forward(self, x: Tensor) -> Tensor:
        forces = super().forward(x)
        self.state = forces if self.state is None else self.state + forces * self.scale
        return self.state * self.scale


MODELS: dict[str, Callable[[], nn.Module]] = {
    "own, wakes": Own,
    "own": lambda: Own(wakes=False),
    **{it.__name__: it for it in (Inner, Again, Twice, Outputs, Learner, Remembers)},
    **{it.__name__: it for it in (Apart, Around)},
    "around, nested": lambda: nn.Sequential(Around(), nn.Tanh()),
    "nested": lambda: nn.Sequential(nn.Linear(3, 3), Again(), nn.Linear(1, 1)),
}


def recorded(name: str, steps: int = 2, device: str = "cpu") -> gradlib.Recording:
    torch.manual_seed(0)
    with torch.device("cpu"):
        model, inputs = MODELS[name](), torch.randn(steps, 2, 3).double()
    with gradlib.record(model.to(device, torch.double)) as recording:
        for x in inputs.to(device):
            given = x.clone().requires_grad_(name != "own, wakes")
            out = model(given * 2 if name == "nested" else given)
            outs = out if isinstance(out, tuple) else (out,)
            loss = torch.stack([it.square().sum() for it in outs]).sum()
            loss.backward(retain_graph=True)
    return recording


def gradients(recording: gradlib.Recording) -> dict[str, Any]:
    """Return each recorded gradient, by call, pass and field."""
    found: dict[str, Any] = {}
    for call in recording:
        for number, it in enumerate(call.passes):
            for field in ("grad_input", "grad_output", "param_grads"):
                found[f"{call.name} {call.index}: {number} {field}"] = getattr(
                    it, field
                )
    return found
