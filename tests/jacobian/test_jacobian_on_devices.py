"""What a Jacobian asks of a device, and does where its memory runs out.

No device is needed: torch's own functions are stood in for.
"""

import os
from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gradlib
from gradlib import JacobianArgumentError, NoSuchWayError, OutOfBytesError
from gradlib.edges import edge_of
from gradlib.jacobian import forward, memory, passes, per_sample, readable, split
from gradlib.jacobian import reverse as by_rows
from gradlib.jacobian.agreement import may_use_tf32
from gradlib.jacobian.fast.chains import result
from gradlib.jacobian.fast.chains.find import ChainOfCall
from gradlib.jacobian.fast.chains.plain import PlainNet
from gradlib.jacobian.fast.chains.recalled import chain_of
from gradlib.jacobian.fast.structure import chunks
from gradlib.jacobian.fast.structure.named_axes import flat, fresh
from gradlib.jacobian.fast.structure.program import Value
from gradlib.jacobian.graph import Graph
from gradlib.jacobian.memory import free_bytes, room_on
from gradlib.jacobian.plan import JacobianPlan
from gradlib.jacobian.planning import make
from gradlib.tree import Tree

pytestmark = pytest.mark.of_fast  # half of the tests look into it

TANH = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 6)).requires_grad_(False)
X = torch.linspace(-1, 1, 15).view(3, 5)
CHAINS = {ChainOfCall: TANH, PlainNet: nn.Sequential(TANH[0], TANH[1], nn.Linear(7, 2))}

OUT_OF_MEMORY: dict[str, Callable[[], RuntimeError]] = {
    "a GPU": lambda: torch.OutOfMemoryError("CUDA out of memory."),
    "a CPU": lambda: _error_of(lambda: torch.empty(2**55, device="cpu")),
}


def _error_of(call: Callable[[], object]) -> RuntimeError:
    with pytest.raises(RuntimeError) as caught:
        call()
    return caught.value


@dataclass
class Device:
    """A device that has memory for some rows at once."""

    most: int = 2
    asked: list[int] = field(default_factory=list[int])


@pytest.fixture(params=OUT_OF_MEMORY)
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Device:
    found, pull = Device(), passes.pull

    def limited(output: Any, inputs: Any, vectors: Tensor, **how: Any) -> Any:
        found.asked.append(len(vectors))
        if found.asked[-1] > found.most:
            raise OUT_OF_MEMORY[request.param]()
        return pull(output, inputs, vectors, **how)

    for way in (by_rows, forward):
        monkeypatch.setattr(way, "pull", limited)
    return found


def reverse(**how: Any) -> Tensor:
    return gradlib.per_sample_jacobian(TANH, X, mode="reverse", check=False, **how)


def test_where_memory_runs_out_chunks_get_smaller(device: Device) -> None:
    expected = gradlib.per_sample_jacobian(TANH, X, mode="loop", check=False)
    device.asked.clear()
    torch.testing.assert_close(reverse(), expected)
    assert device.asked == [6, 3, 1, 1, 1, 1, 1, 1]
    device.asked.clear()
    reverse(chunk_size=4)
    assert device.asked == [4, 2, 2, 2]


def test_where_single_rows_do_not_fit_the_error_has_the_sizes(device: Device) -> None:
    device.most = 0
    with pytest.raises(OutOfBytesError, match=r"on .*: the Jacobian takes 360 bytes"):
        reverse()
    assert device.asked == [6, 3, 1, 1]


def test_where_single_columns_do_not_fit(device: Device) -> None:
    device.most = 0
    narrow = nn.Sequential(nn.Linear(2, 40), nn.Softmin(1)).requires_grad_(False)
    with pytest.raises(OutOfBytesError):
        gradlib.per_sample_jacobian(narrow, X[:, :2], mode="forward", check=False)


def test_another_error_is_not_taken_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any, **__: Any) -> Any:
        raise RuntimeError("something else")

    monkeypatch.setattr(torch.autograd, "grad", broken)
    with pytest.raises(NoSuchWayError, match="something else"):
        reverse()


@pytest.mark.parametrize("way", CHAINS)
@pytest.mark.parametrize("error", OUT_OF_MEMORY)
def test_a_chain_for_which_memory_runs_out_goes_in_chunks(
    error: str, way: type[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def limited(*_: Any, **__: Any) -> Tensor:
        raise OUT_OF_MEMORY[error]()

    expected = gradlib.per_sample_jacobian(CHAINS[way], X)
    monkeypatch.setattr(way, "jacobian", limited)
    torch.testing.assert_close(gradlib.per_sample_jacobian(CHAINS[way], X), expected)


@pytest.mark.cpu  # one of them is for nothing else
@pytest.mark.parametrize("way", CHAINS)
def test_another_error_in_a_chain_is_not_taken_for_it(
    way: type[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: Any, **__: Any) -> Tensor:
        raise RuntimeError("something else")

    monkeypatch.setattr(way, "jacobian", broken)
    net = deepcopy(CHAINS[way]).cpu()
    with pytest.raises(RuntimeError, match="something else"):
        gradlib.per_sample_jacobian(net, X.cpu())


def test_on_other_devices_than_the_cpu_a_chain_goes_in_few_parts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(result, "IN_CACHE", 1)

    def at_once(device: str) -> int:
        net = nn.Sequential(nn.Linear(64, 256), nn.Tanh(), nn.Linear(256, 64))
        chain = chain_of(net.to(device), (torch.zeros(512, 64, device=device),))
        assert chain is not None
        return result.samples_at_once(chain)

    assert at_once("cpu") == 1
    assert at_once("meta") >= 512


def test_on_other_devices_than_the_cpu_sums_of_products_go_in_few_parts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(chunks, "CHUNK", 1)
    rows, turns = flat(fresh([8, 16])), {}
    value = Value(rows, (), lambda *_: torch.empty(()))
    last = Value(rows, (value,), lambda *_: torch.empty(()))
    for device in ("cpu", "meta"):
        run = chunks.Run([value, last], rows, torch.empty((), device=device))
        turns[device] = run.turns
    assert turns == {"cpu": 8 * 16, "meta": 1}


def test_what_is_free_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = torch.device("cuda", 1)
    asked: list[Any] = []

    def says(value: Any) -> Callable[[Any], Any]:
        return lambda device: asked.append(device) or value

    monkeypatch.setattr(torch.cuda, "mem_get_info", says((1000, 8000)))
    stats = {
        "reserved_bytes": {"all": {"current": 300, "peak": 900}},
        "allocated_bytes": {"all": {"current": 100, "peak": 800}},
    }
    monkeypatch.setattr(torch.cuda, "memory_stats_as_nested_dict", says(stats))
    # What torch has and does not use is free as well.
    assert free_bytes(gpu) == 1200
    assert room_on(gpu) == 600
    assert set(asked) == {gpu}


def test_what_is_free_where_linux_does_not_say(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    cpu, page = torch.device("cpu"), os.sysconf("SC_PAGE_SIZE")
    told = tmp_path / "meminfo"
    told.write_text("MemTotal: 9 kB\nMemFree: 5 kB\nMemAvailable: 7 kB\n")
    monkeypatch.setattr(memory, "MEMORY", told)
    assert free_bytes(cpu) == 7 * 1024
    told.write_text("of another system")
    for missing in (told, tmp_path / "nowhere"):
        monkeypatch.setattr(memory, "MEMORY", missing)
        assert free_bytes(cpu) % page == 0
    monkeypatch.setattr(os, "sysconf_names", {"SC_PHYS_PAGES": 0})  # as on macOS
    assert free_bytes(cpu) == os.sysconf("SC_PHYS_PAGES") * page
    monkeypatch.delattr(os, "sysconf_names")  # as on Windows
    assert free_bytes(cpu) == memory.UNKNOWN


def test_on_other_devices_than_the_cpu_much_is_asked_for_at_once() -> None:
    def plan_on(device: str, mode: str) -> JacobianPlan:
        net = nn.Sequential(nn.Conv2d(1, 8, 9), nn.Flatten(), nn.Softmin(1)).to(device)
        x = torch.zeros(8192, 1, 12, 12, device=device, requires_grad=True)
        return make(graph_between(net(x), x), mode, "auto", 2**32)

    # Where convolutions are slower with batched values, and where they are not.
    assert plan_on("cpu", "auto").mode == "loop"
    assert plan_on("meta", "auto").mode != "loop"
    assert plan_on("meta", "reverse").chunk > plan_on("cpu", "reverse").chunk == 1


def graph_of(*layers: nn.Module) -> Graph:
    """Return the graph of a net with 512 inputs, whose tensors have no values."""
    x = torch.zeros(8, 512, device="meta", requires_grad=True)
    net = nn.Sequential(*layers).to("meta")
    return graph_between(net(x), x)


def graph_between(y: Tensor, x: Tensor) -> Graph:
    """Return the graph between two tensors, which may have no values."""
    return Graph(Tree.of(y), (0,), (x,), (edge_of(x),), (False,), ("x",), len(x))


@pytest.mark.parametrize("rows", [64, 65])
def test_on_other_devices_than_the_cpu_few_rows_go_in_one_pass(
    rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(split, "find", lambda _graph: pytest.fail("it looked"))
    narrow = (nn.Linear(512, 8), nn.Tanh(), nn.Linear(8, rows))
    graph = graph_of(*narrow, nn.Softmin(1))
    if rows > 64:
        with pytest.raises(pytest.fail.Exception, match="it looked"):
            make(graph, "auto", "auto", 2**32)
        return
    plan = make(graph, "auto", "auto", 2**32)
    assert (plan.mode, plan.passes, plan.settled) == ("reverse", 1, True)
    assert plan.why == "a GPU takes 64 rows in one pass"


def test_nobody_looks_for_a_middle_where_no_tensor_is_narrow(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(split, "find", lambda _graph: pytest.fail("it looked"))
    wide = graph_of(nn.Linear(512, 256), nn.Tanh(), nn.Linear(256, 128), nn.Softmin(1))
    assert make(wide, "auto", "auto", 2**32).mode == "reverse"
    with pytest.raises(pytest.fail.Exception, match="it looked"):
        make(wide, "split", "auto", 2**32)  # who asks for it is answered


class States(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.LSTM(3, 4, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)[0]


@pytest.mark.cpu
@pytest.mark.usefixtures("cudnn_looks_on")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_weights_of_an_lstm_that_is_checked_lie_together(
    dtype: torch.dtype,
) -> None:
    model, x = States().to(dtype), torch.randn(2, 5, 3, dtype=dtype)
    assert gradlib.per_sample_jacobian(model, x).any()
    assert gradlib.plan_jacobian(model, x).mode


@pytest.mark.parametrize("matmul", [False, True])
@pytest.mark.parametrize("cudnn", [False, True])
def test_where_tf32_may_take_digits(matmul: bool, cudnn: bool) -> None:
    gpu, cpu = torch.device("cuda"), torch.device("cpu")
    linear, conv = {"AddmmBackward0"}, {"ConvolutionBackward0"}
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = matmul
    try:
        with torch.backends.cudnn.flags(allow_tf32=cudnn):
            assert may_use_tf32(gpu, linear) == matmul
            assert may_use_tf32(gpu, conv) == (matmul or cudnn)
            assert may_use_tf32(gpu, {"CudnnRnnBackward0"}) == (matmul or cudnn)
            assert not may_use_tf32(cpu, conv)
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before


@pytest.fixture
def captured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have this thread capture a CUDA graph, as far as we can see."""
    for module in (per_sample, readable, memory):
        monkeypatch.setattr(module, "graph_is_captured", lambda: True)


@pytest.mark.usefixtures("captured")
def test_what_reads_numbers_is_refused_while_a_graph_is_captured() -> None:
    bent = nn.Sequential(nn.Linear(5, 7), nn.Softmin(1))
    refused: list[dict[str, Any]] = [
        {"mode": "reverse"},
        {"check": False},
        {"mode": "split", "check": False},
    ]
    for how in refused:
        with pytest.raises(JacobianArgumentError, match="no number can be read"):
            gradlib.per_sample_jacobian(bent, X, max_bytes=2**20, **how)
    x = X.clone().requires_grad_()
    with pytest.raises(JacobianArgumentError, match="no number can be read"):
        gradlib.per_sample_jacobian_from_graph(bent(x), x, max_bytes=2**20)
    with pytest.raises(JacobianArgumentError, match="max_bytes must be given"):
        free_bytes(torch.device("cuda"))
    for mode in ("reverse", "loop"):
        how = {"mode": mode, "max_bytes": 2**20, "check": False}
        assert gradlib.per_sample_jacobian(bent, X, **how).any()


@pytest.mark.usefixtures("captured")
def test_a_chain_is_not_looked_at_while_a_graph_is_captured(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(per_sample, "are_finite", pytest.fail)
    assert gradlib.per_sample_jacobian(TANH, X).any()


def test_an_rnn_that_cudnn_does_not_go_back_through(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def broken(*_: Any, **__: Any) -> Any:
        raise RuntimeError("cudnn RNN backward can only be called in training mode")

    monkeypatch.setattr(torch.autograd, "grad", broken)
    with pytest.raises(NoSuchWayError, match=r"cudnn\.flags\(enabled=False\)"):
        reverse()
