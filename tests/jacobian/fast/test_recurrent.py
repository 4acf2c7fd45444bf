"""Rows that go together through LSTMs, whose kernel on a CPU has float32 alone."""

import pytest
import torch
from torch import Tensor, nn

import gradlib
from gradlib.jacobian.fast.stacked.recurrent import SMALL, bytes_of_states
from gradlib.random_state import seed_all

from .operations import ON_CPU, Function, graph_of

pytestmark = pytest.mark.skipif(
    not (ON_CPU and torch.backends.mkldnn.is_available()),
    reason="oneDNN's kernel for an LSTM is there on a CPU, and not on every one",
)

seed_all(0)
LSTM, AGAIN, BARE = (
    nn.LSTM(3, 4, batch_first=True),
    nn.LSTM(3, 4, batch_first=True),
    nn.LSTM(3, 4, bias=False),
)
BOTH = nn.LSTM(3, 4, num_layers=2, bidirectional=True)


def _all_there_is(x: Tensor) -> Tensor:
    y, (h, c) = LSTM(x)
    return y[:, -2] * h[0].sin() + c[0]


LAYERS: dict[str, Function] = {
    "all states": lambda x: LSTM(x)[0],
    "the last state": lambda x: torch.cat([LSTM(x)[1][0][-1], x[:, 0], x[:, 1]], 1),
    "the last state of the cell": lambda x: torch.cat([LSTM(x.sin())[1][1][-1]] * 2, 1),
    "all there is": lambda x: torch.cat([_all_there_is(x), x[:, 0], x[:, 1]], 1),
    "batch second, no bias": lambda x: BARE(x.transpose(0, 1))[0].transpose(0, 1),
    "several, both ways": lambda x: BOTH(x.transpose(0, 1))[0].transpose(0, 1),
    "one begins where another ends": lambda x: AGAIN(x.cos(), LSTM(x)[1])[0],
}


@pytest.mark.parametrize("frozen", [True, False])
@pytest.mark.parametrize("name", LAYERS)
def test_an_lstm(name: str, frozen: bool) -> None:
    for net in (LSTM, AGAIN, BARE, BOTH):
        net.requires_grad_(not frozen)
    x, fn = (
        torch.randn(2, 5, 3, generator=torch.Generator().manual_seed(0)),
        LAYERS[name],
    )
    assert gradlib.plan_jacobian(fn, x).mode == "stacked"
    truth = gradlib.per_sample_jacobian(fn, x, mode="loop")
    torch.testing.assert_close(gradlib.per_sample_jacobian(fn, x), truth)
    found = gradlib.per_sample_jacobian(fn, x, check=False)
    torch.testing.assert_close(found, truth)
    plan = gradlib.plan_jacobian(fn, x)
    little = gradlib.per_sample_jacobian(fn, x, max_bytes=plan.bytes - 1)
    torch.testing.assert_close(little, truth)


@pytest.mark.parametrize("name", LAYERS)
def test_a_batch_of_one(name: str) -> None:
    fn = LAYERS[name]
    for seed in range(6):  # what lies behind the memory of an input may be right
        x = torch.randn(1, 5, 3, generator=torch.Generator().manual_seed(seed))
        found = gradlib.per_sample_jacobian(fn, x, check=False)
        truth = gradlib.per_sample_jacobian(fn, x, mode="loop")
        torch.testing.assert_close(found, truth)
        assert gradlib.plan_jacobian(fn, x).mode == "stacked"


def test_large_states_are_left_to_others() -> None:
    lstm, x = nn.LSTM(3, SMALL // 2), torch.randn(2, 5, 3)

    def fn(x: Tensor) -> Tensor:
        return lstm(x.transpose(0, 1))[0][-1, :, :8]

    assert gradlib.plan_jacobian(fn, x).mode == "stacked"
    assert gradlib.plan_jacobian(fn, torch.randn(3, 5, 3)).mode != "stacked"


def test_what_its_kernel_keeps_is_counted() -> None:
    graph = graph_of(LAYERS["all states"], torch.randn(2, 5, 3))
    (node,) = (it for it in graph.nodes if "RnnLayer" in it.name())
    workspace: Tensor = node._saved_result3  # pyright: ignore  # it has no type
    assert bytes_of_states(node) == 4 * 2 * 5 * 3 + workspace.numel()
    found = gradlib.plan_jacobian(LAYERS["all states"], torch.randn(2, 5, 3))
    assert found.pass_bytes > bytes_of_states(node)


def test_a_weight_from_the_input_is_left_to_others() -> None:
    x = torch.randn(2, 5, 3)
    weights = dict(LSTM.named_parameters())

    def fn(x: Tensor) -> Tensor:
        bias = weights["bias_hh_l0"] + x[0, 0, :1]
        return torch.func.functional_call(LSTM, weights | {"bias_hh_l0": bias}, (x,))[0]

    assert gradlib.plan_jacobian(fn, x, check=False).mode != "stacked"
