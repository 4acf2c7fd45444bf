"""What a GPU computes again and again, launched at once: a CUDA graph replays it.

A GPU waits for Python where a Jacobian takes many small kernels. Those of known layers
read no number, draw none, and depend on nothing but the memory of x and of the weights:
so what was launched once can be launched again, with the values that are there by then.
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
"""How often the same must have been computed before it is captured."""

MOST = 2**29
"""How many bytes of a device one graph may keep: its x, its result, all in between."""

SHARE = 64
"""Which part of a device's memory all graphs together may keep: one of so many."""


class Captured(NamedTuple):
    """A computation that can be launched again.

    Attributes:
        x: Where what it is computed from is to be written.
        found: Where what comes of it is then.
        replay: Launches it.
        bytes: What it keeps of the device's memory.
    """

    x: Tensor
    found: Tensor
    replay: Callable[[], None]
    bytes: int


class Replays:
    """The CUDA graph of what was computed last, if that was met before.

    Attributes:
        device: Where it keeps memory.
        bytes: How much.
    """

    __slots__ = (
        *("__weakref__", "_captured", "_key", "_lock", "_times"),
        *("bytes", "device"),
    )

    def __init__(self) -> None:
        """Begin with none."""
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
        """Return what is computed from x, in memory of its own; ``None``: not by now.

        Args:
            compute: Computes it, with the values that all tensors have by then.
            x: What it is computed from.
            others: All other tensors that it reads.
            needs: How many bytes it takes by our count, with the result.
            form: What else it depends on.
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
            given, found, replay, _ = made
            given.copy_(x.detach())
            replay()
            return found.clone()
        except RuntimeError:  # it cannot be captured, or memory has run out
            self._let_go()
            self._times = -(2**62)  # until the key is another
            return None
        finally:
            self._lock.release()

    def _kept(self, made: Captured) -> Captured:
        """Keep a graph, note what it takes, and return it.

        Raises:
            RuntimeError: That is more than was thought.
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
    """Tell whether another graph may keep so many bytes of a device."""
    with _EVERY_LOCK:  # other threads capture theirs
        kept = sum(it.bytes for it in _every if it.device == device)
    return size <= MOST and kept + size <= memory_of(device) // SHARE


_EVERY_LOCK = Lock()
_every: WeakSet[Replays] = WeakSet()
_of_modules: "WeakKeyDictionary[nn.Module, Replays]" = WeakKeyDictionary()


def replays_of(module: nn.Module) -> Replays:
    """Return what replays a module, and goes with it."""
    found = _of_modules.get(module)
    if found is None:
        found = _of_modules[module] = Replays()
    return found


def _key(x: Tensor, others: Sequence[Tensor], form: Hashable) -> Hashable:
    """Return what must be the same for kernels to be launched again as they were."""
    memory = [(it.data_ptr(), it.shape, it.stride()) for it in others]
    of_x = x.dtype, x.device, x.shape, x.stride()
    return how_products_are_computed(), of_x, form, *memory


def may_replay_on(device: torch.device) -> bool:
    """Tell whether there are graphs to be replayed on a device."""
    return device.type == "cuda"


def stream_of(device: torch.device) -> int:
    """Return in which stream of a GPU this thread computes."""
    return torch.cuda.current_stream(device).cuda_stream


def memory_of(device: torch.device) -> int:
    """Return how many bytes a GPU has."""
    properties: Any = cast(Any, torch.cuda).get_device_properties(device)
    return properties.total_memory


def captured(compute: Callable[[Tensor], Tensor], x: Tensor) -> Captured:
    """Return a computation that can be launched again.

    Args:
        compute: Computes something from x, and waits for nothing the second time.
        x: What it is computed from.

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
            before_it = torch.cuda.memory_reserved()
            # Not torch.cuda.graph(), which waits for the device and empties its cache.
            graph.capture_begin(capture_error_mode="thread_local")
            try:
                found = compute(given)
            finally:
                graph.capture_end()
            size = torch.cuda.memory_reserved() - before_it
        before.wait_stream(aside)
    return Captured(given, found, graph.replay, size + given.nbytes)


@contextmanager
def _no_garbage() -> Generator[None]:
    """Let nothing be collected meanwhile: what is freed might wait for the device."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
