"""What a Jacobian takes of a process of its own: another would hide some of it."""

import ctypes
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

import gradlib
from gradlib.jacobian import compute, per_sample


def wide() -> tuple[nn.Module, Tensor]:
    model = nn.Sequential(nn.Linear(256, 1024), nn.Tanh(), nn.Linear(1024, 16))
    return model, torch.randn(2048, 256)


def deep() -> tuple[nn.Module, Tensor]:
    layers = [it for _ in range(4) for it in (nn.Linear(512, 512), nn.Tanh())]
    return nn.Sequential(*layers, nn.Linear(512, 24)), torch.randn(512, 512)


def bottleneck() -> tuple[nn.Module, Tensor]:
    model = nn.Sequential(nn.Linear(512, 8), nn.Tanh(), nn.Linear(8, 512))
    return model, torch.randn(32, 512)


def images() -> tuple[nn.Module, Tensor]:
    """A convolution that goes back through all its taps at once."""
    ending = nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 10)
    conv = nn.Conv2d(1, 16, 7, padding=3)
    return nn.Sequential(conv, nn.ReLU(), *ending), torch.randn(16, 1, 128, 128)


class Norm(nn.LayerNorm):
    """A subclass may do anything, so its Jacobian is not known."""


def norms() -> tuple[nn.Module, Tensor]:
    layers = [it for _ in range(4) for it in (nn.Linear(512, 512), Norm(512))]
    return nn.Sequential(*layers, nn.Linear(512, 24)), torch.randn(512, 512)


def attention() -> tuple[nn.Module, Tensor]:
    """Attention, whose scores are kept here, and not by torch's kernel."""

    class Model(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            y = nn.functional.scaled_dot_product_attention(x, x.sin(), x)
            return y.flatten(1)[:, ::64]

    return Model(), torch.randn(64, 4, 16, 16)


def generator() -> tuple[nn.Module, Tensor]:
    """Images made of few numbers, so that columns go forward."""
    made = nn.Linear(64, 1024), nn.Tanh(), nn.Unflatten(1, (16, 8, 8))
    up = nn.ConvTranspose2d(16, 16, 4, 2, 1), nn.Tanh(), nn.Conv2d(16, 1, 3, padding=1)
    return nn.Sequential(*made, *up), torch.randn(64, 64)


TOGETHER = {"norms": norms, "attention": attention, "generator": generator}


def measure_together(net: str, mode: str, max_bytes: int) -> tuple[int, int, int]:
    """The same where rows or columns go together, and how many the plan says do."""
    _keep_no_pieces()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model, x = TOGETHER[net]()
    plan = gradlib.plan_jacobian(model, x, max_bytes=max_bytes, check=False)
    assert plan.mode == mode
    assert plan.bytes <= max_bytes
    gradlib.per_sample_jacobian(model, x[:2], check=False)
    y = model(x.clone().requires_grad_())
    before = resident()
    del y
    result = gradlib.per_sample_jacobian(model, x, max_bytes=max_bytes, check=False)
    size = result.numel() * result.element_size()
    return resident() - before, size, plan.chunk


def measure_parameters(max_bytes: int) -> tuple[int, int]:
    """The same with respect to parameters, which go by sample."""
    _keep_no_pieces()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(128, 128), nn.Tanh(), nn.Linear(128, 8))
    x, asked = torch.randn(64, 128), {"argnums": "parameters", "check": False}
    plan = gradlib.plan_jacobian(model, x, max_bytes=max_bytes, **asked)
    assert plan.mode == "by sample"
    gradlib.per_sample_jacobian(model, x[:8], **asked)
    before = resident()
    result = gradlib.per_sample_jacobian(model, x, max_bytes=max_bytes, **asked)
    size = sum(it.numel() * it.element_size() for it in result.values())
    return resident() - before, size


def measure_maps(max_bytes: int) -> int:
    """By how many bytes it grows beyond a forward."""
    _keep_no_pieces()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model, x = images()
    gradlib.per_sample_jacobian(model, x[:1, :, :48, :48])
    with torch.no_grad():
        passed = [x]
        for layer in cast(nn.Sequential, model):
            passed.append(layer(passed[-1]))
    before = resident()
    del passed[1:]
    gradlib.per_sample_jacobian(model, x, max_bytes=max_bytes)
    return resident() - before


def _keep_no_pieces() -> None:
    """Have what is given back be free: glibc keeps pieces that nothing fits into."""
    m_mmap_threshold = -3
    ctypes.CDLL(None).mallopt(m_mmap_threshold, 2**18)


def resident() -> int:
    """The most bytes the process ever had in memory."""
    status = Path("/proc/self/status").read_text()
    (line,) = [it for it in status.splitlines() if it.startswith("VmHWM:")]
    return 1024 * int(line.split()[1])


def forget_the_most() -> None:
    """Have `resident` count anew, from what the process has now.

    Of its libraries the system takes pages back that nobody reads: what comes after
    would not show below the most there was before. But they count when they return.
    """
    Path("/proc/self/clear_refs").write_text("5")


def measure(
    net: str,
    max_bytes: int | None,
    chunk_size: int | str,
    known: bool,
    check: bool,
    anew: bool,
) -> tuple[int, int]:
    """By how many bytes the process grows, beyond a forward if any, and the result's.

    A module of known layers is a chain, which has no graph; otherwise it goes the
    general way.
    """
    _keep_no_pieces()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model, x = {"wide": wide, "deep": deep, "bottleneck": bottleneck}[net]()
    # The first passes also load what torch computes them with.
    for mode in ("reverse", "forward", "split", "loop"):
        gradlib.per_sample_jacobian(model, x[:2], mode=mode)
    if not known:
        cast(Any, per_sample).find_in_call = lambda _: None
        cast(Any, compute).find_in_graph = lambda *_: None
    gradlib.per_sample_jacobian(model, x[:2])
    y = None if known else model(x.clone().requires_grad_())
    if anew:
        forget_the_most()
    before = resident()
    del y
    result = gradlib.per_sample_jacobian(
        model if known else model.forward,
        x,
        max_bytes=max_bytes,
        chunk_size=chunk_size,
        check=check,
    )
    return resident() - before, result.numel() * result.element_size()


def measure_columns(mode: str, max_bytes: int) -> int:
    """By how many bytes a process grows beyond a forward of a net of many steps."""
    _keep_no_pieces()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    cell, last = nn.GRUCell(4, 64), nn.Linear(64, 64)

    def fn(x: Tensor) -> Tensor:
        h = x.new_zeros(len(x), 64)
        for _ in range(30):
            h = cell(x, h)
        return last(h)

    x = torch.randn(512, 4)
    gradlib.per_sample_jacobian(fn, x[:2], mode=mode, check=False)
    y = fn(x.clone().requires_grad_())
    before = resident()
    del y
    gradlib.per_sample_jacobian(fn, x, mode=mode, max_bytes=max_bytes, check=False)
    return resident() - before
