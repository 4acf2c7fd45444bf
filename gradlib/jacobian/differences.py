"""How steep a function is along a direction, by pairs of calls."""

import math
from collections.abc import MutableMapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from gradlib.errors import NotRepeatableError, listed
from gradlib.jacobian.again import Called, call_again
from gradlib.jacobian.arguments import Arguments
from gradlib.jacobian.chance import Chance
from gradlib.jacobian.directions import Meant, Moves, direction
from gradlib.jacobian.generators import RandomState


@dataclass(frozen=True)
class Closeness:
    """How closely to look.

    Attributes:
        double: Whether the calls are made in float64.
        step: How far the first pair goes from the point, as a part of each entry.
        looks: How far from the point, and how far from there, further pairs go.
        coarse: From which step on rounding is as little as it gets.
        sure: By which part two slopes may be apart; ``None`` where dtypes decide it.
        surer: By which part of their terms sums of slopes may be, which are small by
            chance where these cancel.
    """

    double: bool
    step: float
    looks: tuple[tuple[float, float], ...]
    coarse: float
    sure: float | None
    surer: float


# A kink at the point itself (an input of ReLU that is exactly 0, two equal ones of a
# maximum) fools the look there, and none beside it.
IN_DOUBLE = Closeness(
    double=True,
    step=1e-6,
    looks=((0.0, 1e-6), (1e-3, 1e-7), (1e-2, 1e-5), (1e-3, 1e-4), (3e-2, 1e-3)),
    coarse=1e-4,
    sure=None,
    surer=1e-3,
)
IN_FLOAT = Closeness(
    double=False,
    step=3e-3,
    looks=((0.0, 3e-3), (1e-2, 1e-3), (3e-2, 3e-3), (1e-2, 1e-2)),
    coarse=1e-2,
    # Of 96 random nets kinks leave three in doubt; with two thirds of `surer`, five.
    # With five thirds of it one, and one slope of fifty that is off by a fourteenth is
    # taken for right.
    sure=0.05,
    surer=0.015,
)


ROUNDING = 30
"""How many times its dtype's eps a function may be off in its value."""

HIDING = 0.1
"""From which part of a slope on rounding may hide something."""


class Caller:
    """Calls a function again, around the point it was called at.

    Attributes:
        needs_graph: Whether autograd records every call. Without that one takes half
            the memory; but the function may need it, or be another without it.
    """

    def __init__(
        self,
        arguments: Arguments,
        random: RandomState,
        meant: Meant,
        how: Closeness,
        roots: Sequence[Tensor],
    ) -> None:
        """Take the call, where torch's generators stood, and what it returned."""
        self.arguments, self.meant, self.how = arguments, meant, how
        self.random = random
        self.chance = Chance()
        self.needs_graph = False
        self._roots = roots
        self._widened: MutableMapping[Tensor, Tensor] = WeakIdKeyDictionary()

    def in_float(self) -> "Caller":
        """Return one that calls in the dtypes the function was written for."""
        return Caller(self.arguments, self.random, self.meant, IN_FLOAT, self._roots)

    def direction(self) -> Moves:
        """Return a random direction, in which each entry goes by its own size."""
        return direction(self.chance, self.arguments, self.meant)

    def at(
        self,
        *moves: tuple[float, Moves],
        order: Tensor | None = None,
        graph: bool = False,
    ) -> Called:
        """Call the function at the point moved so far along each direction.

        Args:
            moves: How far along what.
            order: The samples it is called with, by their numbers.
            graph: Whether the outputs shall have one.

        Raises:
            OtherOutputsError: There are not as many outputs as at first, of those
                shapes.
            NotRepeatableError: The same in the dtypes that it was called in at first.
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
            except Exception:  # if that was not the reason, it will raise again
                pass
            self.needs_graph = True
        called = call(graph=True)
        if not self._has_forms(called):
            raise self._other_outputs(called)
        return called

    def as_first(self, times: int = 1) -> Called:
        """Call the function as it was called first: at the point, and in its dtypes.

        Args:
            times: How often in a row, from where the call before has left its modules.
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
        """Tell whether outputs are as those of the first call, but for their values."""
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
    """In float64 a function has other outputs than in the dtypes of its inputs."""


def _forms(outputs: Sequence[Tensor]) -> list[tuple[torch.Size, bool]]:
    return [(it.shape, it.is_floating_point()) for it in outputs]


def _in_words(outputs: Sequence[Tensor]) -> str:
    return listed(f"{it.dtype} {list(it.shape)}" for it in outputs)


def slopes(ahead: Called, behind: Called, step: float) -> list[Tensor]:
    """Return how steep each output is, ``(batch, out)``, between two calls."""
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
