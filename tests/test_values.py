"""A kept value stays what it was."""

from collections.abc import Callable
from typing import Any, ClassVar, cast

import numpy as np
import pytest
import torch
from torch import Tensor

import gradlib
from gradlib.private.tensors import is_copy_on_write
from gradlib.values import Transfers, keep, keeper, same_values


@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(6.0).view(2, 3),
        torch.arange(6.0).view(2, 3).T,
        torch.arange(6.0)[1:4],
        torch.arange(6.0).to(torch.complex64),
        torch.arange(6, dtype=torch.bfloat16),
        torch.arange(6),
        torch.from_numpy(np.arange(6.0)),
        torch.ones(3).share_memory_(),
    ],
    ids=["plain", "transposed", "slice", "complex", "half", "int", "numpy", "shared"],
)
def test_it_survives_in_place_changes(tensor: Tensor) -> None:
    expected = tensor.clone()
    kept = keep(tensor)
    tensor.add_(1)
    tensor.view_as(tensor).mul_(3)
    assert torch.equal(kept, expected)


def test_writing_to_the_kept_value_leaves_the_tensor_alone() -> None:
    tensor = torch.ones(3)
    keep(tensor).zero_()
    assert tensor.tolist() == [1, 1, 1]


def test_it_has_no_history() -> None:
    assert not keep(torch.ones(3, requires_grad=True) * 2).requires_grad


@pytest.mark.cpu
def test_nothing_is_copied_until_somebody_writes() -> None:
    tensor = torch.ones(3)
    kept = keep(tensor)
    assert cast(Any, torch._C)._is_cow_tensor(kept)
    assert address(tensor) == address(kept)
    tensor.add_(1)
    assert address(tensor) != address(kept)


def address(tensor: Tensor) -> int:
    # data_ptr() may be written through, so asking for it would make the copy.
    return cast(Any, torch._C)._data_address(tensor)


def test_same_values() -> None:
    x = torch.tensor([1.0, torch.nan, torch.inf])
    assert same_values(x, x.clone())
    assert not same_values(x, torch.tensor([1.0, 2.0, torch.inf]))
    assert same_values(torch.tensor([True, False]), torch.tensor([True, False]))
    assert not same_values(torch.tensor([1, 2]), torch.tensor([1, 3]))


@pytest.mark.parametrize(
    "other",
    [
        torch.zeros(5),
        torch.zeros(1, 1),
        torch.zeros(0),
        torch.zeros(1, dtype=torch.float64),
        torch.zeros(1, device="meta"),
        torch.zeros(1).to_sparse(),
    ],
    ids=["broadcasts", "dimensions", "empty", "dtype", "device", "layout"],
)
def test_tensors_of_another_kind_are_not_the_same(other: Tensor) -> None:
    one = torch.zeros(1)
    assert not same_values(one, other)
    assert not same_values(other, one)


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta")
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize(
    "made",
    [
        Tensor.to_sparse,
        Tensor.to_sparse_csr,
        lambda it: torch.nested.nested_tensor([*it]),
        lambda it: torch.nested.nested_tensor([*it], layout=torch.jagged),
    ],
    ids=["sparse", "rows", "nested", "jagged"],
)
def test_the_same_values_of_tensors_that_are_not_dense(
    made: Callable[[Tensor], Tensor],
) -> None:
    one = torch.eye(3)
    assert same_values(made(one), made(one.clone()))
    assert not same_values(made(one), made(2 * one))
    assert not same_values(made(one), made(one[:2]))


def test_who_cannot_be_compared_is_not_the_same() -> None:
    packed = torch.zeros(4, dtype=torch.uint8).view(torch.bits8)
    assert not same_values(packed, packed.clone())


class OnGPU(Tensor):
    """A tensor that says it is on a GPU, and notes how it is moved."""

    is_cuda = True
    moved: ClassVar[list[dict[str, Any]]] = []

    def to(self, *args: Any, **how: Any) -> Tensor:
        OnGPU.moved.append(how)
        return super().to(*args, **how).clone().as_subclass(Tensor)


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> list[torch.device]:
    OnGPU.moved.clear()
    found: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "synchronize", found.append)
    return found


def test_on_a_gpu_no_memory_is_shared() -> None:
    tensor = torch.ones(3).as_subclass(OnGPU)
    assert not is_copy_on_write(keep(tensor))
    assert not is_copy_on_write(tensor)


def test_a_gpu_copies_while_nobody_waits(waits: list[torch.device]) -> None:
    copies = Transfers()
    kept = keeper(None, "cpu", copies)
    tensor = torch.ones(3, device="cpu").as_subclass(OnGPU)
    found = [kept(tensor), kept(2 * tensor)]
    assert OnGPU.moved == [{"non_blocking": True}] * 2
    assert waits == []
    copies.wait()
    copies.wait()
    assert waits == [tensor.device]
    assert [it.tolist() for it in found] == [[1.0] * 3, [2.0] * 3]


@pytest.mark.parametrize("reduce", [None, torch.sum])
def test_the_cpu_copies_nothing_later(reduce: Any, waits: list[torch.device]) -> None:
    copies = Transfers()
    tensor = torch.ones(3, device="cpu")
    kept = keeper(reduce, "cpu", copies)(tensor)
    tensor.zero_()
    assert kept.sum() == 3
    copies.wait()
    assert waits == []


def test_a_recording_waits_once_for_all_and_before_it_is_read(
    waits: list[torch.device],
) -> None:
    model = torch.nn.Sequential(torch.nn.Tanh(), torch.nn.Tanh())
    leaf = torch.ones(2, requires_grad=True)
    with gradlib.record(model, device="cpu") as recording:
        model(leaf.as_subclass(OnGPU)).sum().backward()
        assert OnGPU.moved
        assert waits == []
        call = recording["0"]
        assert len(waits) == 1
        model(leaf.as_subclass(OnGPU)).sum().backward()
        assert call.grad_output is not None
        assert len(waits) == 2
        model(leaf.as_subclass(OnGPU)).sum().backward()
    assert len(waits) == 3
    str(recording)
    assert len(waits) == 3


def test_a_copy_begun_while_somebody_waits_is_waited_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    copies, waited = Transfers(), list[torch.device]()
    tensor = torch.ones(3, device="cpu").as_subclass(OnGPU)

    def wait(device: torch.device) -> None:
        if not waited:
            copies.moved(tensor, "cpu")  # as a hook in another thread does
        waited.append(device)

    monkeypatch.setattr(torch.cuda, "synchronize", wait)
    copies.moved(tensor, "cpu")
    copies.wait()
    copies.wait()
    assert len(waited) == 2
    copies.wait()
    assert len(waited) == 2


def test_what_is_expanded_is_moved_and_kept_as_what_stands_in_memory() -> None:
    expanded = torch.ones(2, 1, device="cpu").expand(2, 2**40).as_subclass(OnGPU)
    for kept in (keep(expanded), Transfers().moved(expanded, "cpu")):
        assert kept.shape == expanded.shape
        assert kept.stride() == (1, 0)
        assert kept.data_ptr() != expanded.data_ptr()
