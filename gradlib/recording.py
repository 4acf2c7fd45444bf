"""What was recorded, and the questions one can ask of it."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from gradlib import plot
from gradlib.call import Call, Pass, measured_in, norm_text, shape_text, shown
from gradlib.errors import AmbiguousCallError, NoSuchCallError
from gradlib.render import Printable, Table
from gradlib.selection import nearest
from gradlib.stats import norm
from gradlib.trace import Block, CallTrace

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

ROWS = 60
"""How many rows a printed recording has before it leaves out the middle."""


class Recording(Printable):
    """The calls recorded in a block, in the order they began.

    ``recording["fc2"]`` is the call of `fc2`, ``recording["fc2", 1]`` one of several;
    also ``"fc2" in recording``, ``len(recording)`` and iteration. Inside the block it
    holds what was recorded so far.
    """

    def __init__(
        self, block: Block, names: Mapping[str, str], traces: Sequence[CallTrace]
    ) -> None:
        """Give form to what the recorder wrote down.

        Args:
            block: What all calls have in common.
            names: Every name the model has for a module, with the name it is recorded
                under. They differ for a module that stands in two places.
            traces: The calls. The recorder goes on adding to them.
        """
        self._block = block
        self._names = names
        self._traces = traces

    @property
    def forwards(self) -> "tuple[Recording, ...]":
        """The outermost forwards of the block, each a recording of its own."""
        parts: dict[int, list[CallTrace]] = {}
        for trace in self._traces:
            parts.setdefault(trace.forward, []).append(trace)
        return tuple(
            Recording(self._block, self._names, part) for part in parts.values()
        )

    def calls(self, name: str) -> tuple[Call, ...]:
        """Return every call of one module.

        Args:
            name: The module's name as ``named_modules()`` gives it.

        Raises:
            NoSuchCallError: The model has no such module, or it was not called.
        """
        found = self._find(name)
        if not found:
            raise NoSuchCallError(self._why_nothing(name))
        return tuple(map(Call, found))

    def __getitem__(self, key: str | tuple[str, int]) -> Call:
        """Return the call of a module, or with ``name, index`` one of several.

        Raises:
            NoSuchCallError: There is no such call; the message says why.
            AmbiguousCallError: The module was called several times; the message says
                how to name one call.
        """
        name, index = _name_and_index(key)
        calls = {call.index: call for call in self.calls(name)}
        if index is None and len(calls) == 1:
            return next(iter(calls.values()))
        if index is None:
            raise AmbiguousCallError(
                f'"{name}" was called {len(calls)} times. Name one call: '
                f'recording["{name}", i] with i from {min(calls)} to {max(calls)}, or '
                f'recording.forwards[i]["{name}"].'
            )
        if index not in calls:
            raise NoSuchCallError(
                f'"{name}" has no call {index} here; its calls are '
                f"{', '.join(map(str, calls))}."
            )
        return calls[index]

    def __contains__(self, name: object) -> bool:
        """Tell whether a module of that name was called."""
        return isinstance(name, str) and bool(self._find(name))

    def __iter__(self) -> Iterator[Call]:
        """Go through the calls in the order they began."""
        return map(Call, tuple(self._traces))

    def __len__(self) -> int:
        """Return the number of calls."""
        return len(self._traces)

    def __repr__(self) -> str:
        """Count what was recorded."""
        return f"<{self._title()}>"

    def plot(self, ax: "Axes | None" = None) -> "Figure":
        """Draw how large the gradients are, module by module, the first on top.

        Modules that call other modules are left out, and with them the parameters they
        have of their own. ``param_grads`` is the norm over all parameters of a module.
        Where a module has several passes the line is their median and the band runs
        from the smallest to the largest.

        Args:
            ax: Where to draw; a new figure without it.

        Returns:
            The figure drawn on.
        """
        places = self._passes_by_place()
        norms = {
            field: [_norms(field, passes) for passes in places.values()]
            for field in ("grad_output", "grad_input", "param_grads")
            if field in self._fields()
        }
        return plot.gradient_flow(list(places), norms, ax)

    def _find(self, name: str) -> list[CallTrace]:
        recorded = self._names.get(name, name)
        return [trace for trace in self._traces if trace.name == recorded]

    def _why_nothing(self, name: str) -> str:
        if self._names.get(name, name) in self._block.left_out:
            return f'"{name}" was not recorded: record(..., modules=...) left it out.'
        if name in self._names:
            return (
                f'"{name}" was not called in the block. Only module(x) is a call: a '
                "parent that uses its weights directly, or module.forward(x), is not."
            )
        return f'The model has no module "{name}". {nearest(name, self._names)}'

    def _passes_by_place(self) -> dict[str, list[Pass]]:
        """Gather the passes of all forwards by place in the forward."""
        places: dict[str, list[Pass]] = {}
        for forward in self.forwards:
            seen: Counter[str] = Counter()
            for trace in forward._traces:
                if not trace.calls_others:
                    label = _numbered(trace.name, seen[trace.name])
                    seen[trace.name] += 1
                    places.setdefault(label, []).extend(Call(trace).passes)
        return places

    def _title(self) -> str:
        backwards = {number for trace in self._traces for number in trace.passes()}
        forwards = {trace.forward for trace in self._traces}
        return (
            f"Recording: {_count(len(self), 'call')}, "
            f"{_count(len(forwards), 'forward')}, "
            f"{_count(len(backwards), 'backward pass', 'backward passes')}"
        )

    def _fields(self) -> list[str]:
        """Return which columns of the table were kept."""
        return [name for name in COLUMNS if name in self._block.fields]

    def _table(self) -> Table:
        fields = self._fields()
        rows = [row for call in self for row in _rows(call, fields)]
        columns = ("module", "type", *fields)
        footer = [
            "output: shape; gradients: norm over all entries, - where there is none"
        ]
        if len(rows) > ROWS:
            gap = (f"... {len(rows) - ROWS} more rows", *[""] * (len(columns) - 1))
            rows[ROWS // 2 : -ROWS // 2] = [gap]
            footer.append("recording.forwards[i] prints one forward")
        return Table(self._title(), columns, rows, tuple(footer))


COLUMNS = ("output", "grad_output", "grad_input", "param_grads")


def _name_and_index(key: object) -> tuple[str, int | None]:
    match key:
        case str():
            return key, None
        case (str() as name, int() as index):
            return name, index
        case _:
            raise NoSuchCallError(
                f"recording[{key!r}]: name a call by its module, as recording['fc2'], "
                "or by module and index, as recording['fc2', 1]."
            )


def _rows(call: Call, fields: list[str]) -> list[tuple[str, ...]]:
    """Return one row for a call, or one for each of its passes."""
    head = (_numbered(call.name, call.index), call.module_type)
    if "output" in fields:
        head = (*head, shape_text(call.output))
    gradients = [field for field in fields if field != "output"]
    if not call.passes:
        return [(*head, *["-"] * len(gradients))]
    return [
        (*head, *(norm_text(getattr(pass_, field)) for field in gradients))
        for pass_ in call.passes
    ]


def _norms(field: str, passes: list[Pass]) -> list[float]:
    """Return the norm of a field in each pass that has it."""
    found = (measured_in(getattr(pass_, field)) for pass_ in passes)
    return [norm(measured) for measured in found if measured]


def _numbered(name: str, index: int) -> str:
    return shown(name) + (f" ({index})" if index else "")


def _count(number: int, one: str, many: str = "") -> str:
    return f"{number} {one if number == 1 else many or one + 's'}"
