"""A step costs the same however long a recording runs; a dropped one is freed."""

import copy
import gc
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

import gradlib

from ..elsewhere import passes_elsewhere
from ..steps import python_steps
from .first_nets import Net, hooks_of


def test_no_tensor_is_kept_alive_by_the_model() -> None:
    net = Net()
    with gradlib.record(net) as recording:
        output = net(torch.randn(4, 3))
        output.sum().backward()
        kept = weakref.ref(recording["fc2"].grad_output[0])
    dead = weakref.ref(output)
    del output
    gc.collect()
    assert dead() is None
    assert kept() is not None
    del recording
    gc.collect()
    assert kept() is None


def test_a_call_asks_once_what_autocast_is_for(monkeypatch: pytest.MonkeyPatch) -> None:
    asked, ask = list[str](), torch.get_autocast_dtype

    def counting(device: str) -> torch.dtype:
        asked.append(device)
        return ask(device)

    net = Net()
    with gradlib.record(net) as recording, torch.autocast("cpu", torch.bfloat16):
        monkeypatch.setattr(torch, "get_autocast_dtype", counting)
        net(torch.randn(4, 3))
        monkeypatch.undo()
    assert len(asked) == len(recording)


@pytest.mark.parametrize("reduce", [None, gradlib.tensor_stats])
def test_a_late_step_costs_no_more_than_an_early_one(reduce: Any) -> None:
    net, costs = Net(), list[int]()
    with gradlib.record(net, reduce=reduce):
        for _ in range(30):
            x = torch.randn(4, 3)
            costs.append(python_steps(lambda x=x: net(x).sum().backward()))
    # Now and then a step lets go of the hooks that are gone of several.
    assert sum(costs[15:30]) <= 1.02 * sum(costs[1:16])


def test_a_pass_costs_the_same_however_many_forwards_wait_for_theirs() -> None:
    net = Net()
    x = torch.randn(4, 3)
    costs: list[int] = []
    with gradlib.record(net):
        for waiting in (3, 30):
            losses = [net(x).sum() for _ in range(waiting)]
            losses[0].backward()
            costs.append(python_steps(losses[1].backward))
            del losses
    assert costs[1] <= 1.02 * costs[0]


@pytest.mark.parametrize("reduce", [None, gradlib.tensor_stats])
def test_a_step_costs_the_same_however_often_its_input_was_used(reduce: Any) -> None:
    net = Net()
    x = torch.randn(4, 3, requires_grad=True)

    def step() -> None:
        net(x).sum().backward()

    with gradlib.record(net, reduce=reduce) as recording:
        costs = [python_steps(step) for _ in range(30)]
    # Now and then a step lets go of the hooks that are gone of several.
    assert sum(costs[15:30]) <= 1.02 * sum(costs[1:16])
    if reduce is None:
        total = sum(it.grad_input_total[0] for it in recording.calls("fc1"))
        assert x.grad is not None
        assert_close(total, x.grad)


def test_a_pass_costs_the_same_however_many_went_through_the_graph() -> None:
    net = Net()
    x = torch.randn(4, 3, requires_grad=True)
    costs: list[int] = []
    with gradlib.record(net, reduce=gradlib.tensor_stats):
        y = net(x).square().sum()
        for _ in range(40):
            ask = partial(torch.autograd.grad, y, x, create_graph=True)
            costs.append(python_steps(ask))
    assert sum(costs[20:40]) <= 1.02 * sum(costs[1:21])


@pytest.mark.parametrize("around", [nullcontext, passes_elsewhere])
def test_a_dropped_recording_is_gone_at_once(
    around: Callable[[], AbstractContextManager[None]],
) -> None:
    net = Net()
    gc.collect()
    gc.disable()  # large tensors must be freed without the garbage collector
    try:
        with gradlib.record(net) as recording, around():
            for _ in range(2):
                net(torch.randn(4, 3)).sum().backward()
        kept = weakref.ref(recording["fc2", 1].grad_output[0])
        del recording
        assert kept() is None
        assert gc.collect() == 0
    finally:
        gc.enable()


def test_a_graph_that_lives_on_keeps_nothing_of_a_recording() -> None:
    net = Net()
    with gradlib.record(net) as recording:
        loss = net(torch.randn(4, 3)).square().sum()
        loss.backward(retain_graph=True)
    call = recording["fc2"]
    kept = [weakref.ref(it) for it in (call.grad_input[0], call.grad_output[0])]
    kept.append(weakref.ref(call.param_grads["weight"]))
    del recording, call
    gc.collect()
    assert [it() for it in kept] == [None] * len(kept)
    loss.backward()


def test_a_forward_that_is_over_is_let_go_inside_the_block() -> None:
    made: list[weakref.ref[object]] = []

    class Double(torch.autograd.Function):
        @staticmethod
        def forward(ctx: object, x: Tensor) -> Tensor:
            made.append(weakref.ref(ctx))
            return 2 * x

    class Model(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return Double.apply(x)

    with gradlib.record(model := Model()):
        model(torch.ones(1, requires_grad=True))
        gc.collect()
        assert made[0]() is None


def test_a_copy_of_the_model_does_not_record() -> None:
    net = Net()
    with gradlib.record(net) as recording:
        twin = copy.deepcopy(net)
        twin(torch.randn(4, 3)).sum().backward()
        assert net.state_dict().keys() == twin.state_dict().keys()
    assert len(recording) == 0
    assert hooks_of(twin) == []


def test_an_operation_of_a_loss_costs_the_same_however_many_calls_there_were() -> None:
    """A pass is searched for what calls have put elsewhere: a loss is not of them."""

    def cost(calls: int, operations: int) -> int:
        net = nn.Sequential(*[nn.Tanh() for _ in range(calls)])
        with gradlib.record(net):
            loss = net(torch.randn(4, 3, requires_grad=True)).sum()
            for _ in range(operations):
                loss = loss.sin()
            return python_steps(loss.backward)

    few, many = (cost(calls, 60) - cost(calls, 10) for calls in (2, 40))
    assert many == few
