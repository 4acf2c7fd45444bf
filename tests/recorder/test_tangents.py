"""What flows back through the tangents of forward-mode AD is in a call's shares."""

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.testing import assert_close

import gradlib
from gradlib.recording.notes import TANGENTS


def slopes(model: nn.Module, x: Tensor) -> tuple[Tensor, Tensor]:
    """Return the outputs, and how fast they change along a direction."""
    with forward_ad.dual_level():
        output = model(forward_ad.make_dual(x, torch.ones_like(x)))
        primal, tangent = forward_ad.unpack_dual(output)
        assert tangent is not None
        return primal, tangent


@pytest.mark.parametrize("with_outputs", [True, False])
def test_shares_of_parameters(with_outputs: bool, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 2), nn.Tanh(), nn.Linear(2, 2))
    with gradlib.record(model) as recording:
        y, tangent = slopes(model, torch.randn(4, 3))
        (tangent.square().sum() + with_outputs * y.sum()).backward()
    for name in ("0", "2"):
        call = recording[name]
        weight = model.get_submodule(name).weight
        assert_close(call.param_grads["weight"], weight.grad)
        assert TANGENTS in call.note
    recording.save(tmp_path / "run.safetensors")
    assert TANGENTS in gradlib.load_recording(tmp_path / "run.safetensors")["0"].note


def test_shares_of_an_input() -> None:
    x = torch.randn(4, 3, requires_grad=True)
    model = nn.Tanh()
    with gradlib.record(model) as recording:
        _, tangent = slopes(model, x)
        tangent.square().sum().backward()
    assert_close(recording[""].grad_input[0], x.grad)


def test_without_tangents_nothing_is_noted() -> None:
    model, x = nn.Linear(3, 2), torch.randn(4, 3, requires_grad=True)
    with gradlib.record(model) as recording, forward_ad.dual_level():
        model(x).sum().backward()
    assert recording[""].note == ""
