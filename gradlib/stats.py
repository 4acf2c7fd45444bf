"""Numbers that describe tensors."""

import math
from collections.abc import Iterable, Mapping
from typing import Any, TypeAlias, cast

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy

from gradlib.errors import RecordingArgumentError
from gradlib.plain_tensors import wide, widest
from gradlib.render import Table
from gradlib.subclasses import UnknownToClassError, if_known
from gradlib.wording import in_brief

Number: TypeAlias = Tensor | float | complex
"""A number, or a tensor of no dimension that holds it, on any device."""


class TensorStats:
    """Eight facts about a tensor, computed on its device.

    The numbers stay on a GPU until you read one, so `tensor_stats` never waits for the
    GPU.

    Attributes:
        shape: The tensor's shape.
        dtype: The tensor's dtype.
    """

    __slots__ = ("_numbers", "dtype", "shape")

    def __init__(
        self,
        shape: torch.Size,
        dtype: torch.dtype,
        numbers: Mapping[str, Number],
    ) -> None:
        """Take the numbers by name, or tensors of no dimension that hold them."""
        self.shape = shape
        self.dtype = dtype
        self._numbers = numbers

    @property
    def norm(self) -> float:
        """The square root of the sum of squared magnitudes."""
        return self._read("norm")

    @property
    def mean(self) -> float | complex:
        """The mean of the entries; complex for a complex tensor."""
        return self._read("mean")

    @property
    def std(self) -> float:
        """The standard deviation, with the number of entries as the divisor."""
        return self._read("std")

    @property
    def largest(self) -> float:
        """The largest magnitude."""
        return self._read("largest")

    @property
    def zeros(self) -> float:
        """The fraction of entries that are exactly zero, from 0 to 1."""
        return self._read("zeros")

    @property
    def nonfinite(self) -> int:
        """How many entries are NaN or infinite."""
        return self._read("nonfinite")

    def numbers(self) -> dict[str, Any]:
        """Return every number by name: ``norm``, ``mean``, ``std`` and so on."""
        return {name: self._read(name) for name in self._numbers}

    def __repr__(self) -> str:
        """Show all eight facts, the numbers to three digits."""
        facts = ", ".join(f"{name}={it}" for name, it in self._facts().items())
        return f"TensorStats({facts})"

    def _repr_html_(self) -> str:
        facts = self._facts()
        return Table("TensorStats", tuple(facts), [tuple(facts.values())]).html()

    def _facts(self) -> dict[str, str]:
        numbers = {name: f"{it:.3g}" for name, it in self.numbers().items()}
        return {"shape": str([*self.shape]), "dtype": str(self.dtype), **numbers}

    def _read(self, name: str) -> Any:
        number = self._numbers[name]
        return number.item() if isinstance(number, Tensor) else number


def tensor_stats(tensor: Tensor) -> TensorStats:
    """Return statistics of a tensor, computed on its device without waiting for it.

    Made for ``record(model, reduce=gradlib.tensor_stats)``: the recording then does not
    grow with the size of the tensors.

    Args:
        tensor: A tensor of any shape and dtype, dense or sparse, on any device.

    Returns:
        Its statistics. They are computed in float32 for a dtype narrower than that, in
        float64 for integers. A tensor without entries has NaN for its mean, std,
        largest magnitude and fraction of zeros. A nested tensor counts as one row of
        all its entries; masked-out entries count as zeros. For a DTensor the numbers
        are those of this process's part. If entries are near the largest number of
        their dtype, the mean or std may be inf though every entry is finite.

    Raises:
        RecordingArgumentError: `tensor` is no tensor, has no values yet, or has a dtype
            or class that torch cannot compute with.

    Example:
        ```python
        import torch

        import gradlib

        stats = gradlib.tensor_stats(torch.tensor([3.0, -4.0, 0.0, 0.0]))
        print(stats.norm, stats.largest, stats.zeros)
        #> 5.0 4.0 0.5
        ```
    """
    given: Any = tensor
    if not isinstance(given, Tensor):
        raise RecordingArgumentError(
            f"tensor is {in_brief(given)} of type {type(given).__name__}, and must be "
            "a torch.Tensor: torch.as_tensor makes one of numbers."
        )
    values = _values(tensor)
    shape = values.shape if tensor.is_nested else tensor.shape
    try:
        numbers = if_known(lambda: _numbers(values), [tensor])
        return TensorStats(shape, tensor.dtype, numbers)
    except UnknownToClassError as error:
        raise RecordingArgumentError(
            f"tensor is a {type(tensor).__name__}, for which torch has no norm, mean "
            "or count: pass a plain tensor of its values."
        ) from error


def _numbers(values: Tensor) -> dict[str, Number]:
    count = values.numel()
    if count == 0:
        unknown = dict.fromkeys(("mean", "std", "largest", "zeros"), math.nan)
        return {"norm": 0.0, **unknown, "nonfinite": 0}
    mean, norm = _at_once(values.mean()), _at_once(_sum_of_squares_root(values))
    sizes = values.abs()
    # On a CPU aminmax() takes longer than both.
    least, largest = _at_once(sizes.amin()), _at_once(sizes.amax())
    # If these could be read at once, they usually spare both counts.
    has_zeros = not isinstance(least, float) or not least > 0
    is_finite = isinstance(largest, float) and math.isfinite(largest)
    zeros = _at_once(_count_zeros(sizes)) if has_zeros else 0
    return {
        "norm": norm,
        "mean": mean,
        "std": _std(values, mean, norm),
        "largest": largest,
        "zeros": zeros / count,
        "nonfinite": 0 if is_finite else _at_once(count_nonfinite(values)),
    }


def _std(values: Tensor, mean: Number, norm: Number) -> Number:
    """Return the standard deviation of values whose mean and norm are known."""
    count = values.numel()
    if not (isinstance(mean, Tensor) or isinstance(norm, Tensor | complex)):
        of_mean = abs(mean) * abs(mean)
        spread = norm * norm / count - of_mean
        if spread > of_mean:  # else too many digits cancel
            return math.sqrt(spread)
    return _at_once(_sum_of_squares_root(values - mean)) / math.sqrt(count)


def _count_zeros(values: Tensor) -> Tensor:
    """Count the zeros among floating-point values, which are overwritten.

    On a CPU count_nonzero() branches at every entry, and takes several times as long
    where zeros are scattered, as behind a ReLU.
    """
    is_exact = values.numel() <= 2**24  # the largest count that float32 has
    ones = values.eq_(0)
    return ones.sum() if is_exact else ones.sum(dtype=torch.float64)


def _at_once(number: Tensor) -> Number:
    """Read a number now, unless that would wait for a device.

    Thousands of small tensors, if kept, would keep the memory between them from being
    used again.
    """
    if number.is_meta:
        return math.nan
    return number.item() if type(number) is Tensor and number.is_cpu else number


def _values(tensor: Tensor) -> Tensor:
    if is_lazy(tensor):
        raise RecordingArgumentError(
            f"tensor is an {type(tensor).__name__}, which has no shape and no values "
            "before its module was called once: call the module first."
        )
    try:
        return wide(tensor.detach())
    except NotImplementedError as error:
        raise RecordingArgumentError(
            f"tensor has dtype {tensor.dtype}, which torch does not turn into numbers: "
            "dequantize it first."
        ) from error


def norm(values: Iterable[Tensor | TensorStats]) -> float:
    """Return the Euclidean norm over all entries of all tensors.

    Args:
        values: Tensors of any shape and dtype, on any device, or their `TensorStats`.

    Returns:
        The square root of the sum of squared magnitudes; 0 without tensors; NaN if a
        tensor has no values, as on the meta device, a dtype that torch does not turn
        into numbers, or a class that has no norm.
    """
    return math.hypot(*map(_norm, values))


def root_mean_square(values: Tensor) -> float:
    """Return the root mean square of a tensor's entries, as `norm` takes it."""
    return norm([values]) / math.sqrt(max(values.numel(), 1))


def _norm(values: Tensor | TensorStats) -> float:
    if isinstance(values, TensorStats):
        return values.norm
    if values.is_meta:
        return math.nan
    try:
        return if_known(lambda: _sum_of_squares_root(wide(values)).item(), [values])
    except (UnknownToClassError, NotImplementedError):
        return math.nan


def _sum_of_squares_root(values: Tensor) -> Tensor:
    # In float32 the square of a vanished gradient would be zero.
    return cast(Any, torch.linalg).vector_norm(values, dtype=widest(values))


def count_nonfinite(values: Tensor) -> Tensor:
    """Return how many entries are NaN or infinite, as a tensor on the same device."""
    # x - x is 0 for a finite x, and NaN for others: faster than isfinite().
    return torch.count_nonzero(values - values)


def largest(numbers: Iterable[float]) -> float | None:
    """Return the largest number, NaN before all others; ``None`` if there is none."""
    return max(numbers, key=lambda it: math.inf if math.isnan(it) else it, default=None)
