"""One recorded call of a module."""

from typing import Any

from gradlib.errors import AmbiguousCallError, CannotReplayError
from gradlib.recording.backward_pass import Pass
from gradlib.recording.call_table import (
    COLUMNS,
    SAME_TOTALS,
    leave_out_same_totals,
    leaves_of,
    rows_of,
    title_of_call,
)
from gradlib.recording.in_words import of_pass, passes_text
from gradlib.recording.kept_fields import CALL_FIELDS, PASS_FIELDS, require_kept
from gradlib.recording.notes import note
from gradlib.recording.trace import CallTrace
from gradlib.render import Printable, Table


class Call(Printable):
    """One call of one module. Tensors in it are detached and keep their value.

    Its gradients are those of its only pass, and ``None`` without one. With several
    passes they raise `AmbiguousCallError`: ask one of `passes`.
    """

    def __init__(self, trace: CallTrace) -> None:
        """Present what the recorder wrote down."""
        self._trace = trace

    def __eq__(self, other: object) -> bool:
        """Tell whether the other is the same call, of the same recording."""
        return isinstance(other, Call) and other._trace is self._trace

    def __hash__(self) -> int:
        """Agree with ``==``."""
        return hash(self._trace)

    @property
    def name(self) -> str:
        """The module's name as ``named_modules()`` gives it; the root is ``""``."""
        return self._trace.name

    @property
    def index(self) -> int:
        """Which call of this module in the block, from 0."""
        return self._trace.index

    @property
    def forward(self) -> int:
        """Which outermost forward of the block, from 0."""
        return self._trace.forward

    @property
    def module_type(self) -> str:
        """The name of the module's class."""
        return self._trace.module_type

    @property
    def args(self) -> tuple[Any, ...]:
        """The positional arguments, as they were when the call began."""
        return self._arguments()[0]

    @property
    def kwargs(self) -> dict[str, Any]:
        """The keyword arguments, as they were when the call began."""
        return self._arguments()[1]

    @property
    def output(self) -> Any:
        """What the call returned, as it was then; ``None`` where it raised."""
        require_kept(self._trace, "output")
        self._trace.block.copies.wait()
        return None if self._trace.output is None else self._trace.output.build()

    @property
    def note(self) -> str:
        """What is missing, or not this call's alone, and why; ``""`` if nothing is."""
        return note(self._trace)

    @property
    def passes(self) -> tuple[Pass, ...]:
        """What each backward pass gave this call, in the order they ran."""
        return tuple(Pass(self._trace, number) for number in self._trace.passes())

    # Typed Any, not "or None": a user who knows that a pass ran need not say so again.

    @property
    def grad_input(self) -> Any:
        """`Pass.grad_input` of the only pass."""
        return self._of_only_pass("grad_input")

    @property
    def grad_kwargs(self) -> Any:
        """`Pass.grad_kwargs` of the only pass."""
        return self._of_only_pass("grad_kwargs")

    @property
    def grad_input_total(self) -> Any:
        """`Pass.grad_input_total` of the only pass."""
        return self._of_only_pass("grad_input_total")

    @property
    def grad_kwargs_total(self) -> Any:
        """`Pass.grad_kwargs_total` of the only pass."""
        return self._of_only_pass("grad_kwargs_total")

    @property
    def grad_output(self) -> Any:
        """`Pass.grad_output` of the only pass."""
        return self._of_only_pass("grad_output")

    @property
    def param_grads(self) -> Any:
        """`Pass.param_grads` of the only pass."""
        return self._of_only_pass("param_grads")

    @property
    def param_grads_total(self) -> Any:
        """`Pass.param_grads_total` of the only pass."""
        return self._of_only_pass("param_grads_total")

    def replay(self) -> Pass:
        """`Pass.replay` of the only pass.

        Raises:
            AmbiguousCallError: There are several passes.
            CannotReplayError: There is none, too little was kept, or the call does not
                repeat; the message says why.
        """
        only = self._only_pass("replay()")
        if only is None:
            raise CannotReplayError(
                f"There is no backward pass to compute again: {self.note}."
            )
        return only.replay()

    def __repr__(self) -> str:
        """Name the call."""
        return f"<{title_of_call(self._trace)}>"

    def _of_only_pass(self, field: str) -> Any:
        require_kept(self._trace, PASS_FIELDS[field])
        only = self._only_pass(field)
        return None if only is None else getattr(only, field)

    def _only_pass(self, asked: str) -> Pass | None:
        passes = self.passes
        if len(passes) > 1:
            raise AmbiguousCallError(
                f"{title_of_call(self._trace)} took part in {len(passes)} backward "
                f"passes. Ask one of them: call.passes[i].{asked}, i from 0 to "
                f"{len(passes) - 1}."
            )
        return passes[0] if passes else None

    def _arguments(self) -> Any:
        require_kept(self._trace, "args")
        self._trace.block.copies.wait()
        return self._trace.inputs.build()

    def _table(self) -> Table:
        rows = rows_of(leaves_of(self, CALL_FIELDS, self._trace))
        left_out = 0
        for i, pass_ in enumerate(self.passes):
            shown = leaves_of(pass_, PASS_FIELDS, self._trace)
            left_out += leave_out_same_totals(shown)
            rows += rows_of(shown, of_pass(i, len(self.passes)))
        title = f"{title_of_call(self._trace)}: {self.module_type}"
        footer = [SAME_TOTALS] if left_out else []
        if len(self.passes) > 1:
            numbers = passes_text([it.backward for it in self.passes])
            footer.append(f"passes: backward {numbers} of the block")
        if self.note:
            footer.append(f"note: {self.note}")
        return Table(title, COLUMNS, rows, tuple(footer))
