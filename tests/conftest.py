"""Fixtures that several folders of tests share."""

import gc
import os
import shutil
import subprocess
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from .made_once import made_once

ROOT = Path(__file__).parents[1]
CACHE = ROOT / ".cache"


DEVICE = os.environ.get("GRADLIB_TEST_DEVICE")
"""Where the library's tests make their tensors, where they do not say; ``"cuda"``."""

LIBRARY = ("recorder", "recording", "jacobian", "vjp", "hook_reports", "gpu")
"""The folders of its tests; the files beside them are too. Pages are the CPU's."""


if os.environ.get("GRADLIB_STAND_IN_CUDA"):  # before anything imports torch
    from .stand_in_cuda.load import load

    load()


if DEVICE is not None:  # what test files make as they are imported is there too
    import torch

    if DEVICE.startswith("cuda") and not torch.cuda.is_available():
        raise pytest.UsageError(
            f"GRADLIB_TEST_DEVICE={DEVICE}, and torch sees no CUDA device."
        )
    torch.set_default_device(DEVICE)


@pytest.fixture(autouse=True)
def random_numbers() -> None:
    """Have the test draw the same ones, whichever ran before it in its process."""
    if "torch" in sys.modules:
        from gradlib.random_state import generators_of_devices

        # Where no device was used, torch.manual_seed() takes the stack down: for this
        # many tests it is seconds.
        for generator in generators_of_devices():
            generator.manual_seed(0)


@pytest.fixture(autouse=True)
def figures_closed() -> Iterator[None]:
    """Close what the test has drawn."""
    yield
    if "matplotlib.pyplot" in sys.modules:
        sys.modules["matplotlib.pyplot"].close("all")


@pytest.fixture
def one_process(tmp_path: Path) -> Iterator[None]:
    """A process group of one."""
    import torch.distributed as dist

    dist.init_process_group(
        "gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1
    )
    yield
    dist.destroy_process_group()


def collect() -> None:
    """Let all garbage go, and what a pass that has ended may still hold.

    A GPU's thread lets go of a pass's last tensors a moment after the pass has ended.
    """
    if DEVICE is not None:
        time.sleep(0.05)
    gc.collect()


@pytest.fixture
def tensors_alive() -> Callable[[], Counter[str]]:
    """Count the tensors that are left, after all garbage is gone, by what they are."""
    import torch

    def count() -> Counter[str]:
        collect()
        tensors = [it for it in gc.get_objects() if issubclass(type(it), torch.Tensor)]
        with torch._C.DisableTorchFunctionSubclass():  # a lazy parameter has no size
            return Counter(f"{type(it).__name__} {[*it.size()]}" for it in tensors)

    return count


@pytest.fixture(autouse=True)
def default_device(request: pytest.FixtureRequest) -> None:
    """Put the test on its device."""
    if DEVICE is not None:
        import torch.utils._device

        folder = request.path.relative_to(ROOT / "tests").parts[0]
        is_librarys = folder in LIBRARY or request.path.parent == ROOT / "tests"
        of_cpu = request.node.get_closest_marker("cpu") is not None
        torch.set_default_device(None)
        # Where a checkpoint is computed again inside of itself, torch enters the
        # context of the default device twice, and leaves it once.
        while torch.overrides._get_current_function_mode_stack():
            torch.overrides._pop_mode()
        torch.utils._device.CURRENT_DEVICE = None
        torch.set_default_device(DEVICE if is_librarys and not of_cpu else None)
    if "torch" in sys.modules:
        # Once None was set, torch before 2.10 cannot say what the default device is.
        context = vars(sys.modules["torch"]._GLOBAL_DEVICE_CONTEXT)
        if context.get("device_context") is None:
            context.clear()


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip what needs a GPU where there is none."""
    if item.get_closest_marker("gpu"):
        import torch

        if not torch.cuda.is_available():
            pytest.skip("it needs a GPU, and torch.cuda.is_available() is False")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None]:
    """Skip what needs more than the stand-in for CUDA has."""
    del item
    try:
        return (yield)
    except Exception as error:
        if os.environ.get("GRADLIB_STAND_IN_CUDA"):
            from .stand_in_cuda.lacking import lack_in

            if lack := lack_in(error):
                pytest.skip(f"the stand-in has no {lack}")
        raise


@pytest.fixture
def cudnn_looks_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have LSTMs warn as cuDNN does, where it cannot take their weights as they lie."""
    import torch

    kernel: Any = torch._VF.lstm
    laid: list[list[Any]] = []

    def lay_together(rnn: "torch.nn.RNNBase") -> None:
        laid.append([*rnn._flat_weights])

    def lstm(x: Any, states: Any, weights: Any, *how: Any) -> Any:
        if not any(list(map(id, it)) == list(map(id, weights)) for it in laid):
            warnings.warn(
                "RNN module weights are not part of single contiguous chunk of memory.",
                stacklevel=2,
            )
        return kernel(x, states, weights, *how)

    monkeypatch.setattr(torch.nn.RNNBase, "flatten_parameters", lay_together)
    monkeypatch.setattr(torch._VF, "lstm", lstm)


def nav_pages(nav: list[object]) -> list[str]:
    """Return every page that the `nav` of mkdocs.yml lists."""
    pages: list[str] = []
    for item in nav:
        for entry in item.values() if isinstance(item, dict) else [item]:
            pages += nav_pages(entry) if isinstance(entry, list) else [str(entry)]
    return pages


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Collect tests without collecting garbage: nearly all that is made then stays."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put what needs the site last, but for one test, which makes it meanwhile.

    That test also makes what was `found` on it, which takes as long.
    """

    def slow_to_begin(item: pytest.Item) -> int:
        return len({"built_site", "found"} & {*getattr(item, "fixturenames", ())})

    items.sort(key=slow_to_begin)
    items[:] = items[-1:] + items[:-1]


@pytest.fixture(autouse=True, scope="module")
def own_garbage() -> None:
    """Let tests that go through all objects see their own: what was there stays."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def built_site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site, built the way a reader builds it; any warning fails."""
    return made_once("site", build, tmp_path_factory)


def build(site: Path) -> None:
    """Build the site, with every page that the nav lists."""
    if os.environ.get("CI"):  # there, everything on the site is computed anew
        for made in set(CACHE.glob("*")) - {CACHE / "wheels"}:
            shutil.rmtree(made)
    env = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    env.pop("MPLBACKEND", None)
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", site],
        cwd=ROOT,
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert done.returncode == 0, f"mkdocs build --strict failed:\n{done.stdout}"
    listed = nav_pages(yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"])
    built = list(site.rglob("index.html"))
    assert len(built) >= len(listed) > 0, f"{len(built)} pages built, nav has {listed}"
