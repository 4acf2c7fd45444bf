"""A program of two processes that train a model, each on data of its own.

What it records is compared with the recording of an unsharded copy for the same data,
and that recording with autograd. Its argument is a file that both share.
"""

import copy
import os
import sys
import warnings
from datetime import timedelta
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import Shard, distribute_module, distribute_tensor
from torch.testing import assert_close

import gradlib


class Net(nn.Module):
    """Parameters of its own, and a child that is sharded separately."""

    def __init__(self) -> None:
        super().__init__()
        self.first: nn.Module = nn.Linear(3, 5)
        self.second = nn.Linear(5, 2)
        self.scale = nn.Parameter(torch.randn(5))

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.tanh(self.first(x)) * self.scale)


def newer(model: Net, **options: Any) -> nn.Module:
    fully_shard(model.first, **options)
    return cast(Any, fully_shard(model))


def older(model: Net, **options: Any) -> nn.Module:
    def sharded(part: nn.Module) -> nn.Module:
        on = torch.device("cpu")
        return FullyShardedDataParallel(part, device_id=on, **options)

    model.first = sharded(model.first)
    return sharded(model)


WAYS: dict[str, partial[nn.Module]] = {
    "fully_shard": partial(newer),
    "fully_shard, kept whole": partial(newer, reshard_after_forward=False),
    "FullyShardedDataParallel, flat": partial(older, use_orig_params=False),
    "FullyShardedDataParallel": partial(older, use_orig_params=True),
}

DIVISOR = 2 if torch.__version__ >= "2.9" else 1
"""Of gradients the newer kind takes the mean; in torch 2.8, by gloo, the sum."""

FIELDS = ("args", "output", "grad_input", "grad_output")
OWN = ("param_grads", "param_grads_total")


def train(model: nn.Module, inputs: list[Tensor]) -> gradlib.Recording:
    """Run two steps with one forward each, and one step with two forwards."""
    with gradlib.record(model) as recording:
        for x in inputs[:2]:
            model(x).square().sum().backward()
        (model(inputs[2]).square().sum() + model(inputs[3]).sum()).backward()
    return recording


def name_inside(name: str) -> str:
    """Return the name that a module has where nothing wraps it."""
    return ".".join(it for it in name.split(".") if it != "_fsdp_wrapped_module")


def check(shard: partial[nn.Module], rank: int) -> None:
    """Compare a sharded model with an unsharded copy."""
    torch.manual_seed(0)
    plain = Net()
    model = shard(copy.deepcopy(plain))
    torch.manual_seed(1 + rank)
    inputs = [torch.randn(4, 3, requires_grad=True) for _ in range(4)]
    found = train(model, inputs)
    grads = [x.grad for x in inputs]
    for x in inputs:
        x.grad = None
    expected = train(plain, inputs)
    assert_close(grads, [x.grad for x in inputs])

    calls = {
        (name_inside(it.name), it.index): it for it in found
    }  # the innermost module
    assert len(calls) == len(expected) == 12
    for wanted in expected:
        call = calls[wanted.name, wanted.index]
        assert call.module_type in (wanted.module_type, f"FSDP{wanted.module_type}")
        assert call.note == wanted.note
        for field in FIELDS:
            assert_close(getattr(call, field), getattr(wanted, field))
        # The older FSDP replaces a module's parameters in each forward.
        several = shard.func is older and wanted.index > 1
        for field in OWN[: 1 if several else 2]:
            assert_close(getattr(call, field), getattr(wanted, field))
    for name, parameter in plain.named_parameters():
        owner, _, key = name.rpartition(".")
        shares = [it.param_grads[key] for it in expected.calls(owner)]
        grad = sum(shares)
        assert_close(grad, parameter.grad)
        distributed.all_reduce(grad)
        if shard.func is newer:
            sharded: Any = model.get_parameter(name).grad
            assert_close(sharded.full_tensor(), grad / DIVISOR)


def check_whole(rank: int) -> None:
    """Compare a model that each process holds whole, as in DistributedDataParallel."""
    torch.manual_seed(0)
    plain = Net()
    parallel = nn.parallel.DistributedDataParallel(copy.deepcopy(plain))
    torch.manual_seed(1 + rank)
    x = torch.randn(4, 3)
    plain(x).square().sum().backward()
    with gradlib.record(parallel) as recording:
        parallel(x).square().sum().backward()
    for name, parameter in plain.named_parameters():
        owner, _, key = name.rpartition(".")
        call = recording[f"module.{owner}".removesuffix(".")]
        assert parameter.grad is not None
        assert_close(call.param_grads[key], parameter.grad)  # of this process alone
        assert_close(call.param_grads_total[key], parameter.grad)
        distributed.all_reduce(parameter.grad)
        mean = parameter.grad / distributed.get_world_size()
        assert_close(parallel.module.get_parameter(name).grad, mean)


def check_parts(rank: int) -> None:
    """Check that numbers about DTensors are those of this process's part.

    The processes ask one after the other, so communication would hang.
    """
    mesh = init_device_mesh("cpu", (2,))
    torch.manual_seed(0)
    model = distribute_module(nn.Sequential(nn.Linear(3, 2)), mesh)
    x = distribute_tensor(torch.randn(6, 3), mesh, [Shard(0)])
    with gradlib.record(model) as recording:
        y = model(x)
        y.square().sum().backward()
    if rank == 0:
        part = y.detach().to_local()
        assert part.shape == (3, 2)
        said = f"[3, 2] of [6, 2]  {2 * part.norm().item():.3g} "
        assert said in str(recording), f"{said!r} is not in\n{recording}"
        assert_close(gradlib.tensor_stats(y.detach()).norm, part.norm().item())
        assert recording.compare(recording).ok
        assert recording.first_nonfinite() is None
    distributed.barrier()


def main(rank: int, store: str) -> None:
    """Check every way of sharding, and of not sharding."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")  # from torch: one of the two FSDPs is the older one
    distributed.init_process_group(
        "gloo",
        init_method=f"file://{store}",
        rank=rank,
        world_size=2,
        timeout=timedelta(seconds=60),
    )
    for name, shard in WAYS.items():
        try:
            check(shard, rank)
        except Exception as error:
            error.add_note(f"With {name}, in process {rank}.")
            raise
    check_whole(rank)
    check_parts(rank)
    distributed.destroy_process_group()


if __name__ == "__main__":
    other = os.fork()  # both need what has been imported, which takes the longest
    main(1 if other else 0, sys.argv[1])
    failed = other and os.waitpid(other, 0)[1]
    os._exit(bool(failed))  # tearing torch down aborts one process in a hundred
