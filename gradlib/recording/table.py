"""The table of a recording: a row for each call, or for each pass of one."""

from collections.abc import Collection, Sequence

from gradlib.recording.backward_pass import Pass, with_keywords
from gradlib.recording.call import Call
from gradlib.recording.in_words import (
    are_statistics,
    norm_text,
    numbered,
    numbers_in,
    shape_text,
    shown,
)
from gradlib.recording.notes import BATCHED, NOT_REACHED
from gradlib.render import Table
from gradlib.wording import counted, listed

ROWS = 60
"""The most rows of a table: a longer one leaves out its middle."""

SHAPES = 3
"""The most shapes that are shown of one output: further ones are counted."""

COLUMNS = ("output", "grad_output", "grad_input", "param_grads")
GRADIENTS = frozenset(COLUMNS[1:])

NO_CALLS = (
    "Call the model inside the block, and backward() too. recording[name] says of a "
    "module why it has no call."
)

NO_PASS = (
    "no backward pass reached these calls inside the block: call backward() there too"
)

WHICH_PASS = "pass: which backward pass of the block"

NOT_SEEN = "no call was seen of {}: recording[name] says why"


def table_of(
    calls: Sequence[Call],
    fields: Collection[str],
    unseen: Collection[str],
    *,
    is_reduced: bool,
) -> Table:
    """Return the table of some calls.

    Args:
        calls: The calls to show.
        fields: The fields that were kept.
        unseen: The names of the modules whose calls could not be seen.
        is_reduced: Whether the results of the user's `reduce` were kept.
    """
    not_seen = [NOT_SEEN.format(listed(map(shown, unseen)))] if unseen else []
    if not calls:
        return Table(title_of(calls, fields), (), [], (NO_CALLS, *not_seen))
    pairs = [(call, pass_) for call in calls for pass_ in call.passes or (None,)]
    columns = [name for name in COLUMNS if name in fields]
    if len({pass_.backward for _, pass_ in pairs if pass_}) > 1:
        columns.insert(0, "pass")
    left_out = max(0, len(pairs) - ROWS)
    if left_out:
        del pairs[ROWS // 2 : -ROWS // 2]
    rows = [_row(call, pass_, columns) for call, pass_ in pairs]
    footer = [*_legend(pairs, columns, is_reduced=is_reduced), *not_seen]
    if _lack_passes(calls):
        footer.append(NO_PASS)
    if left_out:
        gap = f"... {left_out} more rows", "", *[""] * len(columns)
        rows.insert(ROWS // 2, gap)
        footer.append("recording.to_frame() has every row")
        if len({call.forward for call in calls}) > 1:
            footer.append("recording.forwards[i] prints one forward")
    title = title_of(calls, fields)
    return Table(title, ("module", "type", *columns), rows, tuple(footer))


def _lack_passes(calls: Sequence[Call]) -> bool:
    """Tell whether a backward pass could have reached some call, and none did."""
    if any(call.passes for call in calls):
        return False
    notes = (call.note for call in calls)
    return any(NOT_REACHED in note and BATCHED not in note for note in notes)


def title_of(calls: Sequence[Call], fields: Collection[str]) -> str:
    """Return a title that counts calls, forwards and backward passes.

    Where no gradient was kept, it is not known how many passes there were.
    """
    forwards = {call.forward for call in calls}
    title = (
        f"Recording: {counted(len(calls), 'call')}, {counted(len(forwards), 'forward')}"
    )
    if GRADIENTS.isdisjoint(fields):
        return title
    backwards = {pass_.backward for call in calls for pass_ in call.passes}
    return f"{title}, {counted(len(backwards), 'backward pass', 'backward passes')}"


def _row(call: Call, pass_: Pass | None, columns: list[str]) -> tuple[str, ...]:
    """Return the row of one pass of a call, or of a call without any."""
    cells = (_cell(call, pass_, column) for column in columns)
    return numbered(call.name, call.index), call.module_type, *cells


def _cell(call: Call, pass_: Pass | None, column: str) -> str:
    if column == "output":
        return shape_text(call.output, most=SHAPES)
    if pass_ is None:
        return "-"
    if column == "pass":
        return str(pass_.backward)
    return norm_text(with_keywords(pass_, column))


def _legend(
    pairs: Sequence[tuple[Call, Pass | None]], columns: list[str], *, is_reduced: bool
) -> list[str]:
    """Say what the columns show, by examples of their values."""
    example = next((pass_ for _, pass_ in pairs if pass_), None)
    shown = [pairs[0][0].output] if "output" in columns else []
    shown += [
        with_keywords(example, it) for it in columns if example and it in GRADIENTS
    ]
    parts: list[str] = []
    is_reduced = is_reduced and not are_statistics(shown)
    if "output" in columns:
        parts.append(f"output: shape{' of what reduce gave' * is_reduced}")
    if not GRADIENTS.isdisjoint(columns):
        what = "norm over all entries"
        if is_reduced:
            norm = "" if numbers_in(shown) else f"{what} of "
            what = f"{norm}what reduce gave"
        parts.append(f"gradients: {what}, - where there is none")
    return [*[WHICH_PASS] * ("pass" in columns), "; ".join(parts)]
