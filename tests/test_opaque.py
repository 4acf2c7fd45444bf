"""What is no tensor is kept only if nobody can change it."""

import functools
import gc
import weakref
from enum import Enum
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import gradlib
from gradlib.opaque import keep_opaque


class Mode(Enum):
    FAST = "fast"


def closure() -> Any:
    seen: list[int] = []
    return lambda: seen.append(1)


@pytest.mark.parametrize(
    "value",
    [
        *(None, True, 3, 0.5, 2j, "text", b"bytes", slice(2), range(3), ..., int),
        *(F.relu, torch.relu, Mode.FAST, np.float32(1), np.dtype("int8")),
        *(torch.float32, torch.device("cpu"), torch.strided, torch.channels_last),
        *(torch.Size([2]), gradlib.NotSaved("Cache")),
    ],
    ids=lambda value: getattr(value, "__name__", repr(value)),
)
def test_what_nobody_can_change_is_kept(value: object) -> None:
    assert keep_opaque(value) is value


@pytest.mark.parametrize(
    "value",
    [
        *(object(), {1}, closure(), functools.partial(len), nn.Linear(1, 1)),
        *(torch.Generator(), np.array([object()]), torch.distributions.Normal(0, 1)),
    ],
    ids=lambda value: type(value).__name__,
)
def test_of_the_rest_only_the_class_is(value: object) -> None:
    assert keep_opaque(value) == gradlib.NotSaved(type(value).__name__)


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 2)

    def forward(self, x: Tensor, state: dict[str, Any]) -> torch.distributions.Normal:
        state["array"] += 1
        return torch.distributions.Normal(self.linear(x), 1.0)


class Sampler(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = Encoder()

    def forward(self, x: Tensor) -> Tensor:
        state = {"array": np.zeros(1), "seen": {1, 2}}
        return self.encoder(x, state).rsample()


def test_a_recording_shows_no_later_state_and_keeps_no_graph_alive() -> None:
    model, made = Sampler(), list[Any]()

    def note(_module: object, _args: object, output: Tensor) -> None:
        made.append(weakref.ref(output))

    model.encoder.linear.register_forward_hook(note)
    with gradlib.record(model) as recording:
        model(torch.ones(4, 3)).sum().backward()
    gc.collect()
    assert made[0]() is None
    call = recording["encoder"]
    assert call.output == gradlib.NotSaved("Normal")
    assert call.args[1]["array"] == 0
    assert call.args[1]["seen"] == gradlib.NotSaved("set")


def test_an_array_is_copied() -> None:
    array = np.ones(2)
    kept = keep_opaque(array)
    array += 1
    assert kept.tolist() == [1, 1]
