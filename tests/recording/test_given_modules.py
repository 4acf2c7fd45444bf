"""A call that received modules of the model is replayed with these modules."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

import gradlib


class Through(nn.Module):
    """Calls a layer of its own, and then a module that it receives."""

    def __init__(self) -> None:
        super().__init__()
        self.own = nn.Linear(3, 3)

    def forward(self, x: Tensor, first: nn.Module, *, more: list[nn.Module]) -> Tensor:
        y = first(self.own(x))
        for module in more:
            y = module(y) * y
        return y


class Gives(nn.Module):
    """Passes modules of its own, whose statistics change from call to call."""

    def __init__(self) -> None:
        super().__init__()
        self.through = Through()
        self.norm = nn.BatchNorm1d(3)
        self.dropout = nn.Dropout(0.5)
        self.empty = nn.Sequential()

    def forward(self, x: Tensor) -> Tensor:
        y = self.through(x, self.norm, more=[self.norm, self.dropout])
        return self.through(y, self.empty, more=[self.norm.eval()])


@pytest.mark.parametrize("modules", [None, ["through"]])
def test_it_is_given_them_as_they_were(modules: list[str] | None) -> None:
    torch.manual_seed(0)
    model: Any = Gives()
    with gradlib.record(model, modules=modules) as recording:
        for _ in range(2):
            model.train()(torch.randn(5, 3)).square().sum().backward()
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.mul_(1.5)
    model.norm.register_forward_hook(lambda *_: torch.zeros(5, 3))
    norm = model.norm
    del model.norm  # the module is no longer part of the model
    before = {name: it.clone() for name, it in norm.state_dict().items()}
    found = recording.verify(numerical=True)
    assert found.ok, str(found)
    assert found.agreed == len(recording)
    assert_close(dict(norm.state_dict()), before, rtol=0, atol=0)
    assert not norm.training


def test_one_that_is_not_of_the_model_is_not_given_again() -> None:
    model, other = Through(), nn.Linear(3, 3)
    with gradlib.record(model) as recording:
        model(torch.randn(4, 3), other, more=[]).sum().backward()
    said = "is of type Linear, which cannot be kept"
    with pytest.raises(gradlib.CannotReplayError, match=said):
        recording[""].replay()


def test_one_that_cannot_run_as_it_did_is_no_more_replayed_than_inside() -> None:
    class Renamed(nn.BatchNorm1d):
        pass

    model = Gives()
    with gradlib.record(model) as recording:
        model(torch.randn(4, 3)).sum().backward()
    model.norm.__class__ = Renamed
    with pytest.raises(gradlib.CannotReplayError, match="is a Renamed now"):
        recording["through", 0].replay()
