"""Both benchmarks on a GPU, with larger networks, compiled ways and kernel launches.

make bench DEVICE=cuda             writes benchmarks/results/<name of the GPU>.json
python -m benchmarks.gpu --resume  continues that file, if it is there
python -m benchmarks.gpu --quick   tiny networks, on any device: does it work at all?

Each measurement is written to the file at once, and an error as a row of it: a machine
that is lent for minutes may go away at any time.
"""

import argparse
import json
import re
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
from torch.profiler import ProfilerActivity, profile

import gradlib
from benchmarks import gpu_nets, jacobian, jacobian_nets, nets, recorder, timing
from benchmarks.files import RESULTS, write
from benchmarks.gpu_ways import (
    ONE_BY_ONE,
    capturable,
    compiled,
    one_by_one,
    ready,
    replayed,
)
from benchmarks.jacobian_ways import Way, every_way, loop, serious
from benchmarks.memory import measure_memory
from benchmarks.names import BATCHED, JACFWD, JACREV, JACREV_OF_SUM, OURS, REPLICATED
from benchmarks.recorder_report import as_text

COMPILED = (
    BATCHED,
    JACREV,
    JACFWD,
    JACREV_OF_SUM,
    REPLICATED,
)
"""The ways also measured under torch.compile, which would unroll the others."""

REPLAYED = (OURS, BATCHED)
"""The ways also replayed by a CUDA graph of the benchmark, without any Python."""

PAYS = 1.5
"""A CUDA graph is worth its memory if a call takes this many times as long without."""

COMPARED = (OURS, BATCHED, JACREV)
"""The ways that are measured in each of `NUMBERS`."""

NUMBERS = {
    "float32": (torch.float32, False),
    "float32, TF32": (torch.float32, True),
    "bfloat16": (torch.bfloat16, False),
}
"""The dtypes of a network and its batch, and whether products may use TF32."""

OPTIONS: dict[str, dict[str, Any]] = {
    "all on the GPU": {},
    'device="cpu"': {"device": "cpu"},
    "reduce=tensor_stats": {"reduce": gradlib.tensor_stats},
}
"""The ways to keep what is recorded."""

Result = dict[str, Any]


class Step(NamedTuple):
    """One part of the benchmark on one network: the most an interruption loses."""

    part: str
    net: str
    run: Callable[[], Result | list[Result]]


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, write the results file after each step, and print the tables."""
    options = _options(arguments)
    device = torch.device(options.device)
    if device.index is not None:  # streams and events belong to the current device
        torch.cuda.set_device(device)
    if options.quick:
        recorded = [nets.mlp(device, modules=6, width=4, batch=2)]
        differentiated = jacobian_nets.nets(device)[:1]
    else:
        recorded = gpu_nets.recorded(device)
        differentiated = gpu_nets.differentiated(device)
    out = options.out or (not options.quick and RESULTS / f"{_file_name(device)}.json")
    begun = None
    if options.resume and out and out.exists():
        begun = json.loads(out.read_text())

    def save(results: Result) -> None:
        if out:
            write(results, out)

    with tf32(allowed=False):  # unless a row says otherwise
        results = measure(
            _steps(recorded, differentiated, options.rounds, device), begun, save
        )
    _print(results)
    if out:
        print(f"\nwritten to {out}")


def measure(
    steps: Sequence[Step], begun: Result | None, save: Callable[[Result], None]
) -> Result:
    """Return all results, ready to be written as JSON.

    Args:
        steps: What to measure.
        begun: The results of an interrupted run; ``None`` to begin anew.
        save: Called after each step with the results so far.
    """
    here = {
        "benchmark": "gpu",
        "cuda": torch.version.cuda,
        "torch": torch.__version__,
    }
    if begun is not None and {key: begun.get(key) for key in here} != here:
        raise SystemExit(f"--resume: the file was not begun with {here}.")
    new = here | {"date": timing.now(), "done": [], "failed": []}
    results: Result = begun or new
    results["planned"] = [[step.part, step.net] for step in steps]
    for step in steps:
        name = [step.part, step.net]
        if name in results["done"]:
            continue
        torch.compiler.reset()  # else the limit on recompiling counts earlier networks
        try:
            _add(results, step.part, step.run())
        except Exception as error:
            results["failed"].append(
                {"part": step.part, "net": step.net, "error": _said(error)}
            )
        if "replayed" in results:
            results["answer"] = answer(results["replayed"])
        results["done"].append(name)
        save(results)
    return results


def _add(results: Result, part: str, found: Result | list[Result]) -> None:
    """Add results to a part, whose first results also say how it was measured."""
    if isinstance(found, list):
        results.setdefault(part, []).extend(found)
        return
    known = results.setdefault(part, found)
    if known is not found:
        for key in ("times", "memory", "rows", "plans"):
            known.get(key, []).extend(found.get(key, []))


def _steps(
    recorded: list[nets.Net],
    differentiated: list[jacobian_nets.Net],
    rounds: int,
    device: torch.device,
) -> list[Step]:
    """Return what to measure, with what may leave the device in a bad state last.

    What is asked for most comes first.
    """
    ways = [ready(it) for it in every_way()]
    with_compiled = ways[:1]
    with_compiled += [compiled(it) for it in every_way() if it.name in COMPILED]
    plain = [it for it in every_way() if it.name in REPLAYED]
    graphs = [ready(it) for it in (*plain, one_by_one(plain[0]))]
    graphs += [replayed(capturable(it)) for it in plain]
    compared = [ready(it) for it in every_way() if it.name in COMPARED]
    counted = [ready(it) for it in serious()]

    def table(net: jacobian_nets.Net) -> Result:
        found = jacobian.measure([net], ways, (1,), rounds, device)
        _require_ratios(found["rows"])
        return found

    def rows_of(among: list[Way], net: jacobian_nets.Net) -> list[Result]:
        return jacobian.measure([net], among, (1,), rounds, device)["rows"]

    def hooks(net: nets.Net) -> Result:
        return recorder.measure(recorder.Plan([net], [net], (1,), rounds), device)

    parts: dict[str, Callable[[Any], Result | list[Result]]] = {
        "jacobian": table,
        "recorder": hooks,
        "kept": partial(_kept, rounds, device),
        "launches": partial(_launches, counted, device),
        "numbers": partial(_numbers, compared, rounds, device),
        "replayed": partial(rows_of, graphs),
        "compiled": partial(rows_of, with_compiled),
    }
    return [
        Step(part, net.name, partial(run, net))
        for part, run in parts.items()
        for net in (recorded if part in ("recorder", "kept") else differentiated)
    ]


@contextmanager
def tf32(*, allowed: bool) -> Generator[None]:
    """Set whether products and convolutions may use TF32."""
    # To the stubs torch.backends.cudnn is a module without such an attribute.
    matmul, cudnn = torch.backends.cuda.matmul, cast(Any, torch.backends.cudnn)
    before = matmul.allow_tf32, cudnn.allow_tf32
    matmul.allow_tf32 = cudnn.allow_tf32 = allowed
    try:
        yield
    finally:
        matmul.allow_tf32, cudnn.allow_tf32 = before


# Parts


def _numbers(
    ways: list[Way], rounds: int, device: torch.device, net: jacobian_nets.Net
) -> list[Result]:
    """Return the times and the errors of the ways in each of `NUMBERS`."""
    truth = loop(deepcopy(net.model).double(), net.x.double())
    rows: dict[str, Result] = {}
    turns: dict[str, timing.Turn] = {}
    for numbers, (dtype, allowed) in NUMBERS.items():
        model, x = deepcopy(net.model).to(dtype), net.x.to(dtype)
        for one in ways:
            label = f"{one.name}, {numbers}"
            row: Result = {"net": net.name, "numbers": numbers, "contender": one.name}
            rows[label] = row
            try:
                with tf32(allowed=allowed):
                    call = one.prepare(model, x, truth.shape)
                    apart = (call().double() - truth).abs().max() / truth.abs().max()
                row["difference"] = apart.item()
                turns[label] = timing.Turn(_turn(call, device, allowed=allowed))
            except Exception as error:
                row["skipped"] = f"it raises {_said(error)}"
    samples = timing.interleave(turns, rounds, f"{net.name}, numbers")
    for label, taken in samples.items():
        rows[label]["ms"] = timing.spread(taken)
    return list(rows.values())


def _launches(
    ways: list[Way], device: torch.device, net: jacobian_nets.Net
) -> list[Result]:
    """Return how many kernels each way launches."""
    with torch.no_grad():
        shape = torch.Size([*net.model(net.x).shape, *net.x.shape[1:]])
    rows: list[Result] = []
    for one in ways:
        row: Result = {"net": net.name, "contender": one.name, "launches": None}
        rows.append(row)
        if too_many := jacobian.too_many_passes(one, net.x, shape, device):
            row["skipped"] = too_many
            continue
        try:
            call = one.prepare(net.model, net.x, shape)
            row["launches"] = launches(call, device)
        except Exception as error:
            row["skipped"] = f"it raises {_said(error)}"
    return rows


_LAUNCH = re.compile("LaunchKernel|GraphLaunch")


def launches(call: Callable[[], object], device: torch.device) -> int | None:
    """Return how often a call launches a kernel or a graph of kernels.

    ``None`` if no launch is seen.
    """
    if device.type != "cuda":
        return None
    call()
    activities = [ProfilerActivity.CPU, ProfilerActivity.CUDA]
    with profile(activities=activities) as profiler:
        call()
        torch.cuda.synchronize(device)
    events = profiler.key_averages()
    launched = [it for it in events if _LAUNCH.search(it.key)]
    return sum(it.count for it in launched) or None


def _kept(rounds: int, device: torch.device, net: nets.Net) -> list[Result]:
    """Return the cost of recording a step, by where the recording is kept."""
    calls = {name: _recording(net, options) for name, options in OPTIONS.items()}
    turns = {name: timing.Turn(_turn(call, device)) for name, call in calls.items()}
    samples = timing.interleave(turns, rounds, f"{net.name}, kept")
    rows: list[Result] = []
    for name, call in calls.items():
        net.model.zero_grad()
        memory = measure_memory(call, device)
        rows.append(
            {
                "net": net.name,
                "kept": name,
                "ms": timing.spread(samples[name]),
                "peak_bytes": memory.peak,
                "held_bytes": memory.held,
                "launches": launches(call, device),
            }
        )
    net.model.zero_grad()
    return rows


def _recording(net: nets.Net, options: dict[str, Any]) -> Callable[[], object]:
    def call() -> object:
        with gradlib.record(net.model, **options) as recording:
            net.step()
        return recording

    return call


def _turn(
    call: Callable[[], object], device: torch.device, *, allowed: bool = False
) -> Callable[[], float]:
    def turn() -> float:
        with tf32(allowed=allowed):
            call()
            return timing.milliseconds(call, device)

    return turn


def _require_ratios(rows: list[Result]) -> None:
    """Raise unless both gradlib and another way were measured."""
    skipped = {row["contender"]: row["skipped"] for row in rows if row.get("skipped")}
    if OURS in skipped or all(
        row["contender"].startswith(OURS) for row in rows if "ms" in row
    ):
        raise RuntimeError(f"nothing to compare: {skipped}")


# Words and files


def answer(rows: list[Result]) -> str:
    """Return in a sentence whether CUDA graphs pay, from the rows of "replayed"."""
    times = [
        row["to_gradlib"]["median"]
        for row in rows
        if row["contender"] == ONE_BY_ONE and "to_gradlib" in row
    ]
    if not times:
        return "No call of gradlib was measured without its CUDA graph."
    pays = sum(it >= PAYS for it in times)
    return (
        f"Kernel by kernel, gradlib takes {min(times):.2f} to {max(times):.2f} times "
        "what it takes with the CUDA graph that it makes by itself where it can. The "
        f"graph saves a third or more on {pays} of {len(times)} networks."
    )


def _said(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error)[:200]}"


def _print(results: Result) -> None:
    if "recorder" in results:
        print(as_text(results["recorder"]))
    if "jacobian" in results:
        print(jacobian.as_text(results["jacobian"]))
    if "replayed" in results:
        print(results["answer"])
    for row in results["failed"]:
        print(f"{row['part']}, {row['net']}: {row['error']}")


def _file_name(device: torch.device) -> str:
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "no GPU"
    return re.sub(r"\W+", "-", name.lower()).strip("-")


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    about = (__doc__ or "").partition("\n")[0]
    parser = argparse.ArgumentParser("python -m benchmarks.gpu", description=about)
    parser.add_argument("--device", default="cuda", help="cuda, or cuda:1")
    parser.add_argument("--rounds", type=int, default=20, help="at least two")
    parser.add_argument("--quick", action="store_true", help="one tiny network each")
    parser.add_argument("--resume", action="store_true", help="where it was cut off")
    parser.add_argument("--out", type=Path, help="where the results go")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    main()
