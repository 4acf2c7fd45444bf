"""A difference between two values, and how large it may be."""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from numbers import Real
from typing import cast

import torch

from gradlib.errors import RecordingArgumentError
from gradlib.private.tensors import default_tolerances
from gradlib.recording.in_words import numbered
from gradlib.recording.trace import CallTrace
from gradlib.render import Printable, Table
from gradlib.wording import in_brief

COLUMNS = ("module", "direction", "field", "error", "reason")


@dataclass(frozen=True, slots=True)
class Difference(Printable):
    """One value of a call that is not what it should be.

    Attributes:
        name: The module's name; the root is ``""``.
        index: Which call of this module in the block, from 0.
        direction: ``"forward"`` or ``"backward"``.
        field: Where in the call, such as ``"args[0]"`` or
            ``"param_grads['weight']"``.
        error: The norm of the difference, as a part of the larger of the two norms.
            Infinite where they cannot be subtracted. Where finite differences disagree,
            the two are the slopes along a few random directions, by finite differences
            and by the gradient: the error is a half where the gradient is half or twice
            what it should be.
        reason: Why they differ, or what differs besides numbers, if known, or ``""``.
    """

    name: str
    index: int
    direction: str
    field: str
    error: float
    reason: str = ""

    def _table(self) -> Table:
        return Table("Difference", COLUMNS, [row_of(self)])


def row_of(it: Difference) -> tuple[str, ...]:
    """Return what a table shows of a difference, in its `COLUMNS`."""
    name = numbered(it.name, it.index)
    return name, it.direction, it.field, f"{it.error:.2g}", it.reason


def difference_at(
    trace: CallTrace, field: str, error: float, reason: str
) -> Difference:
    """Return the difference in a field of a call."""
    # Where a call has several passes, their fields begin with passes[i] instead.
    is_forward = field.startswith(("args", "kwargs", "output"))
    direction = "forward" if is_forward else "backward"
    return Difference(trace.name, trace.index, direction, field, error, reason)


@dataclass(frozen=True, slots=True)
class Gap:
    """How far two values are apart: root mean squares, over all entries."""

    difference: float
    size: float  # of the larger of the two
    rtol: float  # what their dtypes allow, as a part of the size
    reason: str = ""

    @property
    def error(self) -> float:
        """The difference as a part of the size."""
        if not self.difference:
            return 0.0
        return self.difference / self.size if self.size else math.inf


GROWTH, MOST = 4, 10


@dataclass(frozen=True, slots=True)
class Tolerance:
    """How far two values may be apart.

    Attributes:
        rtol: As a part of the value; ``None`` for what the dtypes allow.
        atol: On top, whatever the value.
        least: The least rtol where `rtol` is ``None``: that of a coarser dtype in which
            the values were computed on the way.
    """

    rtol: float | None = None
    atol: float | None = None
    least: float = 0.0

    def __post_init__(self) -> None:
        """Check what the user gave.

        Raises:
            RecordingArgumentError: `rtol` or `atol` is no number, or a negative one.
        """
        for name, given in (("rtol", self.rtol), ("atol", self.atol)):
            number = isinstance(cast(object, given), Real)
            if given is not None and not (number and given >= 0):
                raise RecordingArgumentError(
                    f"{name} must be a number from 0 on, or None for what the dtypes "
                    f"allow, but it is {in_brief(given)}, of type "
                    f"{type(given).__name__}."
                )

    def allows(self, gap: Gap, drift: float = 0.0) -> bool:
        """Tell whether two values agree.

        Args:
            gap: How far they are apart.
            drift: The largest error before. Where `rtol` is ``None``, rounding may grow
                to `GROWTH` times that, and to `MOST` times what the dtypes allow.
        """
        rtol = self.rtol
        if rtol is None:  # integers agree when they are equal
            rtol = max(gap.rtol, self.least) if gap.rtol else 0.0
            rtol = max(rtol, min(GROWTH * drift, MOST * rtol))
        if not gap.difference:  # also for zeros and an infinite rtol, which give NaN
            return True
        return gap.difference <= rtol * gap.size + (self.atol or 0.0)


def rtol_of(dtypes: Iterable[torch.dtype]) -> float:
    """Return the default rtol plus atol of the coarsest of some dtypes; 0 for none."""
    return sum(default_tolerances(*dtypes, torch.int64))
