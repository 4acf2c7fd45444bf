"""Norms of every kind of tensor."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gradlib import RecordingArgumentError, plain_tensors
from gradlib.stats import norm, tensor_stats
from gradlib.subclasses import if_known


@pytest.mark.parametrize(
    "tensor",
    [
        torch.tensor([3.0, 4.0]),
        torch.tensor([3, 4]),
        torch.tensor([3.0, 4.0], dtype=torch.bfloat16),
        torch.tensor([3j, 4]),
        torch.tensor([[3.0, 0.0], [0.0, 4.0]]).to_sparse(),
    ],
    ids=["float", "int", "half", "complex", "sparse"],
)
def test_norm_of_one_tensor(tensor: Tensor) -> None:
    assert norm([tensor]) == pytest.approx(5)


def test_norm_of_several_and_of_none() -> None:
    assert norm([torch.tensor(3.0), torch.tensor([[4.0]])]) == pytest.approx(5)
    assert norm([]) == 0
    assert norm([torch.ones(3, dtype=torch.bool)]) == pytest.approx(math.sqrt(3))


def test_values_that_would_overflow_a_half() -> None:
    assert norm([torch.full((4,), 6e4, dtype=torch.half)]) == pytest.approx(
        1.2e5, rel=1e-3
    )


def test_a_tensor_without_values() -> None:
    assert math.isnan(norm([torch.ones(3, device="meta")]))


@pytest.mark.parametrize("wrong", ["x", 1.0, None, [torch.ones(2)]])
def test_what_is_no_tensor(wrong: Any) -> None:
    with pytest.raises(RecordingArgumentError, match=type(wrong).__name__):
        tensor_stats(wrong)


def test_a_parameter_that_has_no_values_yet() -> None:
    with pytest.raises(RecordingArgumentError, match="call the module first"):
        tensor_stats(nn.LazyLinear(3).weight)


@pytest.mark.parametrize("name", ["float4_e2m1fn_x2", "uint4", "bits8"])
def test_a_dtype_that_torch_does_not_compute_with(name: str) -> None:
    packed = torch.zeros(4, dtype=torch.uint8).view(getattr(torch, name))
    with pytest.raises(RecordingArgumentError, match=f"{name}, which torch"):
        tensor_stats(packed)


NUMBERS = torch.bool, torch.uint16, torch.float8_e4m3fn, torch.half, torch.complex64


def test_a_cpu_says_which_those_are_for_all_devices() -> None:
    require: Any = plain_tensors._require_numbers
    for dtype in NUMBERS:
        require(dtype)
    with pytest.raises(NotImplementedError):
        require(torch.float4_e2m1fn_x2)


class Closed(torch.Tensor):
    """A tensor whose entries nobody counts."""

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func is torch.count_nonzero:
            return NotImplemented
        return super().__torch_function__(func, types, args, kwargs)


def test_a_class_that_torch_does_not_compute_with() -> None:
    closed = torch.ones(3).as_subclass(Closed)
    with pytest.raises(RecordingArgumentError, match="tensor is a Closed, for which"):
        tensor_stats(closed)


def test_an_error_of_plain_tensors_is_not_laid_to_a_class() -> None:
    with pytest.raises(ZeroDivisionError):
        if_known(lambda: 1 // 0, [torch.ones(2)])


@pytest.mark.filterwarnings("ignore")  # torch's own: masked tensors are a prototype
def test_entries_that_are_masked_out_are_zeros() -> None:
    mask = torch.tensor([True, False, True])
    stats = tensor_stats(torch.masked.masked_tensor(torch.full((3,), 2.0), mask))
    assert stats.norm == pytest.approx(8**0.5)
    assert stats.mean == pytest.approx(4 / 3)
    assert stats.zeros == pytest.approx(1 / 3)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_a_nested_tensor_without_parts() -> None:
    stats = tensor_stats(torch.nested.nested_tensor([]))
    assert (stats.shape, stats.norm, stats.nonfinite) == ((0,), 0, 0)


@pytest.mark.cpu
@pytest.mark.parametrize(
    "tensor",
    [
        torch.tensor([3.0, -4.0], device="cpu"),
        nn.Parameter(torch.tensor([3.0, 4.0], device="cpu")),
        torch.tensor([3, 4], device="cpu"),
        torch.tensor([3j, 4], device="cpu"),
        torch.tensor([[3.0, 0.0], [0.0, 4.0]], device="cpu").to_sparse(),
        torch.ones(0, device="cpu"),
        torch.ones(3, device="meta"),
    ],
    ids=["float", "weight", "int", "complex", "sparse", "empty", "meta"],
)
def test_on_a_cpu_no_tensor_is_kept(tensor: Tensor) -> None:
    stats = tensor_stats(tensor)
    tensor.detach().zero_()
    assert {type(it) for it in stats._numbers.values()} <= {float, complex, int}
    assert stats.numbers() == pytest.approx(dict(stats._numbers), nan_ok=True)
    if not tensor.is_meta:
        assert stats.norm == (5 if tensor.numel() else 0)


def test_float8() -> None:
    values = torch.tensor([3.0, 4.0, float("nan")]).to(torch.float8_e4m3fn)
    assert tensor_stats(values[:2]).norm == 5
    assert tensor_stats(values).nonfinite == 1


def test_the_norm_of_a_gradient_that_has_all_but_vanished() -> None:
    values = torch.full((4,), 1e-30)
    expected = pytest.approx(2e-30, rel=1e-6, abs=0)  # or zero would do
    assert norm([values]) == expected
    assert tensor_stats(values).norm == expected


def test_one_zero_among_many_entries_is_counted() -> None:
    values = torch.ones(2**25, dtype=torch.int8)
    values[0] = 0
    assert tensor_stats(values).zeros == 2**-25


def test_more_zeros_than_float32_can_count() -> None:
    values = torch.zeros(2**24 + 2)
    values[0] = 1
    assert tensor_stats(values).zeros == (2**24 + 1) / (2**24 + 2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.complex64])
@pytest.mark.parametrize("shift", [0.0, 0.7, 1.0, 1.5, 1e3])
def test_std_has_its_digits_wherever_the_mean_is(
    shift: float, dtype: torch.dtype
) -> None:
    values = torch.randn(1000, dtype=dtype) + shift
    precise = values.to(torch.promote_types(dtype, torch.float64))
    of_entries = (precise - precise.mean()).abs().square().mean().sqrt().item()
    assert tensor_stats(values).std == pytest.approx(of_entries, rel=1e-6)


INF, NAN = math.inf, math.nan


@pytest.mark.parametrize(
    "entries",
    [
        [1.0, -2.0, 4.0],
        [0.0, -2.0, -0.0, 1.0],
        [0.0, 0.0],
        [INF, 1.0],
        [-INF, 0.0, INF],
        [NAN, 0.0, 1.0],
        [NAN, INF, -1.0, 1.0],
    ],
    ids=str,
)
def test_each_number_is_what_its_definition_says(entries: list[float]) -> None:
    found = tensor_stats(torch.tensor(entries, dtype=torch.float64)).numbers()
    finite = all(map(math.isfinite, entries))
    mean = sum(entries) / len(entries)
    expected = {
        "norm": math.sqrt(sum(it * it for it in entries)),
        "mean": mean,
        "std": math.sqrt(sum((it - mean) ** 2 for it in entries) / len(entries)),
        "largest": NAN if NAN in entries else max(map(abs, entries)),
        "zeros": entries.count(0) / len(entries),
        "nonfinite": 0 if finite else sum(not math.isfinite(it) for it in entries),
    }
    assert found == pytest.approx(expected, nan_ok=True)


def test_statistics_show_as_html() -> None:
    stats = tensor_stats(torch.tensor([[3.0, -4.0]]))
    html = stats._repr_html_()
    assert html.count("<tr>") == 2
    for column, cell in [("shape", "[1, 2]"), ("norm", "5"), ("nonfinite", "0")]:
        assert f"<th>{column}</th>" in html
        assert f"<td>{cell}</td>" in html
    assert repr(stats) == (
        "TensorStats(shape=[1, 2], dtype=torch.float32, norm=5, mean=-0.5, std=3.5, "
        "largest=4, zeros=0, nonfinite=0)"
    )
