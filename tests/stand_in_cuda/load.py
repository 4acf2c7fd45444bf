"""Building the stand-in once, and putting it into torch."""

import ctypes
import hashlib
import importlib.util
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version
from importlib.resources import files
from itertools import count
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

from filelock import FileLock

SOURCES = sorted(Path(__file__).parent.glob("*.cpp"))
BUILDS = Path(__file__).parents[2] / ".cache" / "stand_in_cuda"
KERNELS = "packaged/ATen/native/native_functions.yaml"
"""Where torch lists which operation has which kernel."""
MEMORY = 16 * 2**30
"""How many bytes the devices say they have."""


def load() -> None:
    """Give torch its CUDA devices; it must not have been imported.

    Raises:
        RuntimeError: It has been, and has found no CUDA.
    """
    if "torch" in sys.modules:
        raise RuntimeError("The stand-in for CUDA must be loaded before torch.")
    path = built()
    spec = importlib.util.find_spec("torch")
    assert spec is not None
    assert spec.origin is not None
    # torch asks once whether there is CUDA, while it is imported.
    libraries = Path(spec.origin).with_name("lib")
    for library in (libraries / "libtorch_cpu.so", path):
        ctypes.CDLL(str(library), ctypes.RTLD_GLOBAL)
    import torch

    put_into(torch, imported(path))


def built() -> Path:
    """Return the extension, for this source and this torch."""
    made_of = b"".join(it.read_bytes() for it in SOURCES)
    made_of += f"{version('torch')} {sys.version}".encode()
    folder = BUILDS / hashlib.sha256(made_of).hexdigest()[:16]
    path = folder / "stand_in.so"
    folder.mkdir(parents=True, exist_ok=True)
    with FileLock(folder / "ours.lock"):
        if not path.exists():
            (folder / "lock").unlink(missing_ok=True)  # torch's, of a build that ended
            # Another process builds it: here, torch is yet to be imported.
            subprocess.run([sys.executable, __file__, str(folder)], check=True)
    return path


def build(folder: str) -> None:
    """Build it into a folder."""
    from torch.utils import cpp_extension

    flags = ["-O1", "-w"]
    sources = [*map(str, SOURCES)]
    cpp_extension.load("stand_in", sources, flags, build_directory=folder)


def imported(path: Path) -> Any:
    """Import an extension by its path."""
    spec = importlib.util.spec_from_file_location("stand_in", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def put_into(torch: ModuleType, extension: Any) -> None:
    """Put what builds without CUDA lack into torch."""
    extension.limit_memory(MEMORY)
    put_kinds_of_tensors(extension)
    c: Any = torch._C
    cuda: Any = torch.cuda
    cuda._initialized = True
    # Not torch._C._cuda_getDeviceCount: what is compiled for CUDA has far more.
    cuda.is_available = lambda: True
    cuda.device_count = lambda: extension.DEVICES
    c._cuda_getDevice = extension.current_device
    c._cuda_setDevice = extension.exchange_device
    # Each a function of its own: torch.compile knows them by that.
    cuda._exchange_device = lambda device: extension.exchange_device(device)
    cuda._maybe_exchange_device = lambda device: extension.exchange_device(device)
    c._cuda_synchronize = extension.synchronize
    c._cuda_set_sync_debug_mode = extension.refuse_waits
    c._cuda_sleep = lambda _: None
    put_memory(c, cuda, extension)
    put_storages(torch, extension)
    put_streams(cuda, extension)
    torch.backends.cudnn.is_acceptable = lambda _: False  # else it warns: no cuDNN
    # Kernels are the CPU's, so the numbers that they draw are too.
    cuda.default_generators = (torch.default_generator,) * extension.DEVICES


def put_kinds_of_tensors(extension: Any) -> None:
    """Put kernels of sparse and nested tensors into torch."""
    put = {
        "Sparse": extension.register_sparse,
        "SparseCsr": extension.register_sparse_csr,
        "NestedTensor": extension.register_nested,
    }
    for kind, register in put.items():
        shared = with_kernel(f"{kind}CPU", f"{kind}CUDA")
        # Some of these ask for kernels by the device, and not by a name.
        shared -= {it for it in shared if it.startswith("_to_sparse")}
        register(shared, with_kernel(f"{kind}CUDA") - shared)


def with_kernel(*keys: str) -> set[str]:
    """Return the operations that have a kernel, the same one for all these keys."""
    found: set[str] = set()
    name = ""
    for line in files("torchgen").joinpath(KERNELS).read_text().splitlines():
        if line.startswith("- func: "):
            name = line[8:].partition("(")[0]
        elif {*keys} <= {*line.partition(":")[0].strip().split(", ")}:
            found.add(name)
    return found


def put_memory(c: Any, cuda: Any, extension: Any) -> None:
    """Put what is known of the devices' memory into torch."""

    def stats(_: int) -> dict[str, Any]:
        now = extension.memory_held()
        held = {"all": {"current": now, "peak": now}}
        ran_out = extension.times_run_out()
        return {"allocated_bytes": held, "reserved_bytes": held, "num_ooms": ran_out}

    c._cuda_memoryStats = stats
    c._cuda_emptyCache = c._host_emptyCache = lambda: None
    c._cuda_resetPeakMemoryStats = lambda _: None
    c._cuda_setMemoryFraction = lambda fraction, _: extension.limit_memory(
        int(fraction * MEMORY)
    )
    cuda.mem_get_info = lambda _=None: (MEMORY - extension.memory_held(), MEMORY)
    cuda.get_device_properties = lambda _=None: SimpleNamespace(
        name="stand-in", total_memory=MEMORY, major=9, minor=0
    )


def put_storages(torch: ModuleType, extension: Any) -> None:
    """Put what copies and resizes devices' memory into torch."""

    def copied(storage: Any, device: Any) -> Any:
        made = torch.empty(storage.nbytes(), dtype=torch.uint8, device=device)
        given = torch.empty(0, dtype=torch.uint8, device=storage.device)
        return made.copy_(given.set_(storage)).untyped_storage()

    of_the_cpu = torch.UntypedStorage.resize_

    def resize(storage: Any, size: int) -> Any:
        if storage.device.type == "cpu":
            return of_the_cpu(storage, size)
        extension.resize_storage(storage._cdata, size)
        return storage

    torch.UntypedStorage.clone = lambda self: copied(self, self.device)
    torch.UntypedStorage.cpu = lambda self: copied(self, "cpu")
    torch.UntypedStorage.to = lambda self, *, device, **_: copied(self, device)
    torch.UntypedStorage.resize_ = resize


def put_streams(cuda: Any, extension: Any) -> None:
    """Put streams and graphs into torch."""
    numbers = count()
    here = threading.local()

    class Event:
        """A moment of Python's, as whatever a stream was given has been done."""

        def __init__(self, **_: object) -> None:
            self.moment = 0.0

        def record(self, _: object = None) -> "Event":
            self.moment = time.perf_counter()
            return self

        def elapsed_time(self, later: "Event") -> float:
            return 1000 * (later.moment - self.moment)

        def synchronize(self) -> None:
            extension.synchronize()

    class Stream:
        """A number; all streams are one."""

        def __init__(self, **_: object) -> None:
            self.cuda_stream = next(numbers)

        def wait_stream(self, stream: "Stream") -> None:
            """Do nothing: whatever the other one was given has been done."""

        def wait_event(self, event: Event) -> None:
            """Do nothing: it has happened."""

        def record_event(self, event: Event | None = None) -> Event:
            return (event or Event()).record()

    class Graph(extension.Graph):
        """A graph, which is captured in any mode."""

        def capture_begin(self, *_: object, **__: object) -> None:
            self.begin()

        def capture_end(self) -> None:
            self.end()

    @contextmanager
    def stream(chosen: Stream) -> Iterator[None]:
        before = cuda.current_stream()
        here.stream = chosen
        try:
            yield
        finally:
            here.stream = before

    default = Stream()
    cuda.Stream, cuda.stream, cuda.CUDAGraph = Stream, stream, Graph
    cuda.Event = Event
    cuda.current_stream = lambda _=None: getattr(here, "stream", default)
    cuda.is_current_stream_capturing = extension.is_capturing
    cuda.graphs.graph_pool_handle = lambda: None  # each graph keeps its tensors


if __name__ == "__main__":
    build(sys.argv[1])
