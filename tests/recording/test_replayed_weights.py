"""A replay has the weights, buffers and modes of the recorded call."""

from typing import Any, cast

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.testing import assert_close
from torch.utils.checkpoint import checkpoint

import gradlib

from .replayed import assert_replays, loss_of, replays


@pytest.mark.parametrize("used", [True, False])
def test_a_parameter_with_two_owners(used: bool) -> None:
    """Each call has its own share, and both have one total, as without a recorder."""

    class Pair(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(3, 3, bias=False), nn.Linear(3, 3)
            self.b.weight = self.a.weight
            if used:
                self.weight = self.a.weight

        def forward(self, x: Tensor) -> Tensor:
            y = self.b(torch.tanh(self.a(x)))
            return F.linear(y, self.weight) if used else y

    model = Pair()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x, totals = torch.randn(4, 3, requires_grad=True), []
    with gradlib.record(model) as recording:
        for _ in range(2):
            optimizer.zero_grad()
            loss_of(model(x)).backward()
            totals.append(cast(Tensor, model.a.weight.grad).clone())
            optimizer.step()
    owners = ["a", "b", ""] if used else ["a", "b"]
    for forward, total in zip(recording.forwards, totals, strict=True):
        shares = {name: forward[name].param_grads["weight"] for name in owners}
        inner = shares["a"] + shares["b"]
        assert_close(shares.get("", inner), total)
        assert (shares["a"] - shares["b"]).norm() > 0.1
        for name in owners:
            assert_close(forward[name].param_grads_total["weight"], total)
    assert_replays(recording, model)
    assert recording.verify(numerical=True).agreed == len(recording)
    assert recording.compare(recording).ok
    frame = recording.to_frame()
    norms = list(frame[frame["name"] == "a"]["param_grads_total"])
    assert norms == pytest.approx([total.norm().item() for total in totals])


@pytest.mark.cpu
def test_weights_of_each_step_also_where_they_change_behind_torchs_back() -> None:
    model: Any = nn.Linear(3, 2)
    with gradlib.record(model) as recording:
        for _ in range(3):
            model(torch.randn(4, 3, requires_grad=True)).square().sum().backward()
            for parameter in model.parameters():
                parameter.data.sub_(parameter.grad)
                parameter.grad = None
    assert_replays(recording, model)


@pytest.mark.parametrize("shared", [False, True])
def test_a_dtype_that_is_changed_in_the_block(shared: bool) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Tanh())
    if shared:  # then torch cannot share it with what is kept
        model.share_memory()
    x = torch.randn(3, 4)
    with gradlib.record(model) as recording:
        loss_of(model(x)).backward()
        model.zero_grad()
        model.double()
        loss_of(model(x.double())).backward()
    assert recording.verify().agreed == len(recording)
    assert_replays(recording, model)


@pytest.mark.parametrize("shared", [False, True])
def test_weights_that_are_given_other_data(shared: bool) -> None:
    model = nn.Linear(3, 2)
    if shared:  # then nothing tells of it, as on a GPU, but where the data is
        model.share_memory()
    x = torch.randn(4, 3, requires_grad=True)
    with gradlib.record(model) as recording:
        for _ in range(3):
            loss_of(model(x)).backward()
            for parameter in model.parameters():
                parameter.data = parameter.data * 2
    assert recording.verify().agreed == 3
    assert_replays(recording, model)


@pytest.mark.parametrize("shared", [False, True])
def test_weights_of_a_module_that_is_never_called(shared: bool) -> None:
    model = nn.MultiheadAttention(4, 2)  # it has one, and uses its weights
    if shared:
        model.share_memory()
    with gradlib.record(model) as recording:
        for _ in range(3):
            x = torch.randn(2, 3, 4, requires_grad=True)
            loss_of(model(x, x, x)[0]).backward()
            with torch.no_grad():
                model.out_proj.weight.mul_(2)
    assert recording.verify().agreed == len(recording) == 3
    assert_replays(recording, model)


@pytest.mark.cpu  # where NumPy has the same memory
def test_weights_that_numpy_writes_to_after_a_replay() -> None:
    model = nn.Linear(3, 2)
    with gradlib.record(model) as recording:
        for _ in range(3):
            loss_of(model(torch.randn(4, 3, requires_grad=True))).backward()
            assert recording.verify().ok
            model.weight.detach().numpy()[...] *= 2
    assert recording.verify().agreed == len(recording) == 3


@pytest.mark.cpu  # where NumPy has the same memory
def test_plain_tensors_that_numpy_writes_to_stand_in_for_weights() -> None:
    model = nn.Linear(3, 2)
    weights = {"weight": torch.randn(2, 3), "bias": torch.zeros(2)}
    with gradlib.record(model) as recording:
        for _ in range(3):
            x = torch.randn(4, 3, requires_grad=True)
            loss_of(torch.func.functional_call(model, weights, (x,))).backward()
            weights["weight"].numpy()[...] *= 2
    assert recording.verify().agreed == len(recording) == 3


@pytest.mark.parametrize("frozen", [False, True])
def test_weights_that_a_forward_puts_in_for_one_call(frozen: bool) -> None:
    class Borrows(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(3, 3)
            self.fc.bias.requires_grad_(not frozen)

        def forward(self, x: Tensor) -> Tensor:
            others = {"weight": 2 * self.fc.weight, "bias": torch.ones(3)}
            h = torch.func.functional_call(self.fc, others, (x,))
            return self.fc(h)

    model = Borrows()
    with gradlib.record(model) as recording:
        for _ in range(2):
            loss_of(model(torch.randn(4, 3, requires_grad=True))).backward()
    assert recording.verify().agreed == len(recording) == 6
    assert_replays(recording, model)


def test_weights_that_a_forward_puts_into_what_is_in_a_container() -> None:
    class Scales(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
            self.scale = nn.Parameter(torch.tensor(2.0))

        def forward(self, x: Tensor) -> Tensor:
            scaled = {k: v * self.scale for k, v in self.inner.named_parameters()}
            h = torch.func.functional_call(self.inner, scaled, (x,))
            return h + self.inner(x)

    model = Scales()
    with gradlib.record(model) as recording:
        for _ in range(2):
            loss_of(model(torch.randn(4, 3, requires_grad=True))).backward()
    assert recording.verify().agreed == len(recording) == 18
    assert_replays(recording, model)


@pytest.mark.parametrize("reentrant", [False, True])
def test_weights_that_a_forward_puts_in_inside_of_a_checkpoint(reentrant: bool) -> None:
    """Tensors that the forward computes without gradients require grad later."""

    class Borrows(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(3, 3)

        def twice(self, x: Tensor) -> Tensor:
            others = {name: 2 * it for name, it in self.fc.named_parameters()}
            for _ in range(2):
                x = torch.func.functional_call(self.fc, others, (self.fc(x),))
            return x

        def forward(self, x: Tensor) -> Any:
            return checkpoint(self.twice, x, use_reentrant=reentrant)

    model = Borrows().double()
    with gradlib.record(model) as recording:
        for _ in range(2):
            x = torch.randn(4, 3, dtype=torch.double, requires_grad=True)
            loss_of(model(x)).backward()
    assert recording.verify(numerical=True).agreed == len(recording) == 10


def test_buffers_of_each_call() -> None:
    seen: list[Tensor] = []

    class Reads(nn.Module):
        def __init__(self, norm: Any) -> None:
            super().__init__()
            self.norm = norm

        def forward(self, x: Tensor) -> Tensor:
            mean = self.norm.running_mean.clone()
            seen.append(mean)
            return self.norm(x) * mean

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(4)
            self.reads = Reads(self.norm)

        def forward(self, x: Tensor) -> Tensor:
            return self.reads(self.norm(x)) + self.reads(x)

    model = Model()
    with gradlib.record(model) as recording:
        loss_of(model(torch.randn(5, 4, requires_grad=True) + 3)).backward()
    assert not torch.equal(seen[0], seen[1])
    assert_replays(recording, model)


def test_frozen_and_thawed_parameters() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(3, 3)

        def forward(self, x: Tensor) -> Tensor:
            # What it computes depends on it.
            return self.fc(x) * (2 if self.fc.weight.requires_grad else 3)

    model = Model()
    with gradlib.record(model) as recording:
        for frozen in (True, False):
            model.fc.weight.requires_grad_(not frozen)
            loss_of(model(torch.randn(2, 3, requires_grad=True))).backward()
    assert_replays(recording, model)
    assert recording["fc", 0].replay().param_grads["weight"] is None
    assert recording["fc", 1].replay().param_grads["weight"] is not None


def test_modes_of_each_forward() -> None:
    model = nn.Sequential(nn.Linear(3, 8), nn.Dropout(0.5))
    with gradlib.record(model) as recording:
        for training in (True, False):
            model.train(training)
            loss_of(model(torch.ones(2, 3))).backward()
    assert_replays(recording, model)
    assert not model.training


def test_modules_of_one_class_with_settings_of_their_own() -> None:
    model = nn.Sequential(nn.Linear(3, 8), nn.Dropout(0.1), nn.Dropout(0.9))
    recording = replays(model, torch.randn(4, 3, requires_grad=True))
    assert_replays(recording, model)
    assert recording.verify().agreed == 4


def test_attributes_keep_their_order_around_a_replay() -> None:
    model: Any = nn.Linear(3, 3)
    model.note = 1
    with gradlib.record(model) as recording:
        model(torch.ones(2, 3)).sum().backward()
    weight = model.weight.detach()
    del model.weight, model.note
    model.weight, model.note = weight, 1  # the first is no parameter, and goes for it
    before = [*vars(model)]
    recording[""].replay()
    assert [*vars(model)] == before
