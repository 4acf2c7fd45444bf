"""Modes of somebody's see what the model computes, and nothing of the recorder's."""

from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

import gradlib
from gradlib.recording import notes


class Counts(TorchDispatchMode):
    """Counts what is computed, but for what only gives a tensor another name."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: Counter[str] = Counter()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Count it."""
        if "detach" not in str(func):
            self.seen[str(func)] += 1
        return func(*args, **(kwargs or {}))


class Disturbs(TorchDispatchMode):
    """Adds noise to every copy and product."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Add it."""
        result = func(*args, **(kwargs or {}))
        if "clone" in str(func) or "addmm" in str(func):
            return result + 1e-3 * torch.randn_like(result)
        return result


def model() -> nn.Module:
    torch.manual_seed(1)
    layers = nn.Linear(3, 3), nn.Tanh(), nn.Dropout(0.5), nn.Linear(3, 1)
    return nn.Sequential(*layers)


def gradients(net: nn.Module, mode: TorchDispatchMode) -> list[Any]:
    torch.manual_seed(2)
    with mode:
        net(torch.ones(4, 3)).square().sum().backward()
    return [it.grad for it in net.parameters()]


def test_a_mode_counts_what_the_model_computes() -> None:
    plain, recorded = Counts(), Counts()
    gradients(model(), plain)
    with gradlib.record(net := model()) as recording:
        gradients(net, recorded)
    assert recorded.seen == plain.seen
    assert recording.verify().ok


def test_a_mode_that_draws_random_numbers() -> None:
    plain = gradients(model(), Disturbs())
    with gradlib.record(net := model()):
        recorded = gradients(net, Disturbs())
    assert all(map(torch.equal, recorded, plain))


def traced(net: nn.Module) -> torch.fx.GraphModule:
    make: Callable[..., Any] = make_fx
    return make(net)(torch.ones(4, 3))


def test_what_make_fx_traces_is_the_model_alone() -> None:
    net = model().eval()
    plain = traced(net)
    with gradlib.record(net) as recording:
        found = traced(net)
    assert [str(it.target) for it in found.graph.nodes] == [
        str(it.target) for it in plain.graph.nodes
    ]
    assert {call.note for call in recording} == {notes.STAND_INS}


@pytest.mark.cpu
def test_what_make_fx_traces_after_a_weight_was_read() -> None:
    net = nn.Linear(3, 3)
    with gradlib.record(net):
        net(torch.ones(4, 3))
        net.weight.numpy(force=True)
        found = traced(net)
    assert torch.equal(found(torch.ones(4, 3)), net(torch.ones(4, 3)))


def test_an_expanded_input_is_kept_expanded() -> None:
    class Masked(nn.Module):
        def forward(self, x: Tensor, mask: Tensor) -> Tensor:
            return x * mask[0, 0, :3]

    mask = torch.ones(4, 1, 1).expand(4, 2**40, 4)  # 64 TB, if it were copied
    x = torch.ones(3, requires_grad=True)
    with gradlib.record(net := Masked()) as recording:
        net(x, mask).sum().backward()
    kept = recording[""].args[1]
    assert kept.stride() == mask.stride()
    assert kept.data_ptr() != mask.data_ptr()
    assert recording.verify().ok


class KeepsWhatItMade(nn.Module):
    """Has each of its outputs in an attribute until the next."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)
        self.last: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        made = self.layer(x).abs().clone() * 2
        self.last = made.detach() * 1.0
        return made.sin()


class SavesSome(nn.Module):
    """Calls a module twice, in a checkpoint that saves what some operation makes."""

    def __init__(self, saved: str) -> None:
        super().__init__()
        self.inner = KeepsWhatItMade()
        self.saved = saved

    def twice(self, x: Tensor) -> Tensor:
        return self.inner(self.inner(x).clone()).abs().cos()

    def forward(self, x: Tensor) -> Any:
        def policy(_: object, operation: Any, *__: Any, **___: Any) -> CheckpointPolicy:
            is_saved = operation.overloadpacket.__name__ == self.saved
            return CheckpointPolicy(2 * (not is_saved))

        context_fn = partial(create_selective_checkpoint_contexts, policy)
        return checkpoint(self.twice, x, use_reentrant=False, context_fn=context_fn)


@pytest.mark.parametrize("saved", ["clone", "abs"])
@pytest.mark.parametrize(
    "options",
    [{}, {"reduce": gradlib.tensor_stats}, {"device": "cpu"}, {"keep": ["args"]}],
    ids=["all", "reduce", "device", "args"],
)
def test_a_checkpoint_saves_what_the_model_computes(
    saved: str, options: dict[str, Any]
) -> None:
    torch.manual_seed(3)
    net, x = SavesSome(saved), torch.randn(4, 3)

    def gradients() -> list[Any]:
        net.zero_grad()
        net(x).square().sum().backward()
        return [it.grad for it in net.parameters()]

    plain = gradients()
    with gradlib.record(net, **options):
        recorded = gradients()
    assert all(map(torch.equal, recorded, plain))


class SeesAll(Counts):
    """Counts what only gives a tensor another name, too."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Count it."""
        self.seen[str(func)] += 1
        return func(*args, **(kwargs or {}))


class Hidden(nn.Module):
    """Returns what it makes another output of, by two uses; and a view, overwritten."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)
        self.cut = nn.Flatten(0)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        hidden = self.layer(x)
        base = hidden * 2
        part = self.cut(base[:2])
        part.mul_(2)
        return hidden, hidden.sin() + hidden + base.sum() + self.layer(hidden).sum()


@pytest.mark.parametrize("reduces", [False, True])
def test_no_mode_sees_what_is_added_up(reduces: bool) -> None:
    options: Any = {"reduce": gradlib.tensor_stats} if reduces else {}

    def seen(net: nn.Module) -> Counter[str]:
        hidden, result = net(x)
        with SeesAll() as mode:
            (hidden.sum() + result.sum()).backward()
        with mode:
            hidden, result = net(x)
        (hidden.sum() + result.sum()).backward()
        return mode.seen

    x = torch.randn(4, 3)
    plain = seen(Hidden())
    recorder = gradlib.record(net := Hidden(), **options)
    with recorder:
        assert seen(net) == plain


class Functions(TorchFunctionMode):
    """Sees every function of torch, and does with its result what it is told to."""

    def __init__(self, change: Callable[[Any], Any] = lambda result: result) -> None:
        super().__init__()
        self.seen: list[str] = []
        self.change = change

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """See it."""
        self.seen.append(func.__name__)
        return self.change(func(*args, **(kwargs or {})))


def one_more(result: Any) -> Any:
    return result + 1 if isinstance(result, Tensor) else result


def chance(result: Any) -> Any:
    return one_more(result) if torch.rand(()) < 0.5 else result


@pytest.mark.parametrize("change", [lambda it: it, one_more, chance])
def test_no_mode_sees_functions_of_the_recorder(change: Any) -> None:
    net, x = model().eval(), torch.ones(4, 3)

    def result() -> tuple[list[str], Tensor]:
        torch.manual_seed(5)
        with Functions(change) as mode:
            y = net(x)
        return mode.seen, y

    names, y = result()
    with gradlib.record(net) as recording:
        seen, again = result()
        again.sum().backward()
    assert seen == names
    assert torch.equal(again, y)
    assert torch.equal(recording[""].args[0], x)
    assert torch.equal(recording[""].output, y)
    assert recording["0"].param_grads is not None


def test_a_default_device_stays_in_force_in_a_reduction() -> None:
    devices: list[torch.device] = []

    def reduced(tensor: Tensor) -> Tensor:
        devices.append(torch.zeros(1).device)
        return tensor.sum()

    net = nn.Linear(3, 3)
    with (
        gradlib.record(net, reduce=reduced),
        torch.device("meta"),
        Functions() as mode,
    ):
        net(torch.ones(4, 3, device=net.weight.device))
    assert {it.type for it in devices} == {"meta"}
    assert "sum" not in mode.seen


def test_modes_are_in_force_again_where_a_reduction_raises_or_sets_a_device() -> None:
    net = nn.Linear(3, 3)
    x = torch.ones(4, 3, device=net.weight.device)

    def sets(tensor: Tensor) -> Tensor:
        torch.set_default_device(tensor.device)
        return tensor.norm()

    def raises(_: Tensor) -> Tensor:
        raise ZeroDivisionError

    before = torch.get_default_device()
    is_set = bool(_get_current_function_mode_stack())
    with Functions() as mode:
        try:
            with gradlib.record(net, reduce=sets):
                net(x)
            assert _get_current_function_mode_stack()[-1] is mode
            assert torch.get_default_device() == x.device
            with pytest.raises(ZeroDivisionError), gradlib.record(net, reduce=raises):
                net(x)
            assert _get_current_function_mode_stack()[-1] is mode
        finally:
            torch.set_default_device(before if is_set else None)
