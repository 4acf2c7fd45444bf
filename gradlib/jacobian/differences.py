"""Calls a function around a point, to take its slope along a direction."""

import math
from collections.abc import MutableMapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from gradlib.errors import NotRepeatableError
from gradlib.jacobian.again import Called, call_again
from gradlib.jacobian.arguments import Arguments
from gradlib.jacobian.chance import Chance
from gradlib.jacobian.directions import Meant, Moves, direction
from gradlib.jacobian.generators import RandomState
from gradlib.wording import listed


@dataclass(frozen=True)
class Closeness:
    """The steps and tolerances of finite differences.

    Attributes:
        double: Whether the calls are made in float64.
        step: How far the first pair of calls goes, as a part of each entry.
        looks: For each further pair, how far beside the point it is taken, and its
            step.
        coarse: From this step on, rounding is as small as it gets.
        sure: By which part two slopes may differ; ``None`` where dtypes decide it.
        surer: By which part of their terms two sums of slopes may differ: the sums
            themselves may be small, as terms cancel.
    """

    double: bool
    step: float
    looks: tuple[tuple[float, float], ...]
    coarse: float
    sure: float | None
    surer: float


# A kink at the point itself (an input of ReLU that is exactly 0, two equal inputs of a
# maximum) misleads a look at the point, but not one beside it, and that comes first: in
# float32 a ReLU may be on the other side of its kink than in float64.
IN_DOUBLE = Closeness(
    double=True,
    step=1e-6,
    looks=((1e-3, 1e-7), (0.0, 1e-6), (1e-2, 1e-5), (1e-3, 1e-4), (3e-2, 1e-3)),
    coarse=1e-4,
    sure=None,
    surer=1e-3,
)
IN_FLOAT = Closeness(
    double=False,
    step=3e-3,
    looks=((0.0, 3e-3), (1e-2, 1e-3), (3e-2, 3e-3), (1e-2, 1e-2)),
    coarse=1e-2,
    # Kinks leave three of 96 random nets in doubt; with two thirds of `surer`, five.
    # With five thirds of it, one, but then one of fifty slopes that are off by a
    # fourteenth is taken for right.
    sure=0.05,
    surer=0.015,
)


ROUNDING = 30
"""By how many eps of its dtype a function's value may be off."""

HIDING = 0.1
"""Rounding of more than this part of a slope may hide a cut path."""


class Caller:
    """Calls a function again, around the point it was called at.

    Attributes:
        needs_graph: Whether autograd records every call. A call without recording takes
            half the memory, but the function may need it, or compute something else.
    """

    def __init__(
        self,
        arguments: Arguments,
        random: RandomState,
        meant: Meant,
        how: Closeness,
        roots: Sequence[Tensor],
    ) -> None:
        """Take the first call: its arguments, generator states and outputs, `roots`."""
        self.arguments, self.meant, self.how = arguments, meant, how
        self.random = random
        self.chance = Chance()
        self.needs_graph = False
        self._roots = roots
        self._widened: MutableMapping[Tensor, Tensor] = WeakIdKeyDictionary()

    def in_float(self) -> "Caller":
        """Return a caller that keeps the dtypes of inputs and parameters."""
        return Caller(self.arguments, self.random, self.meant, IN_FLOAT, self._roots)

    def direction(self) -> Moves:
        """Return a random direction; each entry moves in proportion to its size."""
        return direction(self.chance, self.arguments, self.meant)

    def at(
        self,
        *moves: tuple[float, Moves],
        order: Tensor | None = None,
        graph: bool = False,
    ) -> Called:
        """Call the function at the point, moved along each direction.

        Args:
            moves: Pairs of how far to move and the direction.
            order: The numbers of the samples to call it with, ``(batch,)``.
            graph: Whether autograd records the call.

        Raises:
            OtherOutputsError: In float64 the outputs are not as many as at first, or
                of other shapes.
            NotRepeatableError: The same in the dtypes of the first call.
        """
        call = partial(
            call_again,
            self.arguments,
            self.random,
            moves,
            order=order,
            double=self.how.double,
            widened=self._widened,
        )
        if not graph and not self.needs_graph:
            try:
                called = call(graph=False)
                if self._has_forms(called):
                    return called
            except Exception:  # if recording does not help, it will raise again
                pass
            self.needs_graph = True
        called = call(graph=True)
        if not self._has_forms(called):
            raise self._other_outputs(called)
        return called

    def as_first(self, times: int) -> Called:
        """Call the function as it was called first: at the point, in the same dtypes.

        Args:
            times: How often in a row, each call with the module state of the one
                before.
        """
        return call_again(
            self.arguments,
            self.random,
            (),
            order=None,
            double=False,
            graph=True,
            watched=False,
            times=times,
            widened=WeakIdKeyDictionary(),
        )

    def _has_forms(self, called: Called) -> bool:
        """Tell whether the outputs have the shapes of those of the first call."""
        return _forms(tensors_of(called)) == _forms(self._roots)

    def _other_outputs(self, called: Called) -> Exception:
        said = (
            f"returned {_in_words(self._roots)} at first, and "
            f"{_in_words(tensors_of(called))} when it was called again"
        )
        if self.how.double:
            return OtherOutputsError(said)
        return NotRepeatableError(
            f"fn {said}, with inputs that are the same up to a small step. Have it "
            "return as many outputs of the same shapes and dtypes each time; or pass "
            "check=False."
        )


class OtherOutputsError(Exception):
    """In float64 a function has other outputs than in its own dtypes."""


def _forms(outputs: Sequence[Tensor]) -> list[tuple[torch.Size, bool]]:
    return [(it.shape, it.is_floating_point()) for it in outputs]


def _in_words(outputs: Sequence[Tensor]) -> str:
    return listed(f"{it.dtype} {list(it.shape)}" for it in outputs)


def slopes(ahead: Called, behind: Called, step: float) -> list[Tensor]:
    """Return the slope of each output between two calls, ``(batch, out)``."""
    return [
        by_sample(a - b) / (2 * step)
        for a, b in zip(tensors_of(ahead), tensors_of(behind), strict=True)
    ]


def tensors_of(called: Called) -> list[Tensor]:
    """Return the outputs of a call."""
    return [it for it in called.outputs.leaves if isinstance(it, Tensor)]


def by_sample(tensor: Tensor) -> Tensor:
    """Return a tensor's values as ``(batch, entries)``."""
    return tensor.detach().reshape(len(tensor), math.prod(tensor.shape[1:]))
