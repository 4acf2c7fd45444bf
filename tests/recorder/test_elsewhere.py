"""Tensors that a call puts where nobody looks: a global list, an object, a class."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

import gradlib
from gradlib.recording import notes

PUT: list[Tensor] = []


class Box:
    """An object of no class that is opened."""

    content: Any = None


class Leaves(nn.Module):
    """A layer that puts a penalty somewhere before it computes."""

    def __init__(self, where: str, *, last: bool = False) -> None:
        super().__init__()
        self.where, self.last, self.box = where, last, Box()
        self.w = nn.Parameter(torch.tensor([0.5, 1.0, 2.0]))
        self.inner = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        if self.last:
            y = self.inner(x)
            self.put((x * self.w).square().sum())
            return y
        self.put((x * self.w).square().sum())
        return self.inner(x)

    def put(self, penalty: Tensor) -> None:
        if self.where == "list":
            PUT.append(penalty)
        elif self.where == "object":
            self.box.content = penalty
        else:
            Box.content = penalty

    def take(self) -> Tensor:
        if self.where == "list":
            return PUT.pop()
        return self.box.content if self.where == "object" else Box.content


def shares(layer: Leaves, x: Tensor) -> tuple[Tensor, Tensor]:
    """Return what flows back to x and to w through the layer, in a pass of its own."""
    y = layer(x)
    grads = torch.autograd.grad(y.sum() + layer.take(), [x, layer.w])
    return grads[0], grads[1]


def inputs(*, leaf: bool = True) -> Tensor:
    x = torch.arange(12.0).reshape(4, 3).requires_grad_()
    return x if leaf else x.sin()


@pytest.mark.parametrize("leaf", [True, False])
@pytest.mark.parametrize("reduce", [None, Tensor.clone])
@pytest.mark.parametrize("where", ["list", "object", "class"])
def test_what_is_put_elsewhere_counts_in_the_share(
    where: str, reduce: Any, leaf: bool
) -> None:
    layer, x = Leaves(where), inputs(leaf=leaf)
    model = nn.Sequential(layer)
    expected = shares(layer, x)
    with gradlib.record(model, reduce=reduce) as recording:
        y = model(x)
        # x and w are used outside of the call too, so their totals are others.
        loss = y.sum() + layer.take() + (x * layer.w).sum()
        loss.backward()
    for name in ("", "0"):
        call = recording[name]
        assert_close(call.grad_input[0], expected[0])
        assert not torch.allclose(call.grad_input_total[0], expected[0])
        assert not call.note
    assert_close(recording["0"].param_grads["w"], expected[1])


def test_each_of_several_passes_and_calls_has_its_own() -> None:
    layer = Leaves("list")
    x, other = inputs(), 2 * inputs()
    expected, of_other = shares(layer, x), shares(layer, other)
    with gradlib.record(layer) as recording:
        y = layer(x)
        first = PUT.pop()
        z = layer(other)
        loss = y.sum() + z.sum() + first + PUT.pop()
        loss.backward(retain_graph=True)
        y.sum().backward(retain_graph=True)
        (y.sum() + 2 * first).backward()
    calls = recording.calls("")
    assert_close(calls[0].passes[0].param_grads["w"], expected[1])
    assert_close(calls[1].passes[0].param_grads["w"], of_other[1])
    assert calls[0].passes[1].param_grads["w"] is None
    assert_close(calls[0].passes[2].param_grads["w"], 2 * expected[1])


def test_it_counts_for_the_call_alone_that_put_it() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = Leaves("list")

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x) + self.layer(x)

    model, x = Twice(), inputs()
    expected = shares(model.layer, x)
    with gradlib.record(model) as recording:
        y = model(x)
        _second, first = PUT.pop(), PUT.pop()
        (y.sum() + first).backward()
    calls = recording.calls("layer")
    assert_close(calls[0].param_grads["w"], expected[1])
    assert calls[1].param_grads["w"] is None


def test_what_ran_before_it_was_seen_is_noted_and_found_in_a_later_pass(
    tmp_path: Path,
) -> None:
    layer, x = Leaves("list", last=True), inputs()
    expected = shares(layer, x)
    with gradlib.record(layer) as recording:
        loss = layer(x).sum() + PUT.pop()
        loss.backward(retain_graph=True)
        loss.backward()
    first, second = recording[""].passes
    assert first.param_grads["w"] is None
    assert_close(recording[""].passes[0].param_grads_total["w"], expected[1])
    assert_close(second.param_grads["w"], expected[1])
    assert recording[""].note == notes.LEFT_ELSEWHERE.format(0)
    recording.save(tmp_path / "step")
    assert gradlib.load_recording(tmp_path / "step")[""].note == recording[""].note


def test_a_cast_that_autocast_may_share_is_noted() -> None:
    class Casts(Leaves):
        def forward(self, x: Tensor) -> Tensor:
            self.put((x @ self.w).float().sum())
            return self.inner(x)

    layer, x = Casts("list"), inputs()
    with gradlib.record(layer) as recording:
        with torch.autocast("cpu", torch.bfloat16):
            y = layer(x)
        loss = y.float().sum() + PUT.pop()
        loss.backward(retain_graph=True)
        loss.backward()
    call = recording[""]
    assert all(notes.LEFT_ELSEWHERE.format(it) in call.note for it in (0, 1))
    assert "through this call" not in call.note
    assert call.passes[1].param_grads_total["w"] is not None


def test_verify_says_that_gradients_came_from_elsewhere() -> None:
    layer = Leaves("list")
    with gradlib.record(layer) as recording:
        (layer(inputs()).sum() + PUT.pop()).backward()
    reasons = {it.reason for it in recording.verify().disagreements}
    PUT.clear()
    assert reasons == {
        "gradients may have come by another way too: what it put elsewhere, as into a "
        "global list"
    }


def test_what_leads_to_nothing_of_the_call_is_not_spoken_of() -> None:
    scale = torch.tensor(2.0, requires_grad=True)

    class Outside(Leaves):
        def forward(self, x: Tensor) -> Tensor:
            PUT.append(scale.square())
            return super().forward(x)

    layer, x = Outside("object"), inputs()
    with gradlib.record(layer) as recording:
        y = layer(x)
        (y.sum() + PUT.pop() + layer.take()).backward()
    assert not recording[""].note
    assert scale.grad is not None
