"""Ways on which a chain goes on from one tensor: what they make, and the way back."""

import itertools
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from gradlib.jacobian.fast.chains.steps import Seen, part, pulled_back
from gradlib.private.modes import grad_is_enabled

# torch's own, whatever somebody has put there since.
_cat, _pad = torch.cat, F.pad


class Gated(NamedTuple):
    """A product with what another way has given.

    Attributes:
        factor: That, or how the product changes with this way: ``(batch, ...)``.
    """

    factor: Tensor

    def part(self, start: int, stop: int) -> "Gated":
        """Return it for some samples."""
        return Gated(self.factor[start:stop])

    def pull(self, v: Tensor, ours: bool) -> tuple[Tensor, bool]:
        """Go back."""
        factor = self.factor.unsqueeze(1)
        alone = ours and not grad_is_enabled()
        return v.mul_(factor) if alone else v * factor, True


class Negated(NamedTuple):
    """What is subtracted."""

    def pull(self, v: Tensor, ours: bool) -> tuple[Tensor, bool]:
        """Go back."""
        return v.neg_() if ours and not grad_is_enabled() else -v, True


class Padded(NamedTuple):
    """A part of each vector: zeros come from the rest.

    Attributes:
        before: How many entries are before it.
        after: And after it.
    """

    before: int
    after: int

    def pull(self, v: Tensor, ours: bool) -> tuple[Tensor, bool]:
        """Go back."""
        del ours
        return _pad(v, self), True


class Narrowed(NamedTuple):
    """What a vector is a part of: of all that came to that, its part goes back.

    Attributes:
        start: The number of the vector's first entry there.
        stop: And of the one after its last.
    """

    start: int
    stop: int

    def pull(self, v: Tensor, ours: bool) -> tuple[Tensor, bool]:
        """Go back."""
        part = v[..., self.start : self.stop]
        if part.is_contiguous():  # as of a single row: it is memory of v's
            return part, ours
        # In order, or torch may multiply it sample by sample.
        return part.contiguous(), True


class Forked(NamedTuple):
    """Two ways from one tensor, whose vectors are added up.

    Attributes:
        one: What is needed to go back through the first.
        other: And through the second.
    """

    one: Seen
    other: Seen

    def part(self, start: int, stop: int) -> "Forked":
        """Return it for some samples."""
        return Forked(part(self.one, start, stop), part(self.other, start, stop))

    def pull(self, v: Tensor, ours: bool) -> tuple[Tensor, bool]:
        """Go back."""
        one, is_new = pulled_back(self.one, v, ours=False)
        other, is_ours = pulled_back(self.other, v, ours=ours and is_new)
        return _added((one, is_new), (other, is_ours))


class Interwoven(NamedTuple):
    """Ways from one vector that part and meet again.

    Attributes:
        steps: What is needed to go back through each, to all that it was given, and the
            numbers of that.
    """

    steps: list[tuple[list[Seen], tuple[int, ...]]]

    def part(self, start: int, stop: int) -> "Interwoven":
        """Return what is needed for some samples."""
        return Interwoven(
            [
                ([part(seen, start, stop) for seen in ways], given)
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
            for seen, source in zip(ways, given, strict=True):
                found = pulled_back(seen, grad, ours=alone)
                come[source] = _added(come[source], found) if source in come else found
        return come[0]


def put_together(
    by: str, y: Tensor, z: Tensor, laid_out: Callable[[Tensor], Tensor]
) -> tuple[Tensor, list[Seen]]:
    """Return what two ways make, and what is needed to go back to each.

    Args:
        by: What puts them together, as a `Joined` has it.
        y: What the first gives.
        z: What the other does.
        laid_out: Lays out what is kept of them, as vectors will be.
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


def gathered(values: list[Tensor]) -> tuple[Tensor, list[Seen]]:
    """Return vectors one behind the other, and what is needed to go back to each."""
    ends = [*itertools.accumulate(it.shape[1] for it in values)]
    return _cat(values, 1), [
        [Narrowed(start, stop)] for start, stop in itertools.pairwise((0, *ends))
    ]


def _added(one: tuple[Tensor, bool], other: tuple[Tensor, bool]) -> tuple[Tensor, bool]:
    """Return the sum of vectors, each with whether it may be overwritten."""
    (v, is_ours), (w, is_others) = one, other
    if grad_is_enabled() or v is w:
        return v + w, True
    if is_ours:
        return v.add_(w), True
    return (w.add_(v) if is_others else v + w), True
