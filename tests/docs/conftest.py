"""What the tests of the documentation share."""

import builtins
import os
import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from unittest import mock

import matplotlib
import matplotlib.pyplot as plt
import numpy
import pytest
import torch
from pytest_examples import CodeExample
from torch.nn.modules import module as module_hooks

from .failing_line import name_failing_line
from .snippets import TORCH, file_name
from .update import write_back


def pytest_configure(config: pytest.Config) -> None:
    """Refuse to rewrite the pages from several processes at once."""
    if config.getoption("update_examples") and config.getoption("numprocesses", None):
        raise pytest.UsageError(
            "--update-examples under pytest-xdist would corrupt the pages, as every "
            "worker writes them: run it without -n."
        )


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Have another release of torch fail where it prints something else, and say so."""
    here = torch.__version__.partition("+")[0]
    if here == TORCH:
        return
    other = f"the pages show what torch {TORCH} prints, and this is torch {here}"
    for item in items:
        if item.path.name in ("test_snippets.py", "test_error_pages.py"):
            item.add_marker(pytest.mark.xfail(reason=other, strict=False))


@pytest.fixture(scope="session")
def to_update(request: pytest.FixtureRequest) -> Iterator[list[CodeExample]]:
    """The blocks to write back, all at the end: writing moves the lines of others."""
    blocks: list[CodeExample] = []
    yield blocks
    write_back(blocks)
    terminal = request.config.pluginmanager.get_plugin("terminalreporter")
    if blocks and terminal is not None:
        names = sorted({file_name(block.path) for block in blocks})
        terminal.write_line(f"\nblocks rewritten: {len(blocks)}, in {', '.join(names)}")


@pytest.fixture
def like_fresh_interpreter(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> Iterator[None]:
    """What a reader's fresh interpreter has; nothing of the block outlives it."""
    monkeypatch.setattr(
        "pytest_examples.run_code.create_example_traceback", name_failing_line
    )
    monkeypatch.setitem(sys.modules, "__main__", sys.modules["__main__"])
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("MPLBACKEND", "Agg")
    matplotlib.use("Agg")
    threads, warn_always = torch.get_num_threads(), torch.is_warn_always_enabled()
    torch.set_warn_always(True)  # or only the first block would meet a warning
    _reset_state()
    with (
        matplotlib.rc_context(),
        numpy.printoptions(),
        mock.patch.dict(os.environ),
        _same_names(builtins, torch, torch.nn, torch.nn.functional),
    ):
        yield
    _reset_state()
    torch.set_warn_always(warn_always)
    torch.set_num_threads(threads)


@contextmanager
def _same_names(*modules: ModuleType) -> Iterator[None]:
    """Give modules back every name that a block changed, and take those it added."""
    before = [vars(module).copy() for module in modules]
    yield
    for module, names in zip(modules, before, strict=True):
        for name in vars(module).keys() - names.keys():
            # A submodule stays: to import it again would not make it an attribute.
            if not isinstance(vars(module)[name], ModuleType):
                delattr(module, name)
        vars(module).update(names)


def _reset_state() -> None:
    plt.close("all")
    torch.set_default_dtype(torch.float32)
    torch.set_default_device(None)
    torch.set_printoptions(profile="default")
    torch.set_grad_enabled(True)
    torch.autograd.set_detect_anomaly(False)
    torch.use_deterministic_algorithms(False)
    torch.set_float32_matmul_precision("highest")
    _remove_global_hooks()
    # A fresh interpreter draws other numbers each time. So must a block that forgot
    # to seed: its output then changes here as it does for the reader.
    torch.seed()
    random.seed()
    numpy.random.seed()


def _remove_global_hooks() -> None:
    for name, hooks in vars(module_hooks).items():
        if name.startswith("_global_") and isinstance(hooks, dict):
            hooks.clear()
    module_hooks._global_is_full_backward_hook = None
