"""A GPU's ways to compute a Jacobian: compiled, kernel by kernel, or as CUDA graphs."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor, nn

import gradlib
from benchmarks.jacobian_ways import Way
from benchmarks.names import OURS
from benchmarks.waiting import no_waiting

ONE_BY_ONE = f"{OURS}, kernel by kernel"
"""gradlib without the CUDA graph that it makes by itself where it can."""


def ready(one: Way) -> Way:
    """Return a way that was used once, as torch loads a GPU's code at first use."""

    def prepare(model: nn.Module, x: Tensor, shape: torch.Size) -> Callable[[], Tensor]:
        call = one.prepare(model, x, shape)
        call()
        return call

    return replace(one, prepare=prepare)


def compiled(one: Way) -> Way:
    """Return a way under torch.compile; compiling is not timed."""

    def prepare(model: nn.Module, x: Tensor, shape: torch.Size) -> Callable[[], Tensor]:
        return torch.compile(one.prepare(model, x, shape))

    return ready(replace(one, name=f"{one.name}, compiled", prepare=prepare))


def one_by_one(one: Way) -> Way:
    """Return gradlib without a CUDA graph, as with a limit on its memory."""
    room = 2**40
    call = partial(gradlib.per_sample_jacobian, check=False, max_bytes=room)
    return replace(
        one, name=ONE_BY_ONE, prepare=lambda model, x, _: partial(call, model, x)
    )


def capturable(one: Way) -> Way:
    """Return a way; gradlib's in a form that a CUDA graph can capture.

    That form asks the device for nothing, neither free memory nor a number: it is a
    chain or rows, without a check.
    """
    if one.name != OURS:
        return one

    def prepare(model: nn.Module, x: Tensor, shape: torch.Size) -> Callable[[], Tensor]:
        del shape
        plan = gradlib.plan_jacobian(model, x, check=False)
        return partial(
            gradlib.per_sample_jacobian,
            model,
            x,
            mode="auto" if plan.mode == "chain" else "reverse",
            max_bytes=plan.max_bytes,
            check=False,
        )

    return replace(one, prepare=prepare)


def replayed(one: Way) -> Way:
    """Return a way whose kernels a CUDA graph replays; the capture is not timed."""

    def prepare(model: nn.Module, x: Tensor, shape: torch.Size) -> Callable[[], Tensor]:
        call = one.prepare(model, x, shape)
        side = torch.cuda.Stream(x.device)
        side.wait_stream(torch.cuda.current_stream(x.device))
        with torch.cuda.stream(side):  # as torch asks for: a warm-up in a side stream
            call()
            with no_waiting():  # a wait within the capture would break it for good
                call()
        torch.cuda.current_stream(x.device).wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            result = call()

        def replay() -> Tensor:
            graph.replay()
            return result

        return replay

    return replace(one, name=f"{one.name}, replayed", prepare=prepare)
