"""Both benchmarks on a GPU, with larger networks, compiled ways and kernel launches.

make bench DEVICE=cuda            writes benchmarks/results/<name of the GPU>.json
python -m benchmarks.gpu --quick  tiny networks, on any device: does it work at all?
"""

import argparse
import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

import gradlib
from benchmarks import gpu_nets, jacobian, jacobian_nets, nets, recorder, timing
from benchmarks.jacobian_ways import OURS, Contender, contenders
from benchmarks.memory import measure_memory
from benchmarks.report import as_text

RESULTS = Path(__file__).parent / "results"
COMPILED = ("is_grads_batched", "vmap(jacrev)", "vmap(jacfwd)", "jacrev of the sum")
"""The ways that are measured under torch.compile too."""

REPLAYED = (OURS, "is_grads_batched")
"""Those that a CUDA graph replays too: what calling would take without Python."""

OPTIONS: dict[str, dict[str, Any]] = {
    "all on the GPU": {},
    'device="cpu"': {"device": "cpu"},
    "reduce=tensor_stats": {"reduce": gradlib.tensor_stats},
}
"""The ways to keep what is recorded."""

Result = dict[str, Any]


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print the tables, and write the results file."""
    options = _options(arguments)
    device = torch.device(options.device)
    if options.quick:
        recorded = [nets.mlp(device, modules=6, width=4, batch=2)]
        differentiated = jacobian_nets.nets(device)[:1]
    else:
        recorded = gpu_nets.recorded(device)
        differentiated = gpu_nets.differentiated(device)
    results = measure(recorded, differentiated, options.rounds, device)
    print(as_text(results["recorder"]))
    print(jacobian.as_text(results["jacobian"]))
    out = options.out or (not options.quick and RESULTS / f"{_file_name(device)}.json")
    if out:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(json.dumps(results, indent=1) + "\n")
        print(f"\nwritten to {out}")


def measure(
    recorded: list[nets.Net],
    differentiated: list[jacobian_nets.Net],
    rounds: int,
    device: torch.device,
) -> Result:
    """Return all results, ready to be written as JSON."""
    ways = contenders()
    ways += [
        *(compiled(it) for it in ways if it.name in COMPILED),
        *(replayed(it) for it in ways if it.name in REPLAYED),
    ]
    return {
        "benchmark": "gpu",
        "cuda": torch.version.cuda,
        "tf32": torch.backends.cuda.matmul.allow_tf32,
        "recorder": recorder.measure(
            recorder.Plan(recorded, recorded, (1,), rounds), device
        ),
        "jacobian": jacobian.measure(differentiated, ways, (1,), rounds, device),
        "kept": [row for net in recorded for row in _kept(net, rounds, device)],
        "launches": [
            {"net": net.name, "contender": one.name, "launches": launches(call, device)}
            for net in differentiated
            for one in ways[:1]
            for call in [one.prepare(net.model, net.x, torch.Size())]
        ],
    }


def compiled(one: Contender) -> Contender:
    """Return a way under torch.compile; what compiling takes is not timed."""

    def prepare(model: nn.Module, x: Tensor, shape: torch.Size) -> Callable[[], Tensor]:
        call = torch.compile(one.prepare(model, x, shape))
        call()
        return call

    return Contender(f"{one.name}, compiled", prepare, one.needs, one.against)


def replayed(one: Contender) -> Contender:
    """Return a way whose kernels a CUDA graph replays; capturing them is not timed."""

    def prepare(model: nn.Module, x: Tensor, shape: torch.Size) -> Callable[[], Tensor]:
        call = one.prepare(model, x, shape)
        aside = torch.cuda.Stream(x.device)
        aside.wait_stream(torch.cuda.current_stream(x.device))
        with torch.cuda.stream(aside):  # as torch asks for it, so that all is set up
            call()
        torch.cuda.current_stream(x.device).wait_stream(aside)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            result = call()

        def replay() -> Tensor:
            graph.replay()
            return result

        return replay

    return Contender(f"{one.name}, replayed", prepare, one.needs, one.against)


def launches(call: Callable[[], object], device: torch.device) -> int | None:
    """Return how many kernels a call launches; ``None`` where nothing is launched."""
    if device.type != "cuda":
        return None
    call()
    activities = [ProfilerActivity.CPU, ProfilerActivity.CUDA]
    with profile(activities=activities) as profiler:
        call()
        torch.cuda.synchronize(device)
    return sum(it.count for it in profiler.key_averages() if "LaunchKernel" in it.key)


def _kept(net: nets.Net, rounds: int, device: torch.device) -> list[Result]:
    """Return what recording a step takes, by where what is recorded is kept."""
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


def _turn(call: Callable[[], object], device: torch.device) -> Callable[[], float]:
    def turn() -> float:
        call()
        return timing.milliseconds(call, device)

    return turn


def _file_name(device: torch.device) -> str:
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "no GPU"
    return re.sub(r"\W+", "-", name.lower()).strip("-")


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    about = (__doc__ or "").partition("\n")[0]
    parser = argparse.ArgumentParser("python -m benchmarks.gpu", description=about)
    parser.add_argument("--device", default="cuda", help="cuda, or cuda:1")
    parser.add_argument("--rounds", type=int, default=20, help="at least two")
    parser.add_argument("--quick", action="store_true", help="one tiny network each")
    parser.add_argument("--out", type=Path, help="where the results go")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    main()
