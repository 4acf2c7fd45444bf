"""The networks that are recorded, each with its data and its loss."""

from dataclasses import dataclass
from functools import cached_property, partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True, eq=False)
class Net:
    """A model, and one batch for it."""

    name: str
    model: nn.Module
    x: Tensor
    target: Tensor

    def loss(self, output: Tensor) -> Tensor:
        """Return the loss of the model's output."""
        return F.mse_loss(output, self.target)

    def step(self) -> None:
        """Go forward and backward once."""
        self.loss(self.model(self.x)).backward()

    @cached_property
    def called(self) -> dict[str, nn.Module]:
        """The modules that a forward calls, by name, in the order they end."""
        found: dict[str, nn.Module] = {}

        def hook(name: str, module: nn.Module, *_: object) -> None:
            found[name] = module

        handles = [
            module.register_forward_hook(partial(hook, name))
            for name, module in self.model.named_modules()
        ]
        with torch.no_grad():
            self.model(self.x)
        for handle in handles:
            handle.remove()
        return found


def mlp(device: torch.device, *, modules: int, width: int, batch: int) -> Net:
    """Return a deep chain of Linear, LayerNorm and ReLU."""
    torch.manual_seed(0)
    model = nn.Sequential()
    for _ in range(modules // 3):
        model.extend([nn.Linear(width, width), nn.LayerNorm(width), nn.ReLU()])
    x, target = torch.randn(2, batch, width, device=device)
    name = f"{len(model)} modules, width {width}, batch {batch}"
    return Net(name, model.to(device), x, target)


def transformer(device: torch.device, *, layers: int, width: int, batch: int) -> Net:
    """Return an encoder in training mode, which does not take the fused fast path."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(width, 4, 4 * width, batch_first=True)
    model = nn.TransformerEncoder(layer, layers).to(device)
    x, target = torch.randn(2, batch, 32, width, device=device)
    return Net(f"transformer, {layers} layers, width {width}", model, x, target)
