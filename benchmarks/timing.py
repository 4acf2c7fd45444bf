"""Timing several ways of doing the same thing, taken in turn in one run.

A machine's speed drifts while it is measured. So the contenders take turns, in a new
order each round, and a ratio is the median of the ratios within each round.
"""

import gc
import os
import platform
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import torch

GC = (
    "everything alive before the rounds is frozen; gc.collect() before each turn, not "
    "timed; the collector stays on while the time is taken"
)
STATISTICS = (
    "a turn is one untimed use and then several timed ones, of which it gives the "
    "median, or a single one of what takes half a second; medians and quartiles are "
    "over the turns; a ratio is the median over the rounds of the ratio of two turns "
    "of the same round"
)


@dataclass(frozen=True)
class Turn:
    """What a contender does when it is its turn."""

    sample: Callable[[], float]
    """Takes the time once, and returns it in milliseconds."""
    every: int = 1
    """It takes part once every so many rounds: more than 1 for very slow contenders."""


Samples = dict[int, float]
"""Milliseconds by round."""


def milliseconds(call: Callable[[], object], device: torch.device) -> float:
    """Return how long a call takes; on CUDA, until the device has done its work."""
    if device.type != "cuda":
        start = time.perf_counter()
        call()
        return 1e3 * (time.perf_counter() - start)
    before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize(device)
    before.record()
    call()
    after.record()
    torch.cuda.synchronize(device)
    return before.elapsed_time(after)


def interleave(
    turns: Mapping[str, Turn], rounds: int, label: str
) -> dict[str, Samples]:
    """Let the contenders take turns, and return the samples of each.

    Args:
        turns: What each contender does.
        rounds: How many rounds, at least two.
        label: What is measured, for the line of progress.
    """
    shuffled = random.Random(0)
    samples: dict[str, Samples] = {name: {} for name in turns}
    with _only_new_garbage():
        for number in range(rounds):
            names = [name for name in turns if number % turns[name].every == 0]
            shuffled.shuffle(names)
            for name in names:
                progress(f"{label}: round {number + 1} of {rounds}, {name}")
                gc.collect()
                samples[name][number] = turns[name].sample()
    progress("")
    return samples


def spread(values: Mapping[int, float]) -> dict[str, float]:
    """Return the median and the quartiles of values by round, and the least."""
    low, median, high = statistics.quantiles(values.values(), n=4, method="inclusive")
    return {
        "median": median,
        "lower_quartile": low,
        "upper_quartile": high,
        "least": min(values.values()),
    }


def ratio(samples: Samples, base: Samples) -> dict[str, float]:
    """Return the spread of the ratios within each round in which both took part."""
    both = samples.keys() & base.keys()
    return spread({number: samples[number] / base[number] for number in both})


def conditions(device: torch.device, rounds: int, uses: object) -> dict[str, object]:
    """Return when, where and how results are measured.

    Args:
        device: The device.
        rounds: How many rounds there are.
        uses: How many timed uses a turn has.
    """
    return {
        "date": now(),
        "machine": machine(device),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "settings": {
            "device": device.type,
            "rounds": rounds,
            "timed_uses_in_a_turn": uses,
            "garbage": GC,
            "statistics": STATISTICS,
        },
    }


@contextmanager
def threads(number: int) -> Iterator[None]:
    """Let torch use so many threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def machine(device: torch.device) -> dict[str, object]:
    """Describe the machine."""
    found: dict[str, object] = {
        "cpu": _cpu(),
        "cores": len(os.sched_getaffinity(0)),
        "load_average": os.getloadavg()[0],
        "system": f"{platform.system()} {platform.machine()}",
    }
    if device.type == "cuda":
        found["gpu"] = torch.cuda.get_device_name(device)
    return found


def now() -> str:
    """Return date and time, in UTC."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def progress(text: str) -> None:
    """Show one line, in place of the one before."""
    if sys.stderr.isatty():
        print(f"\r\x1b[K{text}", end="", file=sys.stderr, flush=True)


@contextmanager
def _only_new_garbage() -> Iterator[None]:
    """Keep what is alive now, torch above all, out of garbage collections."""
    frozen_before = gc.get_freeze_count()
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        if not frozen_before:  # else the caller, such as a test, froze some itself
            gc.unfreeze()


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    names = [line.partition(": ")[2] for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()
