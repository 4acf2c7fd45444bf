"""`verify` names tensors that were written to between a call and its backward pass."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gradlib
from gradlib.recording import written_between
from gradlib.recording.why_apart import PERHAPS_WRITTEN, WRITTEN


class Scales(nn.Module):
    """Has a weight, a buffer, and a sum that it writes to itself."""

    shift: Tensor
    sum: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor([1.0, 2.0, 3.0]))
        self.register_buffer("shift", torch.ones(3))
        self.register_buffer("sum", torch.zeros(3))

    def forward(self, x: Tensor) -> Tensor:
        self.sum.data.add_(1)
        return x * self.weight * self.shift


def reasons(recording: gradlib.Recording) -> set[tuple[str, int, str]]:
    """Return the place and reason of each disagreement."""
    found = recording.verify().disagreements
    return {(it.name, it.index, it.reason) for it in found}


# On a GPU the next call does not look at what ``.data`` may have written.
@pytest.mark.parametrize(
    "calls_again", [False, pytest.param(True, marks=pytest.mark.cpu)]
)
def test_a_weight_that_was_written_to(calls_again: bool) -> None:
    torch.manual_seed(0)
    net: Any = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2))
    x = torch.randn(4, 3)
    with gradlib.record(net) as recording:
        loss = net(x).square().sum()
        net[1].weight.data.mul_(2)
        loss.backward()
        if calls_again:  # what stood there shows in the look at its beginning
            net(x)
            net[1].weight.data.mul_(2)
    assert reasons(recording) == {("1", 0, WRITTEN.format("weight"))}
    before = [it.clone() for it in net.parameters()]
    recording.verify()
    assert all(map(torch.equal, net.parameters(), before))


@pytest.mark.parametrize("others", [1, 3])
def test_statistics_that_batch_norm_has_written(others: int) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    with gradlib.record(net) as recording:
        loss = net.eval()(torch.randn(5, 3)).square().sum()
        for _ in range(others):
            net.train()(torch.randn(5, 3))
        loss.backward()
        net(torch.randn(5, 3)).sum().backward()  # these are right
    said = WRITTEN.format("running_mean, running_var")
    assert reasons(recording) == {("1", 0, said)}


@pytest.mark.parametrize("few", [0, 16])
def test_only_what_matters_is_named(few: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(written_between, "FEW", few)
    with gradlib.record(nn.Sequential(scales := Scales())) as recording:
        loss = scales(torch.randn(2, 3, requires_grad=True)).sum()
        scales.shift.data.add_(2)
        loss.backward()
    said = "shift" if few else "shift, sum"  # to find that out takes a replay for each
    assert reasons(recording) == {("0", 0, WRITTEN.format(said))}


@pytest.mark.parametrize(
    ("module", "name"), [("", "0.inner.shift"), ("0", "inner.shift")]
)
def test_it_is_named_as_the_module_of_the_call_names_it(module: str, name: str) -> None:
    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Scales()

        def forward(self, x: Tensor) -> Tensor:
            return self.inner(x)

    net = nn.Sequential(Outer())
    with gradlib.record(net, modules=[module]) as recording:
        loss = net(torch.randn(2, 3, requires_grad=True)).sum()
        net.get_buffer("0.inner.shift").data.add_(2)
        loss.backward()
    assert reasons(recording) == {(module, 0, WRITTEN.format(name))}


@pytest.mark.parametrize("calls_again", [False, True])
def test_of_what_was_written_over_again_it_is_said_that_it_may_be_why(
    calls_again: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    with gradlib.record(nn.Sequential(scales := Scales())) as recording:
        loss = scales(torch.randn(2, 3, requires_grad=True)).sum()
        scales.shift.data.add_(2)
        loss.backward()
        scales.shift.data.add_(2)
        if calls_again:
            scales(torch.randn(2, 3))
            scales.shift.data.add_(2)
    assert reasons(recording) == {("0", 0, PERHAPS_WRITTEN.format("shift"))}
    monkeypatch.setattr(written_between, "FEW", 0)  # each takes a replay
    assert reasons(recording) == {("0", 0, "")}


def test_what_autograd_has_seen_written_is_no_reason() -> None:
    scales = Scales()
    with gradlib.record(nn.Sequential(scales)) as recording:
        loss = scales(torch.randn(2, 3, requires_grad=True)).sum()
        scales.shift.data.add_(2)
        loss.backward()
        with torch.no_grad():
            scales.shift.add_(2)  # as an optimizer would
            scales.weight.add_(2)
    assert reasons(recording) == {("0", 0, "")}


def test_what_stands_there_instead_is_no_reason() -> None:
    with gradlib.record(nn.Sequential(scales := Scales())) as recording:
        loss = scales(torch.randn(2, 3, requires_grad=True)).sum()
        scales.shift.data.add_(2)
        scales.weight = nn.Parameter(torch.zeros(3))
        loss.backward()
        scales(torch.randn(2, 3))  # what stood there shows in the look at its beginning
    assert reasons(recording) == {("0", 0, WRITTEN.format("shift"))}


def test_what_was_written_after_the_pass_is_no_reason() -> None:
    with gradlib.record(nn.Sequential(scales := Scales())) as recording:
        scales(torch.randn(2, 3, requires_grad=True)).sum().backward()
        scales.shift.data.add_(2)
        scales.weight.data.add_(2)
    assert recording.verify().ok
