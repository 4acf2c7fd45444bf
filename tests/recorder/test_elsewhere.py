"""Tensors that a call stores outside its outputs: in a global list, object or class."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

import gradlib
from gradlib.recording import notes

from ..elsewhere import passes_elsewhere

PUT: list[Tensor] = []


class Box:
    """An object of a class whose attributes the recorder does not open."""

    content: Any = None


class Leaves(nn.Module):
    """A layer that stores a penalty somewhere before it computes its output."""

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
    """Return the gradients of x and w through the layer alone."""
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
        # x and w are used outside of the call too, so their totals differ.
        loss = y.sum() + layer.take() + (x * layer.w).sum()
        loss.backward()
    for name in ("", "0"):
        call = recording[name]
        assert_close(call.grad_input[0], expected[0])
        assert not torch.allclose(call.grad_input_total[0], expected[0])
        assert not call.note
    assert_close(recording["0"].param_grads["w"], expected[1])


@pytest.mark.parametrize("leaf", [True, False])
def test_a_pass_through_nothing_else_is_noted_and_a_later_one_found(leaf: bool) -> None:
    layer, x = Leaves("list"), inputs(leaf=leaf)
    expected = torch.autograd.grad((x * layer.w).square().sum(), [x, layer.w])
    with gradlib.record(nn.Sequential(layer)) as recording:
        layer(x)
        penalty = PUT.pop()
        penalty.backward(retain_graph=True)
        penalty.backward()
    first, second = recording["0"].passes
    assert_close(first.param_grads_total["w"], expected[1])
    assert first.param_grads["w"] is None
    assert_close(second.grad_input[0], expected[0])
    assert_close(second.param_grads["w"], expected[1])
    assert notes.LEFT_ELSEWHERE.format(0) in recording["0"].note


def test_a_pass_that_meets_another_parameter_first_is_searched_in_time() -> None:
    layer, x = Leaves("list"), inputs()
    expected = shares(layer, x)
    other = nn.Linear(2, 2)
    with gradlib.record(nn.ModuleList([layer, other])) as recording:
        loss = layer(x).sum() + PUT.pop()
        (loss + other.weight.square().sum()).backward()
    assert_close(recording["0"].param_grads["w"], expected[1])
    assert not recording["0"].note


def test_a_part_that_has_not_run_yet_is_in_the_share_of_its_own_leaf() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Parameter(torch.ones(3))
            self.b = nn.Parameter(torch.ones(3))

        def forward(self, x: Tensor) -> Tensor:
            PUT.append((x * self.a).sum() + (x * self.b).square().sum())
            return x.sin()

    layer, x = Two(), inputs().detach()
    with gradlib.record(layer) as recording:
        layer(x)
        PUT.pop().backward()
    call = recording[""]
    assert call.param_grads["b"] is None
    assert layer.a.grad is not None
    assert_close(call.param_grads["a"], layer.a.grad)
    assert_close(call.param_grads_total["b"], layer.b.grad)
    assert notes.LEFT_ELSEWHERE.format(0) in call.note


@pytest.mark.cpu  # where passes of both kinds can be made
@pytest.mark.parametrize("where", [{"behind": 1000}, {"ahead": 7}, {"ahead": 1000}])
def test_a_pass_that_runs_in_another_thread_is_searched(where: dict[str, int]) -> None:
    layer, x = Leaves("list"), inputs()
    expected = shares(layer, x)
    with passes_elsewhere(**where), gradlib.record(layer) as recording:
        (layer(x).sum() + PUT.pop() + (x * layer.w).sum()).backward()
    assert_close(recording[""].grad_input[0], expected[0])
    assert_close(recording[""].param_grads["w"], expected[1])
    assert not recording[""].note


@pytest.mark.cpu
def test_passes_of_several_threads_that_run_elsewhere_stay_apart() -> None:
    layers, x = [Leaves("object"), Leaves("object")], inputs()
    expected = [shares(layer, x) for layer in layers]
    together = Barrier(2)

    def train(layer: Leaves) -> None:
        loss = layer(x).sum() + layer.take() + (x * layer.w).sum()
        together.wait(10)
        loss.backward()

    with (
        passes_elsewhere(),
        gradlib.record(nn.ModuleList(layers)) as recording,
        ThreadPoolExecutor(2) as threads,
    ):
        list(threads.map(train, layers))
    for name, (of_x, of_w) in zip("01", expected, strict=True):
        assert_close(recording[name].grad_input[0], of_x)
        assert_close(recording[name].param_grads["w"], of_w)
        assert not recording[name].note


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
        with torch.autocast(x.device.type, torch.bfloat16):
            y = layer(x)
        loss = y.float().sum() + PUT.pop()
        loss.backward(retain_graph=True)
        loss.backward()
    call = recording[""]
    assert all(notes.LEFT_ELSEWHERE.format(it) in call.note for it in (0, 1))
    assert "through this call" not in call.note
    assert call.passes[1].param_grads_total["w"] is not None


def test_verify_does_not_check_what_gradients_came_to_from_elsewhere() -> None:
    layer = Leaves("list")
    with gradlib.record(nn.Sequential(layer)) as recording:
        (layer(inputs()).sum() + PUT.pop()).backward()
    verified = recording.verify()
    PUT.clear()
    assert not verified.disagreements
    (skipped,) = verified.skipped
    assert (skipped.name, skipped.backward) == ("0", None)
    assert skipped.reason == (
        "gradients also came by what it put elsewhere, as into a global list, and a "
        "replay lacks them"
    )


def test_verify_checks_the_passes_to_which_nothing_came_from_elsewhere() -> None:
    layer, x = Leaves("list"), inputs()
    with gradlib.record(layer) as recording:
        y = layer(x).sum()
        (y + PUT.pop()).backward(retain_graph=True)
        y.backward()
    verified = recording.verify()
    PUT.clear()
    assert verified.ok
    assert [it.backward for it in verified.skipped] == [0]


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


class PutsOutput(nn.Module):
    """Stores what its layer returned, and returns something else."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        y = self.inner(x)
        PUT.append(y)
        return 2 * y


@pytest.mark.parametrize("keep", ["grad_output", "param_grads"])
def test_a_pass_through_the_output_of_a_child_did_not_reach_that_of_the_call(
    keep: str,
) -> None:
    """A pass did reach the call, which no kept field shows."""
    model = PutsOutput()
    with gradlib.record(model, keep=keep) as recording:
        model(inputs())
        PUT.pop().sum().backward()
    assert len(recording["inner"].passes) == 1
    assert not recording[""].passes
    said = "no backward pass reached its output in the block"
    assert recording[""].note == said
