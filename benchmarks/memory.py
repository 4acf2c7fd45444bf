"""How many bytes of tensors a piece of code needs, counted by torch's allocator."""

import gc
import json
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch
from torch.profiler import ProfilerActivity, profile


class Memory(NamedTuple):
    """Bytes allocated for tensors on top of those allocated before."""

    peak: int
    held: int
    """After the call, while what it returned is alive."""


def measure_memory(call: Callable[[], object], device: torch.device) -> Memory:
    """Run `call` and count what it allocates on the device.

    Exact, and the same every time: the allocator counts, not the operating system.
    """
    gc.collect()
    return _on_cuda(call, device) if device.type == "cuda" else _on_cpu(call)


def _on_cuda(call: Callable[[], object], device: torch.device) -> Memory:
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    result = call()
    torch.cuda.synchronize(device)
    gc.collect()
    held = torch.cuda.memory_allocated(device) - before
    peak = torch.cuda.max_memory_allocated(device) - before
    del result
    return Memory(peak, held)


def _on_cpu(call: Callable[[], object]) -> Memory:
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # else it logs its start and stop
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        result = call()
        gc.collect()
    del result
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "trace.json")
        profiler.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
    changes = [event for event in events if event.get("name") == "[memory]"]
    blocks: dict[int, int] = {}  # sizes by address, without blocks allocated before
    peak = allocated = 0
    for change in sorted(changes, key=lambda event: event["ts"]):
        address, size = change["args"]["Addr"], change["args"]["Bytes"]
        allocated -= blocks.pop(address, 0)
        if size > 0:
            blocks[address] = size
            allocated += size
        peak = max(peak, allocated)
    return Memory(peak, allocated)
