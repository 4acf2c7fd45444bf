"""What recording a backward pass costs: gradlib against hooks by hand and its peers.

    python -m benchmarks.recorder                 on the CPU
    python -m benchmarks.recorder --device cuda
    python -m benchmarks.recorder --quick         tiny networks: does it work at all?

Two times are taken: of a whole use (attach the hooks, forward, loss, backward, remove
the hooks, drop what was recorded), and of a step alone, one of several under the same
hooks.
"""

import argparse
import itertools
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from benchmarks import timing
from benchmarks.contender import Contender
from benchmarks.contenders import contenders
from benchmarks.files import RESULTS, write
from benchmarks.memory import measure_memory
from benchmarks.names import BY_HAND, FULL, NONE, counted_threads
from benchmarks.nets import Net, mlp, transformer
from benchmarks.recorder_report import as_text

REPEATS = 3
"""The number of timed uses in a turn."""

Result = dict[str, Any]


@dataclass(frozen=True)
class Plan:
    """What is measured: the networks that are timed, and those whose memory is."""

    timed: list[Net]
    weighed: list[Net]
    threads: tuple[int, ...]
    rounds: int


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print the tables, and write the results file."""
    options = _options(arguments)
    device = torch.device(options.device)
    plan = _quick(device) if options.quick else _full(device, options.rounds)
    results = measure(plan, device)
    print(as_text(results))
    out = options.out or (
        not options.quick and RESULTS / f"recorder-{device.type}.json"
    )
    if out:
        write(results, out)
        print(f"\nwritten to {out}")


def measure(plan: Plan, device: torch.device) -> Result:
    """Return all results, ready to be written as JSON."""
    conditions = timing.conditions(device, plan.rounds, REPEATS)
    everyone = contenders()
    times: list[Result] = []
    for threads, net in itertools.product(plan.threads, plan.timed):
        label = f"{net.name}, {counted_threads(threads)}"
        with timing.threads(threads):
            rows = _times(everyone, net, plan.rounds, device, label)
        times += [{"net": net.name, "threads": threads, **row} for row in rows]
    with timing.threads(1):
        memory = [
            {"net": net.name, **row}
            for net in plan.weighed
            for row in _memory(everyone, net, device)
        ]
    return {
        "benchmark": "recorder",
        **conditions,
        "contenders": [
            {
                "contender": one.name,
                "version": one.version or None,
                "records": one.records,
                "takes_part_every": one.every,
            }
            for one in everyone
        ],
        "times": times,
        "memory": memory,
    }


def _times(
    everyone: list[Contender], net: Net, rounds: int, device: torch.device, label: str
) -> list[Result]:
    reasons = {one.name: why_not(one, net) for one in everyone}
    present = [one for one in everyone if not reasons[one.name]]
    fewest = max(1, rounds // 2)  # at least two turns, for quartiles
    uses = {
        one.name: timing.Turn(_use_turn(one, net, device), min(one.every, fewest))
        for one in present
    }
    steps = {
        one.name: timing.Turn(_step_turn(one, net, device))
        for one in present
        if one.attach
    }
    of_uses = timing.interleave(uses, rounds, f"{label}, whole use")
    of_steps = timing.interleave(steps, rounds, f"{label}, step alone")
    return [
        {
            "contender": one.name,
            "skipped": reasons[one.name] or None,
            "use": _compared(of_uses, one.name),
            "step": _compared(of_steps, one.name),
        }
        for one in everyone
    ]


def why_not(contender: Contender, net: Net) -> str:
    """Return why a contender cannot record a net; "" if it can."""
    may_raise = contender.peer or contender.name == FULL  # on in-place operations
    if contender.absent or not may_raise:
        return contender.absent
    try:
        with contender.around():
            contender.use(net)
    except Exception as error:
        return f"it raises {type(error).__name__}: {error}"
    return ""


def _use_turn(
    contender: Contender, net: Net, device: torch.device
) -> Callable[[], float]:
    def use() -> None:  # drops what was recorded, while it is timed
        contender.use(net)

    def turn() -> float:
        with contender.around():
            return _timed(use, net, device)

    return turn


def _step_turn(
    contender: Contender, net: Net, device: torch.device
) -> Callable[[], float]:
    def turn() -> float:
        assert contender.attach is not None
        with contender.around(), contender.attach(net.model):
            return _timed(net.step, net, device)

    return turn


def _timed(call: Callable[[], None], net: Net, device: torch.device) -> float:
    taken: list[float] = []
    for _ in range(1 + REPEATS):
        net.model.zero_grad()
        taken.append(timing.milliseconds(call, device))
    return statistics.median(taken[1:])


def _compared(samples: dict[str, timing.Samples], name: str) -> Result | None:
    if name not in samples:
        return None
    return {
        "turns": len(samples[name]),
        "ms": timing.spread(samples[name]),
        "to_none": timing.ratio(samples[name], samples[NONE]),
        "to_by_hand": timing.ratio(samples[name], samples[BY_HAND]),
    }


def _memory(everyone: list[Contender], net: Net, device: torch.device) -> list[Result]:
    rows: list[Result] = []
    for one in everyone:
        timing.progress(f"memory: {net.name}, {one.name}")
        reason = why_not(one, net)
        row: Result = {"contender": one.name, "skipped": reason or None}
        if not reason:
            with one.around():
                one.use(net)  # allocates what stays for good, such as workspaces
                net.model.zero_grad()
                found = measure_memory(lambda one=one: one.use(net), device)
            row |= {"peak_bytes": found.peak, "held_bytes": found.held}
        rows.append(row)
    net.model.zero_grad()
    timing.progress("")
    return rows


def _full(device: torch.device, rounds: int) -> Plan:
    wide = mlp(device, modules=150, width=256, batch=64)
    narrow = mlp(device, modules=150, width=16, batch=64)
    # With hardly any arithmetic nobody would train it, but overhead is at its worst.
    narrow = replace(narrow, name=f"{narrow.name} (the worst case)")
    return Plan(
        timed=[
            wide,
            transformer(device, layers=4, width=128, batch=8),
            narrow,
        ],
        weighed=[wide, mlp(device, modules=150, width=256, batch=512)],
        threads=(1,) if device.type == "cuda" else (1, 2),
        rounds=rounds,
    )


def _quick(device: torch.device) -> Plan:
    small = mlp(device, modules=6, width=4, batch=2)
    return Plan(
        timed=[small, transformer(device, layers=1, width=8, batch=2)],
        weighed=[small, mlp(device, modules=6, width=4, batch=16)],
        threads=(1,),
        rounds=2,
    )


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    about = (__doc__ or "").partition("\n")[0]
    parser = argparse.ArgumentParser("python -m benchmarks.recorder", description=about)
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    parser.add_argument("--rounds", type=int, default=40, help="at least two")
    parser.add_argument(
        "--quick", action="store_true", help="tiny networks, two rounds"
    )
    parser.add_argument("--out", type=Path, help="where the results go")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    main()
