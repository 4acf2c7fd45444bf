"""Forwards that change their arguments, and calls with unusual tensors."""

import copy
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from functools import partial
from typing import Any, cast
from unittest.mock import MagicMock

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing import assert_close
from torch.utils.checkpoint import checkpoint

import gradlib
from gradlib import values
from gradlib.recorder import forward_graph, module_calls
from gradlib.recorder.attached import Attached
from gradlib.recording import notes

from ..steps import python_steps


class PopsFromDict(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 3)

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        labels = batch.pop("labels")
        return nn.functional.cross_entropy(self.fc(batch["input"]), labels)


def test_a_forward_that_takes_from_its_batch() -> None:
    model = PopsFromDict()
    alone = copy.deepcopy(model)

    def batch() -> dict[str, Tensor]:
        return {"input": torch.ones(3, 4), "labels": torch.tensor([0, 1, 2])}

    with gradlib.record(model) as recording:
        model(batch()).backward()
    alone(batch()).backward()
    ours, theirs = model.fc.weight.grad, alone.fc.weight.grad
    assert ours is not None
    assert theirs is not None
    assert torch.equal(ours, theirs)
    assert recording[""].grad_input[0] == {"input": None, "labels": None}
    assert "args[0]['labels'] does not require grad" in recording[""].note
    assert len(recording.verify().skipped) == 0


class PopsFromList(nn.Module):
    def forward(self, items: list[Tensor]) -> Tensor:
        mask = items.pop(0)
        return (items[0] * mask).sum()


def test_gradients_stay_with_the_inputs_they_are_of() -> None:
    model = PopsFromList()
    x = torch.ones(2, requires_grad=True)
    with gradlib.record(model) as recording:
        model([torch.tensor([2.0, 3.0]), x]).backward()
    of_mask, of_x = recording[""].grad_input[0]
    assert of_mask is None
    assert_close(of_x, x.grad)
    assert recording[""].note == "args[0][0] does not require grad"
    assert recording.verify().disagreements == ()


class Wakens(nn.Module):
    """Takes its input out of a list, and has it require grad."""

    def forward(self, items: list[Tensor]) -> Tensor:
        x = items.pop().requires_grad_()
        (force,) = torch.autograd.grad((x**3).sum(), x, create_graph=True)
        return force.sum()


def test_an_input_that_a_call_takes_out_and_wakens() -> None:
    model = Wakens()
    x = torch.tensor([1.0, 2.0])
    with gradlib.record(model) as recording:
        model([x]).backward()
    (call,) = recording
    assert_close(call.passes[-1].grad_input_total[0][0], x.grad)


def test_an_argument_that_a_hook_drops() -> None:
    class Two(nn.Module):
        def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
            return x * 2 if mask is None else x * mask

    model = Two()
    model.register_forward_pre_hook(lambda _, args: (args[0],))
    with gradlib.record(model):
        output = model(torch.ones(1), torch.full((1,), 5.0))
    assert output.item() == 2


class Accumulates(nn.Module):
    """Adds to what it has left, whose graph is another thread's."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones(1))
        self.sum: Any = 0.0

    def forward(self, x: Tensor) -> Tensor:
        self.sum = x * self.w + self.sum
        return self.sum


@pytest.mark.parametrize("has_accelerator", [False, True])
@pytest.mark.parametrize("main_first", [False, True])
def test_what_another_thread_has_left_is_no_part_of_a_call(
    main_first: bool, has_accelerator: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if has_accelerator:  # whose passes may have made nodes in its own thread
        for name in ("has_accelerator", "is_passed_elsewhere"):
            monkeypatch.setattr(forward_graph, name, lambda *_: True)
    model = Accumulates()
    y = torch.ones(0)
    with gradlib.record(model) as recording:
        for i, x in enumerate((1.0, 10.0, 100.0)):
            x = torch.tensor([x])
            if main_first and i == 0:
                y = model(x)
                continue
            with ThreadPoolExecutor(1) as pool:  # each in a thread of its own
                y = pool.submit(model, x).result()
        y.sum().backward()
    assert [call.param_grads["w"].item() for call in recording] == [1, 10, 100]


def test_a_shallow_copy_shares_hooks_and_has_calls_of_its_own() -> None:
    layer = nn.Linear(2, 2)
    model = nn.Sequential(layer, nn.Tanh(), copy.copy(layer))
    x = torch.ones(1, 2)
    with gradlib.record(model) as recording:
        model(x).sum().backward()
        copy.copy(layer)(x)  # this copy is no module of the model
    assert sorted(call.name for call in recording) == ["", "0", "1", "2"]
    shares = [call.param_grads["weight"] for call in recording if call.param_grads]
    assert_close(sum(shares), layer.weight.grad)
    assert not layer._forward_hooks
    assert not layer._forward_pre_hooks


@pytest.mark.cpu
@pytest.mark.parametrize("inside", [False, True])
def test_a_loss_whose_threads_read_what_was_kept(inside: bool) -> None:
    loss: Any = nn.CTCLoss(reduction="none")
    model: Any = nn.Sequential(nn.LogSoftmax(2))

    class Whole(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model, self.loss = model, loss

        def forward(self, x: Tensor, *rest: Tensor) -> Tensor:
            return self.loss(self.model(x), *rest)

    x, y = (torch.randn(10, 3, 6, requires_grad=True) for _ in range(2))
    y.data.copy_(x.data)
    lengths = torch.full((3,), 10), torch.full((3,), 4)
    rest = torch.randint(1, 6, (3, 4)), *lengths
    with gradlib.record(Whole() if inside else loss):
        loss(model(x), *rest).sum().backward()
    loss(model(y), *rest).sum().backward()
    assert x.grad is not None
    assert y.grad is not None
    assert torch.equal(x.grad, y.grad)


@pytest.mark.parametrize("kind", [dict, list])
def test_an_argument_that_holds_itself(kind: Any) -> None:
    class First(nn.Module):
        def forward(self, x: Tensor, _: Any) -> Tensor:
            return x * 2

    holds = kind()
    if kind is dict:
        holds["root"] = holds
    else:
        holds.append(holds)
    x = torch.ones(1, requires_grad=True)
    model = First()
    with gradlib.record(model) as recording:
        model(x, holds).backward()
    assert recording[""].grad_input[0].item() == 2


class Views(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(x)[:, :2]


def test_views_on_the_device_meta() -> None:
    model = Views().to("meta")
    with gradlib.record(model) as recording:
        model(torch.ones(1, 4, device="meta")).sum().backward()
    assert recording[""].grad_output[0].is_meta


@pytest.mark.cpu
def test_views_under_another_default_device() -> None:
    model = Views()
    x = torch.ones(1, 4)
    with gradlib.record(model) as recording, torch.device("meta"):
        model(x).sum().backward()
    assert recording["fc"].param_grads["weight"].device.type == "cpu"


def test_a_mode_in_which_tensors_have_no_values() -> None:
    with FakeTensorMode():
        model = nn.Sequential(nn.Sequential(nn.Linear(2, 2)))
        with gradlib.record(model) as recording:
            model(torch.ones(1, 2)).sum().backward()
    assert {call.note for call in recording} == {notes.STAND_INS}


def test_a_model_that_is_exported_in_the_block() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Tanh())
    x = torch.ones(1, 2)
    with gradlib.record(model) as recording:
        torch.export.export(model, (x,))
        model(x).sum().backward()
    exported = [call for call in recording if call.note == notes.STAND_INS]
    assert len(exported) == len(recording) / 2 == 3
    assert recording.first_nonfinite() is None
    assert str(exported[0])


def test_a_forward_that_leaves_gradients_disabled() -> None:
    class Disables(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            y = x * 2
            torch.set_grad_enabled(False)
            return y

    model = Disables()
    x = torch.ones(1, requires_grad=True)
    try:
        with gradlib.record(model) as recording:
            y = model(x)
            torch.set_grad_enabled(True)
            y.backward()
    finally:
        torch.set_grad_enabled(True)
    (call,) = recording
    assert call.note == ""
    assert_close(cast(Any, call.grad_input[0]), x.grad)


class HasItsOwner(nn.Module):
    def __init__(self, owner: nn.Module) -> None:
        super().__init__()
        self.fc = nn.Linear(3, 3)
        self.owner = owner

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(x) * cast(Any, self.owner).scale


class Owner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = 2.0
        self.part = HasItsOwner(self)

    def forward(self, x: Tensor) -> Tensor:
        return self.part(x)


def test_a_module_that_stands_in_one_of_its_own() -> None:
    model = Owner()
    with gradlib.record(model) as recording:
        model(torch.ones(2, 3)).sum().backward()
    assert [call.name for call in recording] == ["", "part", "part.fc"]
    assert_close(recording["part.fc"].grad_output, (torch.full((2, 3), 2.0),))
    recording["part"].replay()
    assert recording.verify().ok


KEPT = [("param_grads",), ("grad_output", "param_grads"), ("grad_output",)]


@pytest.mark.parametrize("keep", KEPT, ids=" ".join)
def test_a_gradient_penalty_without_the_gradients_of_inputs(keep: Any) -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))
    x = torch.randn(5, 3, requires_grad=True)

    def recorded(**options: Any) -> gradlib.Recording:
        model.zero_grad()
        with gradlib.record(model, **options) as recording:
            (g,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
            g.square().sum().backward()
        return recording

    everything, some = recorded(), recorded(keep=keep)
    assert everything.compare(some).ok
    if "param_grads" in keep:
        for name in ("0", "2"):
            _, penalty = some[name].passes
            weight: Any = model.get_submodule(name).weight
            assert torch.equal(penalty.param_grads_total["weight"], weight.grad)


def test_what_may_be_mutated_though_autograd_has_saved_it() -> None:
    def trained(recorded: bool) -> Tensor:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(3, 3), nn.Sigmoid())
        with (
            gradlib.record(model) if recorded else nullcontext(),
            torch.autograd.graph.allow_mutation_on_saved_tensors(),
        ):
            y = model(torch.randn(2, 3))
            loss = y.sum()
            with torch.no_grad():
                y.mul_(10.0)
            loss.backward()
        return cast(Tensor, model[0].weight.grad)

    assert torch.equal(trained(recorded=True), trained(recorded=False))


def test_an_interrupt_as_gradients_are_switched_off(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    switch = values.enable_grad

    def interrupted(on: bool) -> None:
        switch(on)
        monkeypatch.setattr(values, "enable_grad", switch)
        raise KeyboardInterrupt  # as it may arrive while the function runs

    model, x = nn.Linear(2, 2), torch.ones(1, 2, requires_grad=True)
    monkeypatch.setattr(values, "enable_grad", interrupted)
    try:
        with gradlib.record(model), pytest.raises(KeyboardInterrupt):
            model(x)
        assert torch.is_grad_enabled()
    finally:
        torch.set_grad_enabled(True)


def test_an_interrupt_as_inputs_are_written_down(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, x = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), torch.ones(1, 2)

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    with gradlib.record(model) as recording:
        tree = module_calls.Tree
        monkeypatch.setattr(module_calls, "Tree", interrupted)
        with pytest.raises(KeyboardInterrupt):
            model(x)
        monkeypatch.setattr(module_calls, "Tree", tree)
        model(x).sum().backward()
    assert recording["0"].param_grads["weight"] is not None
    for call in recording:
        assert str(call)
    recording.to_frame()
    recording.verify()


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_late_step_with_checkpoints_costs_no_more(reentrant: bool) -> None:
    layers = nn.ModuleList(nn.Linear(2, 2) for _ in range(3))
    x = torch.ones(1, 2, requires_grad=True)

    def step() -> None:
        h = x
        for layer in layers:
            h = cast(Any, checkpoint)(layer, h, use_reentrant=reentrant)
        h.sum().backward()

    with gradlib.record(layers, keep=["param_grads"]):
        step()
        early = python_steps(step)
        for _ in range(200):
            step()
        assert python_steps(step) < 1.2 * early


def test_a_checkpoint_around_a_model_of_which_parts_are_recorded() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 2))
    x = torch.randn(4, 3, requires_grad=True)
    with gradlib.record(model, modules=["0", "2"]) as recording:
        for _ in range(2):
            cast(Any, checkpoint)(model, x, use_reentrant=True).sum().backward()
    assert [(call.name, call.index) for call in recording] == [
        ("0", 0),
        ("2", 0),
        ("0", 1),
        ("2", 1),
    ]
    shares = [call.param_grads["weight"] for call in recording.calls("0")]
    assert_close(sum(shares), cast(nn.Linear, model[0]).weight.grad)


def test_a_handler_of_signals_that_calls_the_model(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A signal may arrive while a forward ends or a backward pass begins."""
    model = nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 1))
    let_go = Attached.let_go
    interrupted: list[int] = []

    def handle(attached: Attached) -> None:
        if len(interrupted) < 20:
            interrupted.append(1)
            with torch.enable_grad():
                model(torch.ones(1, 2, device=x.device))
        let_go(attached)

    monkeypatch.setattr(Attached, "let_go", handle)
    x = torch.ones(4, 2, requires_grad=True)

    def step() -> None:
        model(x).sum().backward()

    with gradlib.record(model) as recording:
        thread = threading.Thread(target=step, daemon=True)
        thread.start()
        thread.join(60)
        assert not thread.is_alive()
    assert interrupted
    (call,) = [it for it in recording.calls("") if it.output.shape == (4, 1)]
    torch.testing.assert_close(call.grad_output, (torch.ones(4, 1),))
    torch.testing.assert_close(call.grad_input, (x.grad,))


class Hands(nn.Module):
    """Returns what it has beside what it computes."""

    def __init__(self, had: object) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2)
        self.__dict__["had"] = had  # torch takes none of what is gone

    def forward(self, x: Tensor, given: object) -> tuple[Tensor, object, object]:
        return self.layer(x), given, self.had


def of_what_is_gone() -> Any:
    return weakref.proxy(Hands(None))


@pytest.mark.parametrize("made", [of_what_is_gone, partial(MagicMock, spec=Tensor)])
def test_what_stands_for_something_else_is_handed_on(made: Callable[[], Any]) -> None:
    model, odd = Hands(made()), made()
    with gradlib.record(model) as recording:
        y, given, had = model(torch.ones(4, 3), given=odd)
        y.sum().backward()
    assert given is odd
    assert had is model.had
    kept = [*recording[""].kwargs.values(), *recording[""].output[1:]]
    assert [type(it) for it in kept] == [gradlib.NotSaved] * 3
    assert torch.equal(recording["layer"].grad_output[0], torch.ones(4, 2))
    assert recording.verify().agreed == 1
    assert len(recording.verify().skipped) == 1
