import pytest
import torch
from torch import Tensor

from benchmarks.memory import Memory, measure_memory


@pytest.mark.parametrize("kind", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_it_counts_what_is_allocated_and_what_is_held(kind: str) -> None:
    device = torch.device(kind)
    before = torch.zeros(1024, device=device)

    def call() -> Tensor:
        passing = torch.zeros(2048, device=device)
        kept = torch.zeros(4096, device=device)
        del passing
        return kept

    assert measure_memory(call, device) == Memory(4 * 6144, 4 * 4096)
    assert measure_memory(before.clone, device) == Memory(4096, 4096)


def test_what_was_there_before_counts_as_nothing() -> None:
    there = [torch.zeros(1024)]
    cpu = torch.device("cpu")
    assert measure_memory(there.clear, cpu) == Memory(0, 0)
