"""Combines several ways from one tensor in a chain, and goes back through them."""

import itertools
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from gradlib.jacobian.fast.chains.steps import Steps, part, pulled_back
from gradlib.private.modes import grad_is_enabled

# torch's own, also where these functions are replaced later.
_cat, _pad = torch.cat, F.pad


class Gated(NamedTuple):
    """A product or quotient with the output of another way.

    Attributes:
        factor: Its derivative by the output of this way: ``(batch, ...)``.
    """

    factor: Tensor

    def part(self, start: int, stop: int) -> "Gated":
        """Return the step for some samples."""
        return Gated(self.factor[start:stop])

    def pull(self, v: Tensor, ours: bool) -> tuple[Tensor, bool]:
        """Go back."""
        factor = self.factor.unsqueeze(1)
        return v.mul_(factor) if ours else v * factor, True


class Negated(NamedTuple):
    """A way whose output is subtracted."""

    def pull(self, v: Tensor, ours: bool) -> tuple[Tensor, bool]:
        """Go back."""
        return v.neg_() if ours else -v, True


class Padded(NamedTuple):
    """A part taken of each vector: its gradient is padded with zeros.

    Attributes:
        before: How many entries are before the part.
        after: How many entries are after it.
    """

    before: int
    after: int

    def pull(self, v: Tensor, _ours: bool) -> tuple[Tensor, bool]:
        """Go back."""
        return _pad(v, self), True


class Narrowed(NamedTuple):
    """A vector in a concatenation: its part of the gradient goes back.

    Attributes:
        start: The number of the vector's first entry in the concatenation.
        stop: The number of the one after its last.
    """

    start: int
    stop: int

    def pull(self, v: Tensor, ours: bool) -> tuple[Tensor, bool]:
        """Go back."""
        part = v[..., self.start : self.stop]
        if part.is_contiguous():  # as of a single row: a view of v
            return part, ours
        # Contiguous, else torch may multiply sample by sample.
        return part.contiguous(), True


class Forked(NamedTuple):
    """Two ways from one tensor, whose VJPs are added.

    Attributes:
        one: The steps back through the first way.
        other: The steps back through the second.
    """

    one: Steps
    other: Steps

    def part(self, start: int, stop: int) -> "Forked":
        """Return the step for some samples."""
        return Forked(part(self.one, start, stop), part(self.other, start, stop))

    def pull(self, v: Tensor, ours: bool) -> tuple[Tensor, bool]:
        """Go back."""
        one, is_new = pulled_back(self.one, v, ours=False)
        other, is_ours = pulled_back(self.other, v, ours=ours and is_new)
        return _added((one, is_new), (other, is_ours))


class Interwoven(NamedTuple):
    """Ways from one vector that part and meet again, as in a `Woven`.

    Attributes:
        steps: For each stage, the steps back to each of its inputs, and the numbers of
            the stages that these come from.
    """

    steps: list[tuple[list[Steps], tuple[int, ...]]]

    def part(self, start: int, stop: int) -> "Interwoven":
        """Return the step for some samples."""
        return Interwoven(
            [
                ([part(steps, start, stop) for steps in ways], given)
                for ways, given in self.steps
            ]
        )

    def pull(self, v: Tensor, ours: bool) -> tuple[Tensor, bool]:
        """Go back."""
        come: dict[int, tuple[Tensor, bool]] = {len(self.steps): (v, ours)}
        for number in range(len(self.steps), 0, -1):
            grad, is_ours = come.pop(number)
            ways, given = self.steps[number - 1]
            alone = is_ours and len(given) == 1
            for steps, source in zip(ways, given, strict=True):
                made = pulled_back(steps, grad, ours=alone)
                come[source] = _added(come[source], made) if source in come else made
        return come[0]


def put_together(
    by: str, y: Tensor, z: Tensor, laid_out: Callable[[Tensor], Tensor]
) -> tuple[Tensor, list[Steps]]:
    """Return the combination of two ways, and the steps back to each.

    Args:
        by: The operation that combines them, as in a `Joined`.
        y: The output of the first way.
        z: The output of the other.
        laid_out: Gives kept tensors the memory layout of the vectors.
    """
    if by == "add":
        return y + z, [[], []]
    if by == "sub":
        return y - z, [[], [Negated()]]
    if by == "mul":
        made, factors = y * z, [z, y]
    else:
        made = y / z
        factors = [1 / z, -made / z]
    return made, [[Gated(laid_out(it))] for it in factors]


def gathered(values: list[Tensor]) -> tuple[Tensor, list[Steps]]:
    """Return the concatenation of vectors, and the steps back to each."""
    ends = [*itertools.accumulate(it.shape[1] for it in values)]
    return _cat(values, 1), [
        [Narrowed(start, stop)] for start, stop in itertools.pairwise((0, *ends))
    ]


def _added(one: tuple[Tensor, bool], other: tuple[Tensor, bool]) -> tuple[Tensor, bool]:
    """Return the sum of two tensors; each comes with whether it may be overwritten."""
    (v, is_ours), (w, is_others) = one, other
    if grad_is_enabled():
        return v + w, True
    if is_ours:
        return v.add_(w), True
    return (w.add_(v) if is_others else v + w), True
