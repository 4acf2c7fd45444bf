"""What the Jacobian of every sample costs: gradlib against every existing way.

    python -m benchmarks.jacobian                 on the CPU
    python -m benchmarks.jacobian --random 80     networks drawn by chance
    python -m benchmarks.jacobian --written       short functions
    python -m benchmarks.jacobian --device cuda
    python -m benchmarks.jacobian --quick         the smallest: does it work at all?

The networks' weights require no grad. Every result is compared with one in float64.
"""

import argparse
import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import gradlib
from benchmarks import timing
from benchmarks.files import RESULTS, write
from benchmarks.jacobian_nets import Net, nets, random_nets
from benchmarks.jacobian_ways import (
    MOST,
    Way,
    every_way,
    loop,
    serious_and_checked,
)
from benchmarks.memory import measure_memory
from benchmarks.names import counted_threads
from benchmarks.written_nets import written_nets
from gradlib.render import Table

PATIENCE = 5e3
"""The most milliseconds a use may take; a slower way is left out."""
PASSES = 2000
"""The most successive passes a way may make on a GPU, as each waits for it."""
TRACED = 400
"""The most milliseconds a use may take for its memory to be traced by event."""
REPEATS = 3
"""The fewest timed uses in a turn, unless a use takes long."""
MOST_REPEATS = 100
"""The most timed uses in a turn, if a use takes next to nothing."""
FILLED = 10
"""The milliseconds a turn should take, as what it uses first has to be fetched."""

Result = dict[str, Any]


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print the table, and write the results file."""
    options = _options(arguments)
    device = torch.device(options.device)
    threads = (1,) if options.quick or device.type == "cuda" else (1, 2)
    rounds = 2 if options.quick else options.rounds
    suffix, all_nets, ways = _asked(options, device)
    chosen = [net for net in all_nets if options.net in net.name]
    if options.quick:
        chosen = chosen[:1]
    results = measure(chosen, ways, threads, rounds, device)
    print(as_text(results))
    out = options.out or (
        not options.quick
        and not options.net
        and RESULTS / f"jacobian{suffix}-{device.type}.json"
    )
    if out:
        write(results, out)
        print(f"\nwritten to {out}")


def _asked(
    options: argparse.Namespace, device: torch.device
) -> tuple[str, list[Net], list[Way]]:
    """Return what the name of the results ends with, the networks, and the ways."""
    if options.random:
        return "-random", random_nets(options.random, device), serious_and_checked()
    if options.written:
        return "-written", written_nets(device), serious_and_checked()
    return "", nets(device), every_way()


def measure(
    chosen: list[Net],
    ways: list[Way],
    threads: tuple[int, ...],
    rounds: int,
    device: torch.device,
) -> Result:
    """Return all results, ready to be written as JSON."""
    conditions = timing.conditions(device, rounds, [REPEATS, MOST_REPEATS])
    rows: list[Result] = []
    for count, net in itertools.product(threads, chosen):
        known = {it["contender"]: it for it in rows if it["net"] == net.name}
        label = counted_threads(count)
        with timing.threads(count):
            found = _of_net(net, ways, known, rounds, device, label)
        rows += [{"net": net.name, "threads": count, **row} for row in found]
    plans = [_plan(net) for net in chosen]
    return {"benchmark": "jacobian", **conditions, "plans": plans, "rows": rows}


def _of_net(
    net: Net,
    ways: list[Way],
    known: dict[str, Result],
    rounds: int,
    device: torch.device,
    label: str,
) -> list[Result]:
    """Measure all ways on a network; `known` has what other threads have shown."""
    truth = loop(net.model.double(), net.x.double())
    net.model.to(net.x.dtype)
    shape, size = truth.shape, truth.numel() * net.x.element_size()
    turns: dict[str, timing.Turn] = {}
    rows: dict[str, Result] = {}
    for one in ways:
        timing.progress(f"{net.name}, {label}: {one.name}")
        row: Result = {"contender": one.name, "result_bytes": size}
        rows[one.name] = row
        try:
            row |= _tried(one, net, truth, device, known.get(one.name))
            if row.get("skipped"):
                continue
            call = one.prepare(net.model, net.x, shape)
            turn = _turn(call, _uses(call, row, device), device)
        except Exception as error:
            said = str(error).partition("\n")[0][:200]
            row["skipped"] = f"it raises {type(error).__name__}: {said}"
            continue
        turns[one.name] = timing.Turn(turn, _every(row, rounds))
    samples = timing.interleave(turns, rounds, f"{net.name}, {label}")
    for name, taken in samples.items():
        rows[name] |= {"turns": len(taken), "ms": timing.spread(taken)}
        against = next(it.against for it in ways if it.name == name)
        if against in samples:
            rows[name]["to_gradlib"] = timing.ratio(taken, samples[against])
    return list(rows.values())


def _plan(net: Net) -> Result:
    """Return which way gradlib takes, and the multiply-adds of each way."""
    plan = gradlib.plan_jacobian(net.model, net.x)
    return {
        "net": net.name,
        "batch": len(net.x),
        "mode": plan.mode,
        "multiply_adds": plan.work,
    }


def _tried(
    one: Way, net: Net, truth: Tensor, device: torch.device, known: Result | None
) -> Result:
    """Use a way once; return its first results, or why it is left out."""
    if known is not None and known.get("skipped"):
        return {"skipped": known["skipped"]}
    needs = one.needs(net.x, truth.shape)
    if needs > MOST:
        return {"skipped": f"it needs {needs / 2**30:.0f} GiB or more"}
    if too_many := too_many_passes(one, net.x, truth.shape, device):
        return {"skipped": too_many}
    call = one.prepare(net.model, net.x, truth.shape)
    found: list[Tensor] = []
    first = timing.milliseconds(lambda: found.append(call()), device)
    difference = (found.pop().double() - truth).abs().max() / truth.abs().max()
    row: Result = {"first_ms": first, "difference": difference.item()}
    if first > PATIENCE:
        row["skipped"] = f"one use takes {first / 1e3:.0f} s"
    elif row["difference"] > net.close:
        row["skipped"] = "its result is another"
    elif known is not None:
        row["peak_bytes"] = known["peak_bytes"]
    elif first < TRACED:
        row["peak_bytes"] = measure_memory(call, device).peak
    else:
        row["peak_bytes"] = None
    return row


def too_many_passes(
    one: Way, x: Tensor, shape: torch.Size, device: torch.device
) -> str:
    """Return why a way would take too long on a GPU, or ``""``."""
    passes = one.passes(x, shape)
    if device.type == "cpu" or passes <= PASSES:
        return ""
    return f"it makes {passes:,} passes, one after the other"


def _turn(call: Any, uses: int, device: torch.device) -> Any:
    def turn() -> float:
        if uses > 1:  # warm up, unless a use takes so long that it does not matter
            call()
        taken = sorted(timing.milliseconds(call, device) for _ in range(uses))
        return taken[len(taken) // 2]

    return turn


def _uses(call: Any, row: Result, device: torch.device) -> int:
    """Return how many timed uses make a turn: few if each takes long."""
    if row["first_ms"] > PATIENCE / 10:
        return 1
    use = timing.milliseconds(call, device)
    return max(REPEATS, min(MOST_REPEATS, int(FILLED / use)))


def _every(row: Result, rounds: int) -> int:
    """Return the n of every n-th round in which a way takes part, in at least two."""
    return max(1, min(rounds // 2, int(row["first_ms"] / 500)))


def as_text(results: Result) -> str:
    """Return the results as tables for a terminal."""
    machine = results["machine"]
    lines = [
        f"{machine.get('gpu', machine['cpu'])}, {machine['cores']} cores, torch "
        f"{results['torch']}, {results['date']}"
    ]
    groups: dict[tuple[str, int], list[Result]] = {}
    for row in results["rows"]:
        groups.setdefault((row["net"], row["threads"]), []).append(row)
    for (net, threads), rows in groups.items():
        size = rows[0]["result_bytes"] / 2**20
        title = f"{net}, {counted_threads(threads)}; result {size:.2f} MiB"
        columns = ("way", "ms", "x gradlib", "peak MiB", "difference")
        cells = [_cells(row) for row in rows if not row.get("skipped")]
        left_out = [
            f"{row['contender']}: {row['skipped']}"
            for row in rows
            if row.get("skipped")
        ]
        lines += ["", Table(title, columns, cells, tuple(left_out)).text()]
    return "\n".join(lines)


def _cells(row: Result) -> tuple[str, ...]:
    return (
        row["contender"],
        f"{row['ms']['median']:.3g}",
        f"{row['to_gradlib']['median']:.2f}" if "to_gradlib" in row else "",
        f"{row['peak_bytes'] / 2**20:.1f}" if row["peak_bytes"] else "",
        f"{row['difference']:.0e}",
    )


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    about = (__doc__ or "").partition("\n")[0]
    parser = argparse.ArgumentParser("python -m benchmarks.jacobian", description=about)
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    parser.add_argument("--rounds", type=int, default=10, help="at least two")
    parser.add_argument("--random", type=int, help="so many others, chosen by chance")
    parser.add_argument("--written", action="store_true", help="short functions")
    parser.add_argument("--net", default="", help="only those with this in their name")
    parser.add_argument("--quick", action="store_true", help="one network, two rounds")
    parser.add_argument("--out", type=Path, help="where the results go")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    main()
