"""What somebody has put in the place of torch's own, before and after the import."""

import os
import subprocess
import sys
from typing import Any

import pytest
from torch import Tensor, nn
from torch.testing import assert_close

import gradlib

from .lines import double

# Each case runs in a process of its own, forked from one that has imported torch, and
# what gradlib and a comparison import beside it.
PROGRAM = """
import os, sys, traceback
import numpy, optree, safetensors.torch
import torch
import torch.fx.experimental.symbolic_shapes  # as a first backward pass does
from torch import nn
from torch.nn import functional as F

torch.testing.assert_close(torch.ones(1), torch.ones(1))

for what, (replaced, model, shape) in {cases!r}.items():
    if os.fork():
        if os.wait()[1]:
            print(what)
        continue
    try:
        exec(replaced)
        import gradlib

        torch.manual_seed(0)
        fn, x = eval(model), eval(f"torch.randn({{shape}})")
        found = gradlib.per_sample_jacobian(fn, x, check=False)
        jacobian = torch.autograd.functional.jacobian
        truth = torch.stack([jacobian(lambda it: fn(it[None])[0], row) for row in x])
        torch.testing.assert_close(found, truth)
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    os._exit(0)
"""

SCALED = """
class Scaled(nn.{0}):
    def forward(self, x):
        return 2 * super().forward(x)

nn.{0} = Scaled
"""
LAYERS = "nn.Sequential(nn.Linear(4, 4), nn.{}(), nn.Linear(4, 3))"
FLAT = "nn.Sequential(nn.TransformerEncoderLayer(4, 2, 8, 0.0), nn.Flatten()).eval()"
REPLACED: dict[str, tuple[str, str, str]] = {
    "a layer": (SCALED.format("Linear"), LAYERS.format("Tanh"), "5, 4"),
    "an activation": (SCALED.format("GELU"), LAYERS.format("GELU"), "5, 4"),
    "a forward": (
        "old = nn.Linear.forward\nnn.Linear.forward = lambda *it: 2 * old(*it)",
        LAYERS.format("Tanh"),
        "5, 4",
    ),
    "all calls": (
        "old = nn.Module.__call__\nnn.Module.__call__ = lambda *it: 2 * old(*it)",
        LAYERS.format("Tanh"),
        "5, 4",
    ),
    "a function": (
        "old = F.relu\nF.relu = lambda x, inplace=False: 2 * old(x)",
        LAYERS.format("ReLU"),
        "5, 4",
    ),
    "a method": (
        "old = torch.Tensor.tanh\ntorch.Tensor.tanh = lambda x: 2 * old(x)",
        "lambda x: x.tanh() * 3",
        "5, 4",
    ),
    "a norm of transformers": (
        SCALED.format("LayerNorm")
        + "torch.nn.modules.transformer.LayerNorm = nn.LayerNorm",
        FLAT.replace("0.0", "0.0, batch_first=True"),
        "2, 3, 4",
    ),
    "a layer after one": (
        SCALED.format("Flatten"),
        FLAT.replace("0.0", "0.0, batch_first=True"),
        "2, 3, 4",
    ),
}


@pytest.fixture(scope="module")
def outcome() -> subprocess.CompletedProcess[str]:
    """Return what came of all, which prints those that went wrong."""
    program = PROGRAM.format(cases=REPLACED)
    return subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )


@pytest.mark.cpu
@pytest.mark.skipif(not hasattr(os, "fork"), reason="a process forks for each case")
@pytest.mark.parametrize("what", REPLACED)
def test_before_the_import(
    what: str, outcome: subprocess.CompletedProcess[str]
) -> None:
    assert what not in outcome.stdout.splitlines(), outcome.stderr


class Doubled(nn.Flatten):
    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 (torch's name)
        """Return twice as much."""
        return 2 * super().forward(input)


def test_after_the_import(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nn, "Flatten", Doubled)
    layer = nn.TransformerEncoderLayer(4, 2, 8, 0.0, batch_first=True)
    model, x = nn.Sequential(layer, nn.Flatten()).eval().double(), double(2, 3, 4)
    truth = gradlib.per_sample_jacobian(model, x, mode="loop")
    assert_close(gradlib.per_sample_jacobian(model, x), truth)


class Backwards(nn.ModuleList):
    """Gives its layers in their order where one asks for the other."""

    def __reversed__(self) -> Any:
        """Return them."""
        return iter(list(self))


class First(nn.Sequential):
    """Gives its first layer whichever one asks for."""

    def _get_item_by_idx(self, iterator: Any, idx: int) -> Any:
        del idx
        return next(iter(iterator))


class Reversed(nn.Module):
    def __init__(self, kind: type[nn.ModuleList]) -> None:
        super().__init__()
        self.layers = kind([nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)])

    def forward(self, x: Tensor) -> Tensor:
        """Return what the layers make, the last one first."""
        for layer in reversed(self.layers):
            x = layer(x)
        return x


@pytest.mark.parametrize("kind", [nn.ModuleList, Backwards])
def test_layers_from_the_last_to_the_first(kind: type[nn.ModuleList]) -> None:
    model, x = Reversed(kind).double(), double(3, 4)
    truth = gradlib.per_sample_jacobian(model, x, mode="loop")
    assert_close(gradlib.per_sample_jacobian(model, x), truth)


@pytest.mark.parametrize("kind", [nn.Sequential, First])
def test_a_layer_by_its_number(kind: type[nn.Sequential]) -> None:
    model, x = kind(nn.Linear(4, 4), nn.Linear(4, 3)).double(), double(3, 4)

    def fn(x: Tensor) -> Tensor:
        return model[1](x).tanh()

    truth = gradlib.per_sample_jacobian(fn, x, mode="loop")
    assert_close(gradlib.per_sample_jacobian(fn, x), truth)
