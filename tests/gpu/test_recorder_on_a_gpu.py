"""The recorder with CUDA tensors: right, and without waiting for the device."""

import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

import gradlib
from benchmarks.waiting import no_waiting
from gradlib.recording import notes
from gradlib.tree import Tree

from ..recorder import passes_inside

pytestmark = pytest.mark.gpu

GPU = "cuda"
LONG = 10**8  # cycles

KEPT: dict[str, dict[str, Any]] = {
    "on the GPU": {},
    "on the CPU": {"device": "cpu"},
    "statistics": {"reduce": gradlib.tensor_stats},
}


class Residual(nn.Module):
    """Two calls of one module, an in-place operation, and a way around them."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)
        self.norm = nn.BatchNorm1d(8)

    def forward(self, x: Tensor) -> Tensor:
        y = self.inner(self.inner(x)).relu_() + 1
        y[:, :2].mul_(2)
        return x + self.norm(y)


def net() -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), Residual(), nn.ReLU(inplace=True))
    return model.append(nn.Linear(8, 2)).to(GPU)


def batch() -> Tensor:
    drawn = torch.Generator("cpu").manual_seed(0)
    return torch.randn(16, 4, generator=drawn, device="cpu").to(GPU)


def step(model: Any, x: Tensor) -> None:
    model.zero_grad()
    model(x).square().sum().backward()


def of(recording: gradlib.Recording) -> list[Any]:
    """Return all values of a recording, on the CPU."""
    found: list[Any] = []
    for call in recording:
        found += [call.args, call.output, call.grad_input_total, call.grad_output]
        found += [call.grad_input, list(call.param_grads_total.values())]
    leaves = Tree.of(found).leaves
    return [it.cpu() for it in leaves if isinstance(it, Tensor)]


def recorded(model: nn.Module, x: Tensor, **options: Any) -> gradlib.Recording:
    with gradlib.record(model, **options) as recording:
        step(model, x)
    return recording


def require_shares(recording: gradlib.Recording, model: nn.Module) -> None:
    """Hold the shares of all calls, added up, against the gradients of the weights."""
    for name, parameter in model.named_parameters():
        owner, _, key = f"module.{name}".rpartition(".")
        shares = [call.param_grads[key].to(GPU) for call in recording.calls(owner)]
        torch.testing.assert_close(sum(shares), parameter.grad, rtol=1e-3, atol=1e-4)


def require_same(a: gradlib.Recording, b: gradlib.Recording) -> None:
    ours, theirs = of(a), of(b)
    assert len(ours) == len(theirs) > 10
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-4)


def test_it_records_what_it_records_on_the_cpu() -> None:
    model, x = net(), batch()
    on_gpu = recorded(model, x)
    assert all(call.output.is_cuda for call in on_gpu)
    require_same(on_gpu, recorded(net().cpu(), x.cpu()))
    for name, parameter in model.named_parameters():
        owner, _, key = name.rpartition(".")
        total = on_gpu.calls(owner)[0].param_grads_total[key]
        assert parameter.grad is not None
        torch.testing.assert_close(total, parameter.grad)
    assert on_gpu.verify().ok


@pytest.mark.parametrize("name", passes_inside.MODELS)
def test_passes_inside_of_a_forward(name: str) -> None:
    """They run in a thread of the device, which numbers what it makes for itself."""
    here, there = (passes_inside.recorded(name, device=it) for it in ("cpu", GPU))
    found, expected = map(passes_inside.gradients, (there, here))
    torch.testing.assert_close(
        found, expected, check_device=False, rtol=1e-9, atol=1e-9
    )
    assert there._block.happened == here._block.happened
    assert there.verify().agreed == here.verify().agreed


def test_what_another_device_may_have_gone_through_is_noted() -> None:
    """The threads of two devices work at once, whatever the numbers of their nodes."""
    put: list[Tensor] = []
    has_run = threading.Event()

    class Puts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(4, 2)

        def forward(self, x: Tensor) -> Tensor:
            copied = x.clone()
            assert copied.grad_fn is not None
            copied.grad_fn.register_hook(lambda *_: has_run.set())
            put.append(copied)
            return self.inner(x)

    def wait(_: Tensor) -> None:
        assert has_run.wait(timeout=60)

    model, x = Puts().to(GPU), batch().requires_grad_()
    with gradlib.record(model) as recording:
        output = model(x).sum().cpu()
        output.register_hook(wait)
        (output + put.pop().sum().cpu()).backward()
    share = model.inner.weight.sum(0).expand(16, 4)
    torch.testing.assert_close(x.grad, share + 1)
    torch.testing.assert_close(recording[""].grad_input[0], share)
    torch.testing.assert_close(recording[""].grad_input_total[0], x.grad)
    assert recording[""].note == notes.LEFT_ELSEWHERE.format(0)


def test_what_is_kept_on_the_cpu_is_pinned_and_right() -> None:
    model, x = net(), batch()
    require_same(recorded(model, x, device="cpu"), recorded(net(), x))
    kept = recorded(model, x, device="cpu")["0"].output
    assert kept.device.type == "cpu"
    assert kept.is_pinned()


def test_what_is_kept_on_the_cpu_is_what_was_there_then() -> None:
    model, x = nn.Sequential(nn.Tanh(), nn.Tanh()), batch()
    expected = x.clone().cpu()
    with gradlib.record(model, device="cpu") as recording:
        torch.cuda._sleep(LONG)
        model(x)
        x.zero_()
        assert torch.equal(recording["0"].args[0], expected)  # inside the block too
        torch.cuda._sleep(LONG)
        model(x + 1)
    assert torch.equal(recording["0", 1].args[0], torch.ones_like(expected))
    assert torch.equal(recording["0", 0].output, recording["1", 0].args[0])


@pytest.mark.parametrize("options", KEPT.values(), ids=KEPT)
def test_nothing_waits_for_the_device(options: dict[str, Any]) -> None:
    model, x = net(), batch()
    recorded(model, x, **options)  # what torch makes at the first use
    with gradlib.record(model, **options) as recording, no_waiting():
        step(model, x)
    assert len(of(recording)) > 10 or "reduce" in options
    with no_waiting(), pytest.raises(RuntimeError):
        x.sum().item()


def test_an_expanded_mask_is_kept_expanded() -> None:
    class Masked(nn.Module):
        def forward(self, x: Tensor, mask: Tensor) -> Tensor:
            return x * mask[0, :4]

    mask = torch.ones(4, 1, device=GPU).expand(4, 2**40)  # 16 TB, if it were copied
    every: list[dict[str, Any]] = [{}, {"device": "cpu"}]
    for options in every:
        with gradlib.record(model := Masked(), **options) as recording:
            model(batch().requires_grad_(), mask).sum().backward()
        assert recording[""].args[1].stride() == mask.stride()


@pytest.mark.parametrize("options", KEPT.values(), ids=KEPT)
def test_a_checkpoint_saves_what_the_model_computes(options: dict[str, Any]) -> None:
    def policy(_: object, operation: Any, *__: Any, **___: Any) -> CheckpointPolicy:
        is_saved = operation.overloadpacket.__name__ in ("clone", "_to_copy", "abs")
        return CheckpointPolicy(2 * (not is_saved))

    class Saves(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = net()

        def forward(self, x: Tensor) -> Any:
            context_fn = partial(create_selective_checkpoint_contexts, policy)
            how: Any = {"use_reentrant": False, "context_fn": context_fn}
            return checkpoint(lambda it: self.inner(it.abs()).clone().cos(), x, **how)

    model, x = Saves().eval(), batch().requires_grad_()
    step(model, x)
    plain = [it.grad for it in model.parameters()]
    recorded(model, x, **options)
    for grad, parameter in zip(plain, model.parameters(), strict=True):
        torch.testing.assert_close(parameter.grad, grad)


def test_statistics_of_many_features_are_those_of_each_moment() -> None:
    """A kernel writes to them without a trace; no small ones, of which a copy is kept.

    In training they change, and the evaluation that follows uses what came of that.
    """
    model = nn.Sequential(nn.Linear(4, 5000), nn.BatchNorm1d(5000)).to(GPU)
    with gradlib.record(model) as recording:
        step(model, batch())
        step(model.eval(), batch())
    assert recording.verify().ok


def test_several_streams() -> None:
    model, x = net(), batch()
    expected = recorded(net(), x)
    side = torch.cuda.Stream()
    with gradlib.record(model) as recording:
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            torch.cuda._sleep(LONG)
            late = x * 1
            model.zero_grad()
            output = model(late)
            output.square().sum().backward()
            late.zero_()
            output.detach().zero_()
        torch.cuda.current_stream().wait_stream(side)
    require_same(recording, expected)


def test_another_stream_writes_to_what_was_kept() -> None:
    model, x = nn.Sequential(nn.Tanh(), nn.Tanh()), batch()
    expected = x.tanh()
    side = torch.cuda.Stream()
    with gradlib.record(model) as recording, torch.no_grad():
        torch.cuda._sleep(LONG)
        output = model[0](x)
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            output.zero_()
        torch.cuda.current_stream().wait_stream(side)
    assert torch.equal(output, torch.zeros_like(output))
    assert torch.equal(recording["0"].output, expected)


@pytest.mark.parametrize("behind", [False, True])
def test_a_write_behind_the_back_of_autograd_is_not_seen(behind: bool) -> None:
    class Doubles(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 2)

        def forward(self, x: Tensor) -> Tensor:
            h = self.first(x)
            with torch.no_grad():
                (h.data if behind else h).mul_(2)
            return self.second(h)

    with gradlib.record(model := Doubles().to(GPU)) as recording:
        model(batch())
    before, now = recording["first"].output, recording["second"].args[0]
    assert torch.equal(now, before if behind else 2 * before)


@pytest.mark.parametrize("reduce", [None, gradlib.tensor_stats])
def test_a_batched_backward_pass_is_left_out(reduce: Any) -> None:
    # It runs in the thread of the device, which knows nothing of the vmap around it.
    model, x = net().eval(), batch().requires_grad_()
    with gradlib.record(model, reduce=reduce) as recording:
        y = model(x)
        v = torch.eye(2, device=GPU)[:, None].expand(2, *y.shape)
        (rows,) = torch.autograd.grad(y, x, v, is_grads_batched=True, retain_graph=True)
        torch.autograd.grad(y.sum(), x)
    assert rows.shape == (2, *x.shape)
    assert len(recording["0"].passes) == 1


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_checkpoint_is_recorded_on_the_device(reentrant: bool) -> None:
    class Again(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            again = checkpoint(self.inner, x, use_reentrant=reentrant)
            assert isinstance(again, Tensor)
            return again.tanh()

    model, x = Again().to(GPU), batch().requires_grad_()
    with gradlib.record(model) as recording:
        model(x).sum().backward()
    (call,) = recording.calls("inner")
    torch.testing.assert_close(call.grad_input[0], x.grad)
    torch.testing.assert_close(call.param_grads["weight"], model.inner.weight.grad)


def test_a_graph_that_is_captured_is_not_recorded_and_is_right() -> None:
    model, x = net().eval(), batch()
    expected = model(x)
    static = torch.zeros_like(x)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        model(static)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with gradlib.record(model) as recording:
        with torch.cuda.graph(graph), torch.no_grad():
            output = model(static)
        static.copy_(x)
        graph.replay()
    torch.testing.assert_close(output, expected)
    assert {call.note for call in recording} == {notes.CAPTURED}


def test_nothing_of_ours_is_captured_with_a_training_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each replay would copy gradients too."""
    model, x = net().eval(), batch()
    step(model, x)
    expected = [it.grad for it in model.parameters()]
    static, side = torch.zeros_like(x), torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step(model, static)
    torch.cuda.current_stream().wait_stream(side)
    model.zero_grad()
    graph = torch.cuda.CUDAGraph()
    with gradlib.record(model), torch.cuda.graph(graph), monkeypatch.context() as patch:
        patch.setattr(Tensor, "clone", lambda _: pytest.fail("it was copied"))
        step(model, static)
    static.copy_(x)
    graph.replay()
    for parameter, grad in zip(model.parameters(), expected, strict=True):
        torch.testing.assert_close(parameter.grad, grad)


# torch's own function keeps its warm-up alive, and says so of itself.
@pytest.mark.filterwarnings("ignore:The AccumulateGrad node's stream:UserWarning")
def test_a_replay_does_not_write_to_what_was_kept() -> None:
    model, x = nn.Sequential(nn.Linear(4, 8), nn.Tanh()).to(GPU), batch()
    expected = [model(x).detach(), model(2 * x).detach()]
    graphed: Any = torch.cuda.make_graphed_callables(model, (x.clone(),))
    with gradlib.record(graphed) as recording:
        graphed(x).sum().backward()
        graphed(2 * x).sum().backward()
    for index in range(2):
        torch.testing.assert_close(recording["", index].output, expected[index])


def test_autocast_with_a_scaler() -> None:
    model, x = net(), batch()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    scaler = torch.amp.GradScaler(GPU, init_scale=2.0**4)
    with gradlib.record(model) as recording:
        with torch.autocast(GPU, torch.float16):
            loss = model(x).float().square().mean()
        scaler.scale(loss).backward()
    assert recording["0"].output.dtype == torch.float16
    total = recording["0"].param_grads_total["weight"]
    assert total.dtype == torch.float32
    grad = next(model.parameters()).grad
    assert grad is not None
    assert torch.equal(total, grad)
    scaler.unscale_(optimizer)
    torch.testing.assert_close(total / 2**4, grad)
    assert recording["0"].replay().param_grads["weight"].isfinite().all()


@pytest.mark.parametrize("layers", [1, 2])
def test_an_lstm_of_cudnn(layers: int) -> None:
    torch.manual_seed(0)
    model = nn.LSTM(4, 6, layers, batch_first=True).to(GPU)
    x = torch.randn(3, 5, 4, device=GPU, requires_grad=True)
    with gradlib.record(model) as recording:
        output, _ = model(x)
        output.square().sum().backward()
    call = recording[""]
    torch.testing.assert_close(call.output[0], output)
    torch.testing.assert_close(call.grad_input[0], x.grad)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(call.param_grads[name], parameter.grad)


def test_an_lstm_of_cudnn_is_replayed() -> None:
    torch.manual_seed(0)
    model = nn.LSTM(4, 6, 2, batch_first=True).to(GPU)
    with gradlib.record(model) as recording:
        model(torch.randn(3, 5, 4, device=GPU))[0].square().sum().backward()
    assert recording.verify(numerical=True, rtol=1e-2, atol=1e-4).ok
    assert "contiguous" not in str(gradlib.hook_report(model, *recording[""].args))


def test_an_lstm_whose_dropout_is_cudnns_is_not_replayed() -> None:
    model = nn.LSTM(4, 6, 2, dropout=0.4).to(GPU)
    with gradlib.record(model) as recording:
        model(torch.randn(3, 5, 4, device=GPU))[0].square().sum().backward()
    with pytest.raises(gradlib.CannotReplayError, match="cuDNN draws from a state"):
        recording[""].replay()


def test_channels_last() -> None:
    last = torch.channels_last
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(inplace=True))
    model.to(memory_format=last).to(GPU)  # type: ignore[call-overload] (torch lacks it)
    x = torch.randn(4, 3, 9, 9, device=GPU).to(memory_format=last)
    for device in (None, "cpu"):
        with gradlib.record(model, device=device) as recording:
            output = model(x)
            output.square().sum().backward()
        assert recording["0"].output.is_contiguous(memory_format=last)
        assert recording["0"].args[0].is_contiguous(memory_format=last)
        torch.testing.assert_close(recording["2"].output.to(GPU), output.detach())


@pytest.fixture
def one_process(tmp_path: Path) -> Iterator[None]:
    """A process group of one, which talks through NCCL."""
    if not torch.distributed.is_nccl_available():
        pytest.skip("this build of torch has no NCCL")
    torch.distributed.init_process_group(
        "nccl",
        init_method=f"file://{tmp_path / 'store'}",
        rank=0,
        world_size=1,
        device_id=torch.device(GPU, 0),
    )
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.usefixtures("one_process")
def test_distributed_data_parallel() -> None:
    model, x = net(), batch()
    parallel = nn.parallel.DistributedDataParallel(model, device_ids=[0])
    recording = recorded(parallel, x)
    require_shares(recording, model)
    assert not any(it._forward_hooks for it in parallel.modules())


def test_data_parallel_on_one_device() -> None:
    model, x = net(), batch()
    parallel = nn.DataParallel(model, device_ids=[0])
    recording = recorded(parallel, x)
    require_shares(recording, model)
    assert not any(it._forward_hooks for it in parallel.modules())


@pytest.mark.parametrize("options", KEPT.values(), ids=KEPT)
def test_nan_is_found(options: dict[str, Any]) -> None:
    model, x = (
        nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)).to(GPU),
        batch(),
    )
    with torch.no_grad():
        next(model[2].parameters())[0, 0] = torch.inf
    x[0, 0] = torch.nan
    with gradlib.record(model, **options) as recording:
        model(x).sum().backward()
    found = recording.first_nonfinite()
    assert found is not None
    assert (found.name, found.direction, found.field) == ("", "forward", "args[0]")


@pytest.mark.usefixtures("one_process")
@pytest.mark.filterwarnings("ignore")  # torch's own: one of the two is the older
@pytest.mark.parametrize("older", [False, True])
def test_fully_sharded_data_parallel(older: bool) -> None:
    from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

    model, x = net(), batch()
    expected = recorded(net(), x)
    if older:
        model = FullyShardedDataParallel(model, device_id=0, use_orig_params=True)
    else:
        fully_shard(model)
    recording = recorded(model, x)
    for call in expected:
        name = f"_fsdp_wrapped_module.{call.name}".rstrip(".") if older else call.name
        found = recording[name, call.index]
        torch.testing.assert_close(found.output, call.output)
        torch.testing.assert_close(found.grad_output, call.grad_output)
