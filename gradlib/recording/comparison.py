"""What a comparison of two recordings has found."""

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING

from gradlib.recording.difference import COLUMNS, Difference, row_of
from gradlib.recording.in_words import NOTHING_IN_BOTH, numbered
from gradlib.render import Printable, Table
from gradlib.wording import counted

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

ROWS = 10
BY_NAME = "calls are matched by name; compare(other, names={...}) pairs other names"


@dataclass(frozen=True, slots=True)
class Unmatched(Printable):
    """A call that only one of two recordings has.

    Attributes:
        name: The module's name; the root is ``""``.
        index: Which call of this module in the block, from 0.
        only_in: ``"this"`` recording or the ``"other"``.
    """

    name: str
    index: int
    only_in: str

    def _table(self) -> Table:
        row = numbered(self.name, self.index), self.only_in
        return Table("Unmatched", ("module", "only in"), [row])


@dataclass(frozen=True, slots=True)
class Comparison(Printable):
    """What `Recording.compare` found.

    Attributes:
        first: Where the two first differ; ``None`` if they agree.
        errors: How far apart each pair of values is, in the order in which they were
            computed; those that agree are included.
        unmatched: The calls that only one of them has.
        skipped: What could not be compared, in words.
        compared: How many calls both have; 0 if no value of these could be compared.
        rtol: How far values may be apart, as a part of the value: more for a narrow
            dtype than for float32. See `Recording.compare`.
    """

    first: Difference | None
    errors: tuple[Difference, ...] = dataclasses.field(repr=False)
    unmatched: tuple[Unmatched, ...]
    skipped: tuple[str, ...]
    compared: int
    rtol: float
    _returned: tuple[tuple[str, int], ...] = dataclasses.field(repr=False)

    @property
    def ok(self) -> bool:
        """Whether calls were compared, both have the same ones, and these agree."""
        return bool(self.compared) and self.first is None and not self.unmatched

    def plot(self, ax: "Axes | None" = None) -> "Figure":
        """Draw how far apart the two are, module by module.

        The picture shows whether the error grows from module to module, as rounding
        does, or jumps at one of them. The modules stand in the order in which they
        returned, each with the error of its output, of its ``grad_output``, and the
        largest of its parameters' gradients. Equal values have no marker.

        Args:
            ax: Where to draw; a new figure if left out.

        Returns:
            The figure drawn on.

        Raises:
            RecordingArgumentError: `ax` is no Axes.
        """
        # Only here: importing matplotlib takes longer than all the rest.
        from gradlib.recording.errors_picture import draw

        return draw(self.errors, self._returned, self.first, self.rtol, ax)

    def _table(self) -> Table:
        count = f"Comparison of {counted(self.compared, 'call')}"
        here, there = self._only_in("this"), self._only_in("other")
        footer = [*here, *there, *[BY_NAME] * bool(here and there)]
        footer += [f"not compared: {reason}" for reason in self.skipped]
        first = self.first
        if first is None:
            return Table(f"{count}: {self._agreement()}", (), [], tuple(footer))
        rows = [row_of(first)]
        return Table(f"{count}: they part first at", COLUMNS, rows, tuple(footer))

    def _only_in(self, which: str) -> list[str]:
        found = [it for it in self.unmatched if it.only_in == which]
        where = f"{'this' if which == 'this' else 'the other'} recording"
        lines = [f"only in {where}: {numbered(it.name, it.index)}" for it in found]
        more = f"and {len(found) - ROWS} more only in {where}"
        return [*lines[:ROWS], more] if len(found) > ROWS else lines

    def _agreement(self) -> str:
        if not self.compared:
            return NOTHING_IN_BOTH
        others = ", but not all are in both" if self.unmatched else ""
        return f"they agree, rtol {self.rtol:.2g}{others}"
