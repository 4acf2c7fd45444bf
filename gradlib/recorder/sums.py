"""Gradients that come in parts: added up, and reduced when all have come."""

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from torch import Tensor

from gradlib.private.modes import unseen
from gradlib.private.passes import backward_pass_id
from gradlib.recorder.second_order import Receiver
from gradlib.recording.flow import Grads, Sum, whole
from gradlib.values import Keep, keep


class Sums:
    """The gradients of a block that come in parts."""

    def __init__(self, keep: Keep, *, cannot_add: bool) -> None:
        """Begin with none.

        Args:
            keep: Returns what to keep of a gradient.
            cannot_add: Whether nothing can be added to what is kept. Then a gradient
                that comes in parts is kept when the last part has come.
        """
        self._keep = keep
        self.cannot_add = cannot_add
        self._expected: Counter[int] = Counter()  # parts, by the id of their `Grads`
        # The sums to which more parts may come: where, and torch's number of the pass.
        self._open: list[tuple[Grads, int]] = []

    def expect(self, receivers: Sequence[Receiver]) -> None:
        """Wait for one more part of each gradient."""
        if self.cannot_add:
            self._expected.update(id(grads) for _, grads, *_ in receivers)

    def add(self, grads: Grads, running: int, grad: Tensor) -> None:
        """Add a part of a gradient, and reduce the sum when its last part has come."""
        known: Any = grads.get(running)
        if not self.cannot_add:
            grads[running] = _plus(known, self._keep(grad))  # it may change its device
            return
        parts = self._expected[id(grads)]
        if known is None:
            known = grads[running] = Sum(keep(grad), parts, self._keep)
            if parts > 1:
                self._open.append((grads, running))
        else:
            known.total = _plus(known.total, grad)
        known.missing -= 1
        if known.missing == 0:
            grads[running] = whole([known])

    def begin(self, grads: Grads, grad: Tensor) -> Sum:
        """Return a sum that begins with one part, of an unknown number."""
        self._open.append((grads, backward_pass_id()))
        return Sum(keep(grad), 0, self._keep)

    def added(self, keep_total: Keep, grads: Grads, grad: Tensor) -> Any:
        """Return what to keep when a part comes, the first or another one.

        Args:
            keep_total: Returns what to keep of the first part, if others can be added.
            grads: Where the gradient is gathered.
            grad: The part.
        """
        known: Any = grads.get(backward_pass_id())
        if self.cannot_add:
            if known is None:
                return self.begin(grads, grad)
            return Sum(_plus(known.total, grad), 0, self._keep)
        return keep_total(grad) if known is None else _plus(known, keep(grad))

    def finish(self, numbers: Mapping[int, int], going_on: Collection[int]) -> None:
        """Reduce the sums of passes that have ended, as nothing more will come.

        Args:
            numbers: torch's number of each pass -> ours.
            going_on: Our numbers of the passes that may still run.
        """
        waiting = self._open.copy()  # another thread may add to the list
        del self._open[: len(waiting)]
        ended: dict[tuple[int, int | None], tuple[Grads, list[int]]] = {}
        for grads, running in waiting:
            number = numbers.get(running)
            if number in going_on:
                self._open.append((grads, running))
            else:
                ended.setdefault((id(grads), number), (grads, []))[1].append(running)
        for (_, number), (grads, keys) in ended.items():
            sums = [grads.pop(it) for it in keys if isinstance(grads.get(it), Sum)]
            if sums and number is not None:
                grads[keys[0]] = whole(sums)


def _plus(total: Tensor, part: Tensor) -> Tensor:
    with unseen():
        return total + part.detach()
