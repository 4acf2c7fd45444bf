"""What each kind of backward hook received for a module, to print, ask and draw."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor

from gradlib.errors import UnknownKindError
from gradlib.hook_reports.call_graph import CallGraph
from gradlib.private.compiling import as_written
from gradlib.recording.in_words import shape_text
from gradlib.render import Printable, Table
from gradlib.wording import in_brief

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLUMNS = ("entry", "shape", "what it is")


@dataclass(frozen=True, eq=False)
class HookEntry(Printable):
    """One entry of what a hook received.

    Attributes:
        place: Where the hook got it, as ``"grad_input[0]"``; for a hook on a tensor,
            with the tensor's name, as ``"grad of output"`` or ``"weight.grad"``.
        value: The gradient, of any shape, or ``None``.
        what: What it is, as ``"gradient of weight, transposed"``.
    """

    place: str
    value: Tensor | None
    what: str

    def _table(self) -> Table:
        return Table("HookEntry", COLUMNS, [_row(self)])


@dataclass(frozen=True, eq=False, repr=False)
class HookKind(Printable):
    """What hooks of one kind received.

    Attributes:
        name: The method or function that sets such a hook.
        entries: What the hook received, in order; for a hook on a tensor, what the
            hook on each tensor received. Empty where it was never called.
        why: Why there are that many entries, and what would change it.
        warnings: The warnings given with this hook, and not without it.
        error: The error raised with this hook, and not without it, or ``""``.
    """

    name: str
    entries: tuple[HookEntry, ...]
    why: str
    warnings: tuple[str, ...]
    error: str

    @property
    def grad_input(self) -> tuple[HookEntry, ...]:
        """The entries of ``grad_input``."""
        return tuple(e for e in self.entries if e.place.startswith("grad_input["))

    @property
    def grad_output(self) -> tuple[HookEntry, ...]:
        """The entries of ``grad_output``."""
        return tuple(e for e in self.entries if e.place.startswith("grad_output["))

    def __repr__(self) -> str:
        """Name the kind."""
        return f"<HookKind: {self.name}>"

    def _table(self) -> Table:
        return _table_of(self)


class Kinds(dict[str, HookKind]):
    """The kinds of hooks, by name; another name is told which there are."""

    def __getitem__(self, name: object) -> HookKind:
        """Return a kind.

        Raises:
            UnknownKindError: There is no such kind; the message says which there are.
        """
        if isinstance(name, str) and (kind := self.get(name)) is not None:
            return kind
        known = ", ".join(f'"{it}"' for it in self)
        raise UnknownKindError(
            f"kinds[{in_brief(name)}]: there is no such kind of hook. There are: "
            f"{known}."
        )


@dataclass(frozen=True, eq=False, repr=False)
class HookReport(Printable):
    """What each kind of backward hook receives for one module and its inputs.

    Attributes:
        module_type: The name of the module's class.
        last_node: The autograd node of the first output tensor, as
            ``"AddmmBackward0"``; ``""`` if it has none. The old hook is set on it.
        last_node_inputs: One name for each input of its operation: that of an argument
            or parameter, or else of the node the input comes from; ``"-"`` where the
            input needs no gradient.
        kinds: What each kind of hook received, by the name of the method or function
            that sets the hook.
        notes: Remarks about the whole report.
    """

    module_type: str
    last_node: str
    last_node_inputs: tuple[str, ...]
    kinds: Mapping[str, HookKind]
    notes: tuple[str, ...]
    _graph: CallGraph

    def __repr__(self) -> str:
        """Name the module's class."""
        return f"<HookReport: {self.module_type}>"

    @as_written
    def plot(self, ax: "Axes | None" = None) -> "Figure":
        """Draw the autograd graph of the call, with each tuple where its hook gets it.

        Gradients flow upwards, from the output of the module, whose border is dashed,
        to its inputs and parameters. An outlined box is a node, the backward of one
        operation. Grey is an entry that is ``None`` or zeros, and an argument that no
        gradient reaches. A keyword argument has no entry, so no blue box. Of a large
        graph only the nodes next to the outputs, and that of the old hook, are drawn
        one by one.

        Args:
            ax: Where to draw; a new figure if left out.

        Returns:
            The figure drawn on.

        Raises:
            RecordingArgumentError: `ax` is no Axes.
        """
        # Imported only here, as importing matplotlib takes longer than all the rest.
        from gradlib.hook_reports.picture import draw

        received = {
            name: {entry.place: _in_short(entry.value) for entry in kind.entries}
            for name, kind in self.kinds.items()
        }
        return draw(self.module_type, self._graph, received, ax)

    def _tables(self) -> list[Table]:
        inputs = f"({', '.join(self.last_node_inputs)})" if self.last_node else "none"
        head = f"{self.module_type}, last autograd node: {self.last_node}{inputs}"
        return [Table(head, (), [], self.notes), *map(_table_of, self.kinds.values())]


def _table_of(kind: HookKind) -> Table:
    rows = [_row(entry) for entry in kind.entries]
    footer = (kind.why, *kind.warnings, kind.error)
    return Table(kind.name, COLUMNS if rows else (), rows, footer)


def _row(entry: HookEntry) -> tuple[str, ...]:
    return entry.place, shape_text(entry.value), entry.what


def _in_short(value: Tensor | None) -> str:
    """Return the shape of an entry, or ``"None"`` or ``"zeros"``."""
    if value is None:
        return "None"
    is_shown = value.is_nested or not value.numel() or value.any()
    return shape_text(value) if is_shown else "zeros"
