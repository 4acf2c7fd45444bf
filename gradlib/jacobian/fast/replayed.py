"""Computations that a GPU repeats, replayed by a CUDA graph.

A GPU waits for Python where a Jacobian takes many small kernels. Those of known layers
read no number on the CPU, draw none, and depend only on the memory of x and the
weights. So a CUDA graph of them can be replayed with the values that are there by then.
"""

import gc
from collections.abc import Callable, Generator, Hashable, Sequence
from contextlib import contextmanager
from threading import Lock
from typing import Any, NamedTuple, cast
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch import Tensor, nn

from gradlib.private.modes import graph_is_captured
from gradlib.private.products import how_products_are_computed

MET = 2
"""After how many computations with the same key one is captured."""

MOST = 2**29
"""How many bytes of a device one graph may keep, for x, the result and all between."""

SHARE = 64
"""All graphs together may keep one part in this many of a device's memory."""


class Captured(NamedTuple):
    """A computation that can be launched again.

    Attributes:
        x: The tensor to write the input to.
        found: The tensor that has the result after a replay.
        replay: Launches the computation.
        bytes: How many bytes of the device it keeps.
    """

    x: Tensor
    found: Tensor
    replay: Callable[[], None]
    bytes: int


class Replays:
    """Keeps the CUDA graph of the last computation, once that was repeated.

    Attributes:
        device: The device whose memory it keeps.
        bytes: How many bytes.
    """

    __slots__ = (
        *("__weakref__", "_captured", "_key", "_lock", "_times"),
        *("bytes", "device"),
    )

    def __init__(self) -> None:
        """Start without a graph."""
        self.device: torch.device | None = None
        self.bytes = 0
        self._captured: Captured | None = None
        self._key: Hashable = None
        self._times = 0
        self._lock = Lock()

    def result(
        self,
        compute: Callable[[Tensor], Tensor],
        x: Tensor,
        others: Sequence[Tensor],
        needs: int,
        form: Hashable = None,
    ) -> Tensor | None:
        """Return ``compute(x)`` by a replay, or ``None`` where there is no graph yet.

        Args:
            compute: Computes the result, from x and the present values of `others`.
            x: The input.
            others: All other tensors that `compute` reads.
            needs: How many bytes it takes by estimate, with the result.
            form: All else that the kernels depend on.
        """
        if graph_is_captured() or not self._lock.acquire(False):
            return None
        try:
            key = stream_of(x.device), _key(x, others, form)
            if key != self._key:
                self._let_go()
                self._key, self._times = key, 0
            self._times += 1
            made = self._captured
            if made is None:
                if self._times <= MET or not _may_keep(needs, x.device):
                    return None
                made = self._kept(captured(compute, x))
            given, result, replay, _ = made
            given.copy_(x.detach())
            replay()
            return result.clone()
        except RuntimeError:  # it cannot be captured, or memory has run out
            self._let_go()
            self._times = -(2**62)  # no further try with this key
            return None
        finally:
            self._lock.release()

    def _kept(self, made: Captured) -> Captured:
        """Keep a graph, and return it.

        Raises:
            RuntimeError: It takes more memory than was estimated.
        """
        device = made.x.device
        if not _may_keep(made.bytes, device):
            raise RuntimeError(f"it would keep {made.bytes} bytes of {device}")
        self.device, self.bytes, self._captured = device, made.bytes, made
        with _EVERY_LOCK:
            _every.add(self)
        return made

    def _let_go(self) -> None:
        self._captured, self.bytes = None, 0
        with _EVERY_LOCK:
            _every.discard(self)


def _may_keep(size: int, device: torch.device) -> bool:
    """Tell whether another graph may keep that many bytes of a device."""
    with _EVERY_LOCK:  # other threads capture graphs too
        kept = sum(it.bytes for it in _every if it.device == device)
    return size <= MOST and kept + size <= memory_of(device) // SHARE


_EVERY_LOCK = Lock()
_every: WeakSet[Replays] = WeakSet()
_of_modules: "WeakKeyDictionary[nn.Module, Replays]" = WeakKeyDictionary()


def replays_of(module: nn.Module) -> Replays:
    """Return the replays of a module, which are dropped when it is deleted."""
    replays = _of_modules.get(module)
    if replays is None:
        replays = _of_modules[module] = Replays()
    return replays


def _key(x: Tensor, others: Sequence[Tensor], form: Hashable) -> Hashable:
    """Return the key that must not change for a graph to be replayed."""
    memory = [(it.data_ptr(), it.shape, it.stride()) for it in others]
    of_x = x.dtype, x.device, x.shape, x.stride()
    return how_products_are_computed(), of_x, form, *memory


def may_replay_on(device: torch.device) -> bool:
    """Tell whether a device can replay graphs."""
    return device.type == "cuda"


def stream_of(device: torch.device) -> int:
    """Return the stream of a GPU that this thread computes in."""
    return torch.cuda.current_stream(device).cuda_stream


def memory_of(device: torch.device) -> int:
    """Return how many bytes a GPU has."""
    properties: Any = cast(Any, torch.cuda).get_device_properties(device)
    return properties.total_memory


def captured(compute: Callable[[Tensor], Tensor], x: Tensor) -> Captured:
    """Capture a computation in a CUDA graph.

    Args:
        compute: Computes the result from x; its second call must not wait for the GPU.
        x: The input.

    Raises:
        RuntimeError: It cannot be captured.
    """
    given = x.detach().clone()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.device(x.device):
        before, aside = torch.cuda.current_stream(), torch.cuda.Stream()
        aside.wait_stream(before)
        with torch.cuda.stream(aside), _no_garbage():
            compute(given)  # sets up what a stream needs at its first use
            reserved = torch.cuda.memory_reserved()
            # Not torch.cuda.graph(), which waits for the device and empties its cache.
            graph.capture_begin(capture_error_mode="thread_local")
            try:
                result = compute(given)
            finally:
                graph.capture_end()
            size = torch.cuda.memory_reserved() - reserved
        before.wait_stream(aside)
    return Captured(given, result, graph.replay, size + given.nbytes)


@contextmanager
def _no_garbage() -> Generator[None]:
    """Disable garbage collection in the block: freeing might wait for the device."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
