"""Several threads, devices and processes at once."""

import gc
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

import gradlib

from .truth import Net, grads_of, loss_of, run, twins


def _in_threads(*functions: Callable[[], object]) -> None:
    errors: list[BaseException] = []

    def guarded(function: Callable[[], object]) -> None:
        try:
            function()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=guarded, args=(each,)) for each in functions]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


class Copies(torch.autograd.Function):
    """Stands for what copies weights to several devices, and adds their gradients."""

    @staticmethod
    def forward(ctx: Any, count: int, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.each = len(tensors)
        return tuple(it.clone() for _ in range(count) for it in tensors)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return None, *(sum(grads[i :: ctx.each]) for i in range(ctx.each))


Parallel: Any = nn.DataParallel


class OnTwo(Parallel):
    """DataParallel on two devices that are one."""

    def __init__(self, module: nn.Module) -> None:
        nn.Module.__init__(self)
        self.module, self.device_ids, self.output_device = module, [0, 1], 0
        self.src_device_obj = next(module.parameters()).device

    def scatter(self, inputs: Any, *_: object) -> Any:
        return [(part,) for part in inputs[0].chunk(2)], [{}, {}]

    def parallel_apply(self, replicas: Any, inputs: Any, _: object) -> Any:
        found: dict[int, Tensor] = {}

        def call(i: int) -> None:
            found[i] = replicas[i](*inputs[i])

        _in_threads(*(lambda i=i: call(i) for i in range(2)))
        return [found[0], found[1]]

    def gather(self, outputs: Any, _: object) -> Tensor:
        return torch.cat(outputs)


@pytest.mark.cpu
def test_data_parallel_on_several_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    def copied(tensors: list[Tensor], devices: list[int], *_: bool, **__: bool) -> Any:
        made = Copies.apply(len(devices), *tensors) if tensors else ()
        return [made[: len(made) // 2], made[len(made) // 2 :]]

    torchs = sys.modules["torch.nn.parallel.replicate"]
    monkeypatch.setattr(torchs, "_broadcast_coalesced_reshape", copied)
    monkeypatch.setattr(torchs, "_get_device_index", lambda it, _: it)
    model: Any = OnTwo(Net())
    x: Any = torch.randn(4, 3, requires_grad=True)
    with gradlib.record(model) as recording:
        run(model, x)
    calls = recording.calls("module.first")
    assert len(calls) == 2
    for name, parameter in model.module.first.named_parameters():
        assert_close(sum(it.param_grads[name] for it in calls), parameter.grad)
    given = sorted((it.grad_input[0] for it in calls), key=torch.sum)
    assert_close(given, sorted(x.grad.chunk(2), key=torch.sum))
    assert_close(recording[""].grad_input[0], x.grad)
    assert {call.forward for call in recording} == {0}
    assert recording.verify().ok


@pytest.mark.cpu
def test_two_threads_run_one_model() -> None:
    model = Net()
    inputs = [torch.randn(2, 3, requires_grad=True) for _ in range(4)]
    with gradlib.record(model) as recording:
        _in_threads(*(lambda x=x: run(model, x) for x in inputs))
    calls = recording.calls("")
    assert sorted(call.index for call in calls) == [0, 1, 2, 3]
    for x in inputs:
        (call,) = (call for call in calls if torch.equal(call.args[0], x))
        assert_close(call.grad_input, (x.grad,))
    for name, parameter in model.first.named_parameters():
        shares = [call.param_grads[name] for call in recording.calls("first")]
        assert_close(sum(shares), parameter.grad)


@pytest.mark.cpu
def test_two_threads_run_two_models() -> None:
    model: Any = nn.ModuleList([Net(), Net()])
    inputs = [torch.randn(2, 3, requires_grad=True) for _ in range(2)]
    with gradlib.record(model) as recording:
        _in_threads(*(lambda i=i: run(model[i], inputs[i]) for i in range(2)))
    for i in range(2):
        call = recording[f"{i}.first"]
        assert_close(call.grad_input, (inputs[i].grad,))
        assert_close(call.param_grads["weight"], model[i].first.weight.grad)
        assert call.forward == recording[str(i)].forward


def test_a_forward_here_and_its_backward_there() -> None:
    model = Net()
    x = torch.randn(2, 3, requires_grad=True)
    with gradlib.record(model) as recording:
        loss = loss_of(model(x))
        _in_threads(loss.backward)
    assert_close(recording["first"].grad_input, (x.grad,))


class Branches(nn.Module):
    """Computes two branches, each in a thread of its own, or one after the other."""

    def __init__(self) -> None:
        super().__init__()
        self.left = nn.Linear(3, 3)
        self.right = nn.Sequential(nn.Linear(3, 3), nn.Tanh())
        self.scale = nn.Parameter(torch.randn(3))
        self.pool: Any = None

    def forward(self, x: Tensor) -> Tensor:
        def branch(part: nn.Module) -> Tensor:
            return torch.sin(part(x * self.scale) * self.scale)

        parts = (self.left, self.right)
        done = self.pool.map(branch, parts) if self.pool else map(branch, parts)
        return sum(done, 2 * x)


class Threaded(nn.Module):
    """Has a module in the middle that may use threads."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.middle = nn.Linear(3, 3), Branches()
        self.last = nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.middle(self.first(x)))


@pytest.mark.cpu
@pytest.mark.parametrize("nodes", [0, 300])
def test_threads_compute_parts_of_a_call(nodes: int) -> None:
    """Each thread counts the nodes of the graph for itself: here few, or many."""

    def work() -> None:
        x = torch.ones(1, requires_grad=True)
        for _ in range(nodes):
            x = 2 * x

    model, plain = twins(Threaded())
    x: Any = torch.randn(4, 3, requires_grad=True)
    with ThreadPoolExecutor(2) as pool:
        for done in [pool.submit(work) for _ in range(4)]:
            done.result()
        model.middle.pool = pool
        with gradlib.record(model) as recording, gradlib.record(plain) as expected:
            for _ in range(2):
                run(model, x)
                run(plain, x)
        assert recording.verify().ok
    fields = ("forward", "grad_input", "grad_input_total", "grad_output")
    fields += ("param_grads", "param_grads_total")
    for name, _ in model.named_modules():
        pairs = zip(recording.calls(name), expected.calls(name), strict=True)
        for ours, theirs in pairs:
            for field in fields:
                found, wanted = getattr(ours, field), getattr(theirs, field)
                assert_close(found, wanted)
    assert recording.compare(expected).first is None


def test_two_threads_with_threads_of_their_own() -> None:
    """Which of the two a thread works for is not known, but every share is right."""
    model = Threaded()
    inputs = [torch.randn(2, 3, requires_grad=True) for _ in range(2)]
    meet, has_met = threading.Barrier(2), threading.local()

    def wait(*_: object) -> None:
        if not hasattr(has_met, "done"):
            has_met.done = True
            meet.wait(10)

    model.middle.register_forward_pre_hook(wait)
    with ThreadPoolExecutor(2) as pool, gradlib.record(model) as recording:
        model.middle.pool = pool
        _in_threads(*(lambda x=x: run(model, x) for x in inputs))
    for x in inputs:
        (call,) = (it for it in recording.calls("") if torch.equal(it.args[0], x))
        assert_close(call.grad_input[0], x.grad)
    for name, module in model.named_modules():
        for key, parameter in module.named_parameters(recurse=False):
            shares = [call.param_grads[key] for call in recording.calls(name)]
            assert_close(sum(shares), parameter.grad)


@pytest.mark.cpu
def test_a_forward_begins_while_a_pass_runs_in_another_thread() -> None:
    """What a pass is still to add to is not reduced yet."""
    in_the_middle, may_go_on = threading.Event(), threading.Event()

    class Waits(torch.autograd.Function):
        @staticmethod
        def forward(*given: Any) -> Tensor:
            return given[1].clone()

        @staticmethod
        def backward(*given: Any) -> Tensor:  # pyright: ignore (it has no names)
            in_the_middle.set()
            may_go_on.wait(10)
            return given[1]

    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.randn(3))

        def forward(self, x: Tensor) -> Tensor:
            y = x * self.scale
            return Waits.apply(y) + y * self.scale

    def another() -> None:
        in_the_middle.wait(10)
        with torch.no_grad():
            model(x)
        may_go_on.set()

    model: Any = Twice()
    x = torch.randn(2, 3, requires_grad=True)
    with gradlib.record(model, reduce=torch.norm) as recording:
        _in_threads(lambda: run(model, x), another)
    call = next(call for call in recording if call.passes)
    expected = model.scale.grad.norm()
    assert_close(call.param_grads["scale"], expected)
    assert_close(call.param_grads_total["scale"], expected)


@pytest.mark.usefixtures("one_process")
@pytest.mark.parametrize("inner", [False, True])
@pytest.mark.parametrize(
    "options",
    [{}, {"find_unused_parameters": True}, {"static_graph": True}],
    ids=["plain", "unused", "static"],
)
def test_distributed_data_parallel(inner: bool, options: dict[str, Any]) -> None:
    model, plain = twins(Net())
    ddp = nn.parallel.DistributedDataParallel(model, **options)
    with gradlib.record(model if inner else ddp) as recording:
        for _ in range(3):
            x = torch.randn(2, 3)
            run(ddp, x)
            run(plain, x)
    assert_close(grads_of(model), grads_of(plain))
    prefix = "" if inner else "module."
    calls = recording.calls(prefix + "first")
    assert len(calls) == 3
    weight = sum(call.param_grads["weight"] for call in calls)
    assert_close(weight, plain.first.weight.grad)
    for call in calls:
        assert_close(call.grad_output[0].sum(0), call.param_grads["bias"])
        assert_close(call.param_grads_total["bias"], call.param_grads["bias"])


@pytest.mark.usefixtures("one_process")
def test_what_talks_to_other_processes_is_not_replayed() -> None:
    ddp = nn.parallel.DistributedDataParallel(Net())
    with gradlib.record(ddp) as recording:
        run(ddp, torch.randn(2, 3))
    with pytest.raises(gradlib.CannotReplayError, match="module that it wraps") as told:
        recording[""].replay()
    assert "DistributedDataParallel" in str(told.value)
    replayed = recording["module"].replay()
    assert_close(replayed.grad_output, recording["module"].grad_output)


@pytest.mark.usefixtures("one_process")
@pytest.mark.parametrize("parts", ["", "first second", "first"])
def test_fully_sharded_data_parallel(parts: str) -> None:
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(0)
    model, plain = twins(Net())
    plain.first.bias.requires_grad_(False)
    model.first.bias.requires_grad_(False)
    for part in (*map(model.get_submodule, parts.split()), model):
        fully_shard(part)
    inputs = [torch.randn(2, 3, requires_grad=True) for _ in range(4)]
    with gradlib.record(model) as recording:
        for a, b in (inputs[:2], inputs[2:]):
            loss_of(model(a) + model(b)).backward()
            loss_of(plain(a) + plain(b)).backward()
    for name in ("first", "second"):
        calls = recording.calls(name)
        own = dict(getattr(plain, name).named_parameters())
        for key in ("weight", "bias"):
            grads = [call.param_grads[key] for call in calls]
            found = None if grads[0] is None else sum(grads)
            assert_close(found, own[key].grad)
            now = getattr(getattr(model, name), key).grad
            assert_close(None if now is None else now.full_tensor(), own[key].grad)
        assert calls[0].note == ("bias does not require grad" * (name == "first"))
    with pytest.raises(gradlib.CannotReplayError, match="FSDP has sharded"):
        recording.verify()


@pytest.fixture
def collected() -> Iterator[None]:
    """Collect what a test leaves, of which older releases of torch may warn."""
    yield
    gc.collect()


@pytest.mark.cpu
@pytest.mark.skipif(torch.cuda.is_available(), reason="it takes the GPU then")
@pytest.mark.usefixtures("one_process", "collected")
@pytest.mark.filterwarnings("ignore")  # torch's own: this FSDP is the older one
@pytest.mark.parametrize("parts", ["", "first second", "first"])
@pytest.mark.parametrize("use_orig_params", [False, True])
def test_the_older_fully_sharded_data_parallel(
    parts: str, use_orig_params: bool
) -> None:
    from torch.distributed.fsdp import FullyShardedDataParallel

    def sharded(part: nn.Module) -> nn.Module:
        on = torch.device("cpu")
        return FullyShardedDataParallel(
            part, use_orig_params=use_orig_params, device_id=on
        )

    model, plain = twins(Net())
    for name in parts.split():
        setattr(model, name, sharded(getattr(model, name)))
    model = sharded(model)
    a, b = (torch.randn(2, 3, requires_grad=True) for _ in range(2))
    with gradlib.record(model) as recording:
        for _ in range(2):
            loss_of(model(a) + 3 * model(b)).backward()
    for _ in range(2):
        loss_of(plain(a) + 3 * plain(b)).backward()
    for name in ("first", "second"):
        path = f"_fsdp_wrapped_module.{name}"
        path += "._fsdp_wrapped_module" * (name in parts)
        calls = recording.calls(path)
        assert [call.note for call in calls] == [""] * 4
        for key, parameter in getattr(plain, name).named_parameters():
            assert_close(sum(call.param_grads[key] for call in calls), parameter.grad)
            for call in calls:
                assert_close(call.grad_output[0].sum(0), call.param_grads["bias"])
    for call in recording:
        assert not {"_flat_param"} & set(call.param_grads)
    with pytest.raises(gradlib.CannotReplayError, match="FSDP has sharded"):
        recording.verify()


@pytest.mark.cpu
@pytest.mark.skipif(torch.cuda.is_available(), reason="it takes the GPU then")
def test_data_parallel_without_devices() -> None:
    model = nn.DataParallel(Net())
    x = torch.randn(2, 3, requires_grad=True)
    with gradlib.record(model) as recording:
        run(model, x)
    assert_close(recording["module.first"].grad_input, (x.grad,))
