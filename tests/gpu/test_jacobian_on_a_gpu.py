"""Jacobians of CUDA tensors, in its types, and in the memory it has."""

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

import gradlib
from benchmarks.waiting import no_waiting
from gradlib import OutOfBytesError

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
    """Leave 160 MiB of the device to this process."""
    # What torch takes for itself at the first product, forward and backward, is not
    # the test's.
    layer, x = nn.Linear(8, 8).to(GPU), torch.ones(2, 8, device=GPU)
    layer(x).sum().backward()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(0).total_memory
    size = torch.cuda.memory_reserved() + 160 * 2**20
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
