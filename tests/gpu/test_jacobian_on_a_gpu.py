"""Jacobians of CUDA tensors, in its types, and in the memory it has."""

import gc
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

import gradlib
from benchmarks.waiting import no_waiting
from gradlib import OutOfBytesError
from gradlib.jacobian.fast import replayed
from gradlib.jacobian.finite import are_finite

pytestmark = pytest.mark.gpu

GPU = "cuda"
MODES = ["auto", "reverse", "forward", "loop"]


@pytest.fixture(params=[False, True], ids=["no TF32", "TF32"])
def tf32(request: pytest.FixtureRequest) -> Iterator[bool]:
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = request.param
    try:
        with torch.backends.cudnn.flags(enabled=True, allow_tf32=request.param):
            yield request.param
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before


def mlp() -> nn.Sequential:
    return nn.Sequential(nn.Linear(64, 128), nn.Tanh(), nn.Linear(128, 16))


def cnn() -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(1, 8, 3),
        nn.GroupNorm(2, 8),
        nn.GELU(),
        nn.Flatten(),
        nn.LazyLinear(6),
    )


NETS = {"MLP": (mlp, (32, 64)), "CNN": (cnn, (16, 1, 12, 12))}


def made(name: str, dtype: torch.dtype) -> tuple[nn.Module, Tensor]:
    make, shape = NETS[name]
    torch.manual_seed(0)
    model, x = make(), torch.randn(shape, device="cpu")
    model.cpu()(x)
    return model.to(GPU, dtype), x.to(GPU, dtype)


def truth(name: str) -> Tensor:
    model, x = made(name, torch.float64)
    model, x = model.cpu(), x.cpu()
    return gradlib.per_sample_jacobian(model, x, mode="loop", check=False)


def apart(found: Tensor, expected: Tensor) -> float:
    return ((found.cpu().double() - expected).abs().max() / expected.abs().max()).item()


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", NETS)
def test_float32_with_and_without_tf32(name: str, mode: str, tf32: bool) -> None:
    model, x = made(name, torch.float32)
    found = gradlib.per_sample_jacobian(model, x, mode=mode)
    assert found.is_cuda
    assert apart(found, truth(name)) < (2e-2 if tf32 else 1e-4)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", NETS)
def test_bfloat16(name: str, mode: str) -> None:
    model, x = made(name, torch.bfloat16)
    found = gradlib.per_sample_jacobian(model, x, mode=mode)
    assert found.dtype == torch.bfloat16
    assert apart(found, truth(name)) < 0.1


@pytest.mark.parametrize("argnums", [0, "parameters"])
@pytest.mark.parametrize("name", NETS)
def test_every_way_agrees(name: str, argnums: int | str) -> None:
    model, x = made(name, torch.float64)
    reference = gradlib.per_sample_jacobian(model, x, argnums=argnums, mode="loop")
    found = gradlib.per_sample_jacobian(model, x, argnums=argnums)
    torch.testing.assert_close(found, reference)


@pytest.mark.parametrize("masked", [False, True])
def test_attention_of_a_gpu(masked: bool) -> None:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(64, 4, 128, dropout=0.0, batch_first=True)
    layer.to(GPU).eval().requires_grad_(False)
    mask = nn.Transformer.generate_square_subsequent_mask(16).to(GPU)
    x = torch.randn(8, 16, 64, device=GPU)

    def fn(it: Tensor) -> Tensor:
        return layer(it, src_mask=mask if masked else None)

    found = gradlib.per_sample_jacobian(fn, x, check=False)
    expected = gradlib.per_sample_jacobian(fn, x, mode="loop", check=False)
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-4)


def test_attention_is_taken_apart_on_a_gpu_too() -> None:
    torch.manual_seed(0)
    x, v = (torch.randn(8, 4, 32, 16, device=GPU) for _ in range(2))
    weight = torch.randn(16, 16, device=GPU) / 4

    def fn(x: Tensor) -> Tensor:
        with sdpa_kernel(SDPBackend.EFFICIENT_ATTENTION):
            found = F.scaled_dot_product_attention(x, x @ weight, v, is_causal=True)
        return (found @ weight).flatten(2)

    assert gradlib.plan_jacobian(fn, x, check=False).mode == "structure"
    found = gradlib.per_sample_jacobian(fn, x, check=False)
    expected = gradlib.per_sample_jacobian(fn, x, mode="loop", check=False)
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-4)


class States(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.LSTM(6, 5, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)[0]


def test_an_lstm_of_cudnn() -> None:
    # In its checks the weights are others, and cuDNN must not warn of how they lie.
    model, x = States().to(GPU), torch.randn(4, 7, 6, device=GPU)
    found = gradlib.per_sample_jacobian(model, x)
    expected = gradlib.per_sample_jacobian(model, x, mode="loop", check=False)
    torch.testing.assert_close(found, expected, rtol=1e-2, atol=1e-3)


@pytest.mark.parametrize("name", NETS)
def test_rows_are_captured_in_a_graph(name: str) -> None:
    model, x = made(name, torch.float32)
    how: dict[str, Any] = {"mode": "reverse", "max_bytes": 2**30, "check": False}
    static, side = torch.zeros_like(x), torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        gradlib.per_sample_jacobian(model, static, **how)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = gradlib.per_sample_jacobian(model, static, **how)
    static.copy_(x)
    graph.replay()
    expected = gradlib.per_sample_jacobian(model, x, **how)
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("name", NETS)
@pytest.mark.parametrize("mode", ["auto", "reverse", "loop"])
def test_nothing_waits_without_a_check(name: str, mode: str) -> None:
    model, x = made(name, torch.float32)
    expected = gradlib.per_sample_jacobian(model, x, mode=mode, check=False)
    with no_waiting():
        found = gradlib.per_sample_jacobian(model, x, mode=mode, check=False)
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-4)


def test_chunks_come_from_what_is_free() -> None:
    model, x = made("MLP", torch.float32)
    free, _ = torch.cuda.mem_get_info()
    plan = gradlib.plan_jacobian(model, x, mode="reverse")
    # Other processes use the device too.
    assert 0.25 * free < plan.max_bytes < 0.75 * torch.cuda.mem_get_info()[1]
    assert plan.chunk == 16


@pytest.fixture
def little_memory() -> Iterator[None]:
    """Leave 100 MiB of the device to this process."""
    # What torch takes for itself at the first product, forward and backward, is not
    # the test's.
    layer, x = nn.Linear(8, 8).to(GPU), torch.ones(2, 8, device=GPU)
    layer(x).sum().backward()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(0).total_memory
    size = torch.cuda.memory_reserved() + 100 * 2**20
    torch.cuda.set_per_process_memory_fraction(size / total)
    try:
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
        torch.cuda.empty_cache()


def times_out_of_memory() -> int:
    return torch.cuda.memory_stats()["num_ooms"]


@pytest.mark.usefixtures("little_memory")
def test_where_memory_runs_out_chunks_get_smaller() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(256, 256), nn.Tanh(), nn.Linear(256, 64)).to(GPU)
    x = torch.randn(1024, 256, device=GPU)
    before = times_out_of_memory()
    # The result takes 64 MiB, and so does every gradient of 64 rows at once.
    found = gradlib.per_sample_jacobian(
        model, x, mode="reverse", chunk_size=64, max_bytes=2**40, check=False
    ).cpu()
    assert times_out_of_memory() > before
    expected = gradlib.per_sample_jacobian(model, x, mode="loop", check=False)
    torch.testing.assert_close(found, expected.cpu())


@pytest.mark.usefixtures("little_memory")
@pytest.mark.parametrize("mode", ["auto", "reverse"])
def test_what_does_not_fit_at_all_says_so(mode: str) -> None:
    model = nn.Sequential(nn.Linear(2048, 2048), nn.Tanh()).to(GPU)
    x = torch.randn(16, 2048, device=GPU)
    with pytest.raises(OutOfBytesError, match="Memory ran out on cuda"):
        gradlib.per_sample_jacobian(model, x, mode=mode, max_bytes=2**40, check=False)


def residual() -> nn.Module:
    class Residual(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.norm = nn.Conv2d(8, 8, 3, padding=1), nn.GroupNorm(2, 8)

        def forward(self, x: Tensor) -> Tensor:
            return F.relu(x + self.norm(self.conv(x)))

    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1),
        Residual(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(8, 5),
    )


def encoder() -> nn.Module:
    layer = nn.TransformerEncoderLayer(
        64, 4, 128, dropout=0.0, batch_first=True, norm_first=True
    )
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)


def deep() -> nn.Module:
    widths = [12, 40, 30, 60, 9]
    layers: list[nn.Module] = []
    for ins, outs in pairwise(widths):
        layers += [nn.Linear(ins, outs), nn.Tanh()]
    return nn.Sequential(*layers)


AGAIN = {
    "deep": (deep, (700, 12)),
    "residual": (residual, (4, 3, 12, 12)),
    "transformer": (encoder, (2, 16, 64)),
}
"""Those whose kernels a CUDA graph launches, when they are met again."""


@pytest.fixture
def captures(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    found: list[object] = []
    capture = replayed.captured

    def captured(*given: Any) -> Any:
        made = capture(*given)
        found.append(made)
        return made

    monkeypatch.setattr(replayed, "captured", captured)
    return found


@pytest.mark.parametrize("name", AGAIN)
def test_what_is_met_again_is_launched_at_once(
    name: str, captures: list[object]
) -> None:
    make, shape = AGAIN[name]
    model = make().to(GPU).eval().requires_grad_(False)

    def require_truth(x: Tensor) -> None:
        found = gradlib.per_sample_jacobian(model, x)
        expected = gradlib.per_sample_jacobian(
            model, x, mode="reverse", check=False, max_bytes=2**32
        )
        torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-4)

    for _ in range(6):
        require_truth(torch.randn(shape, device=GPU))
    assert len(captures) == 1
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.1)
    require_truth(torch.randn(shape, device=GPU))
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(4):
            require_truth(torch.randn(shape, device=GPU))
    torch.cuda.current_stream().wait_stream(side)
    assert len(captures) == 2
    x = torch.randn(shape, device=GPU)
    for _ in range(3):
        gradlib.per_sample_jacobian(model, x, check=False)
    assert len(captures) == 3
    with no_waiting():
        gradlib.per_sample_jacobian(model, x, check=False)


def test_a_graph_goes_with_its_network(captures: list[object]) -> None:
    model, x = deep().to(GPU), torch.randn(700, 12, device=GPU)
    for _ in range(5):
        gradlib.per_sample_jacobian(model, x, check=False)
    assert len(captures) == 1
    kept = sum(it.bytes for it in replayed._every)
    del model
    captures.clear()
    gc.collect()
    assert sum(it.bytes for it in replayed._every) < kept


def test_what_was_captured_does_not_stand_in_a_graph_of_the_callers() -> None:
    model, x = deep().to(GPU), torch.randn(700, 12, device=GPU)
    every = [gradlib.per_sample_jacobian(model, x, check=False) for _ in range(5)]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = gradlib.per_sample_jacobian(model, x, max_bytes=2**30, check=False)
    found.zero_()
    graph.replay()
    for expected in every:
        torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-4)


def test_torch_forgets_the_padding_of_means_where_channels_are_last() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.AvgPool2d(3, 2, 1), nn.Flatten(), nn.Linear(30, 3))
    images = torch.randn(4, 2, 6, 9, device="cpu")
    expected = gradlib.per_sample_jacobian(model.cpu(), images, mode="loop")
    x = images.to(GPU).to(memory_format=torch.channels_last)
    model = model.to(GPU)
    found = gradlib.per_sample_jacobian(model, x)
    torch.testing.assert_close(found.cpu(), expected, rtol=1e-4, atol=1e-5)
    found = gradlib.per_sample_jacobian(model, x, mode="loop", check=False)
    if apart(found, expected.double()) < 1e-3:
        pytest.skip(f"torch {torch.__version__} does not")
    with pytest.raises(gradlib.DetachedPathError, match="forgets the padding"):
        gradlib.per_sample_jacobian(model, x, mode="loop")
    found = gradlib.per_sample_jacobian(model, x.contiguous(), mode="loop")
    torch.testing.assert_close(found.cpu(), expected, rtol=1e-4, atol=1e-5)


def test_what_is_finite_on_a_gpu() -> None:
    x = torch.randn(5, device=GPU)
    assert are_finite([x, torch.arange(3), x.double(), x.to(torch.bfloat16), x[:0]])
    for value in (float("inf"), float("-inf"), float("nan")):
        assert not are_finite([x, torch.arange(3), x.new_tensor([1, value, 1])])
    assert not are_finite([x / 0, -x / 0])
