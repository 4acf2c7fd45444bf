"""What a verification has found."""

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

from gradlib.recording.difference import Difference
from gradlib.recording.in_words import calls_text, numbered, passes_text
from gradlib.render import Printable, Table
from gradlib.wording import counted, listed

COLUMNS = ("module", "field", "error", "reason")
ROWS = 20


@dataclass(frozen=True, slots=True)
class Skipped(Printable):
    """A call that was not replayed, or not for all passes.

    Attributes:
        name: The module's name; the root is ``""``.
        index: Which call of this module in the block, from 0.
        reason: Why it was not.
        backward: The pass for which it was not, as `Pass.backward` numbers it; ``None``
            where it was replayed for none.
    """

    name: str
    index: int
    reason: str
    backward: int | None = None

    def _table(self) -> Table:
        passes = "all" if self.backward is None else str(self.backward)
        row = numbered(self.name, self.index), passes, self.reason
        return Table("Skipped", ("module", "passes", "reason"), [row])


@dataclass(frozen=True, slots=True)
class Verification(Printable):
    """What `Recording.verify` found.

    Attributes:
        disagreements: What came out differently, in the order of the calls. Where a
            call inside another disagrees, the outer one is neither checked nor listed.
        skipped: The calls that could not be replayed, or not for all passes.
        agreed: How many calls agree, in every pass that was replayed.
        calls: How many calls there are.
        unchecked: With ``numerical=True``, the names of the parameters and inputs whose
            gradients were not checked by finite differences: those in modules without a
            recorded call that other calls may have used, as ``out_proj`` in attention;
            those without values; those that a call itself wrote to or replaced; those
            along which there is no slope, as where the output is not finite, or changes
            its shape with every value; and those of a call in which dozens of others
            are wrong.
    """

    disagreements: tuple[Difference, ...]
    skipped: tuple[Skipped, ...]
    agreed: int
    calls: int
    unchecked: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        """Whether calls were replayed, and all of them agree."""
        return bool(self.agreed) and not self.disagreements

    def _table(self) -> Table:
        agree = "agrees" if self.agreed == 1 else "agree"
        of = counted(self.calls, "call")
        title = f"Verification: {self.agreed} of {of} {agree}"
        rows = [
            (numbered(it.name, it.index), it.field, f"{it.error:.2g}", it.reason)
            for it in self.disagreements[:ROWS]
        ]
        more = len(self.disagreements) - len(rows)
        footer = [f"and {more} more, all in .disagreements"] if more else []
        footer += _not_replayed(self.skipped)
        whole = [it for it in self.skipped if it.backward is None]
        said = {(it.name, it.index) for it in (*self.disagreements, *whole)}
        around = self.calls - self.agreed - len(said)
        if around:
            left = counted(around, "call")
            footer.append(f"not checked: {left}, with a disagreement inside")
        if self.unchecked:
            footer.append(
                f"not checked: the gradients of {listed(self.unchecked)}. Each stands "
                "in a module without a recorded call, has no values, is written to or "
                "replaced in a call, has no slope along it, or comes after dozens in "
                "its call that are wrong"
            )
        return Table(title, COLUMNS if rows else (), rows, tuple(footer))


def _not_replayed(skipped: Iterable[Skipped]) -> list[str]:
    """Say which calls were not replayed, grouped by reason."""
    calls: defaultdict[tuple[str, int | None], list[str]] = defaultdict(list)
    for it in skipped:
        calls[it.reason, it.backward].append(numbered(it.name, it.index))
    passes: defaultdict[tuple[str, str], list[int]] = defaultdict(list)
    for (reason, backward), names in calls.items():
        passes[reason, calls_text(names)] += [] if backward is None else [backward]
    return [
        f"not replayed{f' in {passes_text(numbers)}' if numbers else ''}, {names} "
        f"({reason})"
        for (reason, names), numbers in passes.items()
    ]
