"""What is spread over several processes: who works with it, and who says that not."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gradlib
from gradlib.sharded import is_distributed, is_sharded

pytestmark = [pytest.mark.cpu, pytest.mark.usefixtures("one_process")]


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))


def whole() -> tuple[nn.Module, Tensor]:
    return net(), torch.ones(5, 4)


def fully_sharded() -> tuple[nn.Module, Tensor]:
    """FSDP frees the weights, and takes memory for them anew at each call."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model = net()
    fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
    return model, torch.ones(5, 4)


def distributed() -> tuple[nn.Module, Tensor]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_module, distribute_tensor

    mesh = init_device_mesh("cpu", (1,))
    x = distribute_tensor(torch.ones(5, 4), mesh, [Shard(0)])
    return distribute_module(net(), mesh), x


SPREAD = {"fully sharded": fully_sharded, "distributed": distributed}


def plain(tensor: Any) -> Tensor:
    return tensor.full_tensor() if is_distributed(tensor) else tensor


expands = pytest.mark.skipif(
    torch.__version__ < "2.9",
    reason="in torch 2.8 a DTensor that is expanded has another shape than asked for",
)
EXPANDED = [
    pytest.param(it, marks=expands if it == "distributed" else ()) for it in SPREAD
]


@pytest.mark.parametrize("name", EXPANDED)
def test_a_jacobian_is_right_and_says_that_it_is_not_checked(name: str) -> None:
    expected = gradlib.per_sample_jacobian(*whole())
    model, x = SPREAD[name]()
    with pytest.warns(UserWarning, match="each process holds a part"):
        found = gradlib.per_sample_jacobian(model, x)
    torch.testing.assert_close(plain(found), expected)
    found = gradlib.per_sample_jacobian(model, x, check=False)
    torch.testing.assert_close(plain(found), expected)


@expands
def test_a_jacobian_of_a_distributed_graph() -> None:
    expected = gradlib.per_sample_jacobian(*whole())
    model, x = distributed()
    x.requires_grad_()
    with pytest.warns(UserWarning, match="each process holds a part"):
        found = gradlib.per_sample_jacobian_from_graph(model(x), x)
    torch.testing.assert_close(plain(found), expected)


@pytest.mark.parametrize("name", SPREAD)
def test_a_hook_report_says_that_it_needs_the_whole(name: str) -> None:
    model, x = SPREAD[name]()
    assert is_sharded(model)
    with pytest.raises(gradlib.NotCopyableError, match="before it is sharded"):
        gradlib.hook_report(model, x)


def test_what_is_shown_of_a_recording_is_of_this_process() -> None:
    """To wait for the others would take for ever, where they do not ask."""
    model, x = distributed()
    with gradlib.record(model) as recording:
        model(x).sum().backward()
    assert "[5, 3] of [5, 3]  3.87" in str(recording)  # as of fifteen ones
    assert recording.compare(recording).ok
    assert recording.first_nonfinite() is None
    stats = gradlib.tensor_stats(x)
    assert (stats.shape, stats.norm) == ((5, 4), 20**0.5)


def test_what_is_whole_is_none_of_it() -> None:
    model, x = whole()
    assert not is_sharded(model)
    assert not is_distributed(x)
