"""Fresh memory: only what is a tensor's own is put on huge pages, and only much."""

import mmap
import os
import platform
import subprocess
import sys

import pytest
import torch

from gradlib.jacobian import fresh


@pytest.fixture
def advised(monkeypatch):
    """Return what is asked of the system, and ask nothing of it."""
    if not hasattr(mmap, "MADV_HUGEPAGE"):
        pytest.skip("this system has no huge pages to ask for")
    found = []
    monkeypatch.setattr(fresh, "_advise", lambda: lambda *it: found.append(it))
    return found


@pytest.mark.cpu  # other devices have pages of their own
def test_much_memory_is_asked_for_whole_pages_of_its_own(advised):
    made = fresh.empty((3, fresh.HUGE // 4), torch.zeros(1))
    ((start, length, _),) = advised
    assert start % mmap.PAGESIZE == length % mmap.PAGESIZE == 0
    end = made.data_ptr() + made.numel() * made.element_size()
    assert made.data_ptr() <= start < made.data_ptr() + mmap.PAGESIZE
    assert end - mmap.PAGESIZE < start + length <= end


def test_little_memory_is_left_alone(advised):
    fresh.empty((fresh.HUGE // 4 - 1,), torch.zeros(1))
    assert advised == []


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_it_is_of_the_same_dtype_and_has_no_graph(dtype):
    like = torch.zeros(1, dtype=dtype, requires_grad=True)
    made = fresh.empty((2, 3), like)
    assert made.shape == (2, 3)
    assert made.dtype == dtype
    assert not made.requires_grad


FAULTS = """
import resource, torch
from gradlib.jacobian.fresh import keep_what_is_freed
keep_what_is_freed()
for turn in range(20):
    if turn == 5:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    several = [torch.ones(7 * 2**18) for _ in range(3)]
    del several
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="glibc alone does so")
def test_freed_memory_is_used_again():
    # With one thread torch has mostly freed such a block already.
    others = {key: it for key, it in os.environ.items() if key != "OMP_NUM_THREADS"}
    run = [sys.executable, "-c", FAULTS]
    done = subprocess.run(run, check=True, capture_output=True, env=others)
    assert int(done.stdout) < 100  # and not thousands: each page would be a fresh one
