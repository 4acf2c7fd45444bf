"""Modes of somebody's see what the model computes, and nothing of the recorder's."""

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode

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
