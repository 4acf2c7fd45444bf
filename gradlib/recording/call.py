"""One recorded call of a module, and what each backward pass gave it."""

from collections.abc import Mapping
from typing import Any

from gradlib.errors import AmbiguousCallError, CannotReplayError, NotKeptError
from gradlib.recording.call_table import (
    COLUMNS,
    SAME_TOTALS,
    leave_out_same_totals,
    leaves_of,
    rows_of,
)
from gradlib.recording.gaps import agree
from gradlib.recording.in_words import of_pass, passes_text, shown
from gradlib.recording.notes import note
from gradlib.recording.replay import replay
from gradlib.recording.replayable import label
from gradlib.recording.trace import FIELDS, CallTrace, Key
from gradlib.render import Printable, Table


class Pass(Printable):
    """What one backward pass gave one call.

    A gradient has the shape and dtype of the tensor it belongs to. A name without
    ``_total`` is this call's share: what flowed through this call alone. One with
    ``_total`` is the gradient of the tensor over all its uses. The two differ if the
    tensor has other uses. What comes back through the graph that an earlier pass with
    ``create_graph=True`` made in this call, as for a gradient penalty, is a part of its
    share.

    Example:
        ```python
        import torch
        from torch import nn

        import gradlib


        class Residual(nn.Module):
            def __init__(self):
                super().__init__()
                self.branch = nn.Linear(1, 1, bias=False)
                nn.init.constant_(self.branch.weight, 2)

            def forward(self, x):
                return x + self.branch(x)


        model = Residual()
        x = torch.ones(1, 1, requires_grad=True)
        with gradlib.record(model) as recording:
            model(x).backward()

        call = recording["branch"]
        print("share:", call.grad_input, "total:", call.grad_input_total)
        #> share: (tensor([[2.]]),) total: (tensor([[3.]]),)
        ```
    """

    def __init__(
        self,
        call: CallTrace,
        backward: int,
        replayed: Mapping[Key, Any] | None = None,
    ) -> None:
        """Present what the recorder wrote down, or a replay computed."""
        self._call = call
        self._backward = backward
        self._replayed = replayed

    @property
    def backward(self) -> int:
        """Which backward pass of the block this was, from 0."""
        return self._backward

    @property
    def grad_input(self) -> tuple[Any, ...]:
        """Gradients of ``args``, in their structure: this call's share.

        ``None`` where there is none.
        """
        return self._inputs("shares")[0]

    @property
    def grad_kwargs(self) -> dict[str, Any]:
        """Gradients of ``kwargs``, in their structure: this call's share."""
        return self._inputs("shares")[1]

    @property
    def grad_input_total(self) -> tuple[Any, ...]:
        """Gradients of the tensors in ``args``, all their uses together.

        This is what ``x.grad`` would be. It differs from ``grad_input`` where the
        tensor is used outside this call too, as on a residual branch.
        """
        return self._inputs("totals")[0]

    @property
    def grad_kwargs_total(self) -> dict[str, Any]:
        """Gradients of the tensors in ``kwargs``, all their uses together."""
        return self._inputs("totals")[1]

    @property
    def grad_output(self) -> Any:
        """Gradients of the output, in its structure, as they arrived at this call.

        A single tensor gives a 1-tuple, as a full backward hook gets it.
        """
        grads = self._gradients("grad_output", "outputs")
        output = self._call.output
        if output is None:
            return ()
        filled = output.filled(grads)
        return (filled,) if output.is_leaf() else filled

    @property
    def param_grads(self) -> dict[str, Any]:
        """Gradients of the module's own parameters, by name: this call's share.

        The share includes what the calls inside this one do. So if a module inside owns
        a parameter too, the inner call's share is in both; for every other parameter,
        the shares of all calls add up to ``.grad``.
        """
        shares = self._gradients("param_grads", "shares")
        return {name: shares.get(name) for name in self._call.parameters}

    @property
    def param_grads_total(self) -> dict[str, Any]:
        """Gradients of the module's own parameters, all their uses together.

        This is what the pass added to ``.grad``. Where another tensor was put in place
        of a parameter, as ``torch.func.functional_call`` does, it is the gradient of
        that tensor.
        """
        totals = self._gradients("param_grads", "totals")
        return {name: totals.get(name) for name in self._call.parameters}

    def replay(self) -> "Pass":
        """Compute the call and its VJP again.

        It starts from the recorded arguments, ``grad_output``, and what came back
        through a state that the call left behind; with the weights, buffers,
        attributes, modes, random state of torch and autocast the call had, and the
        autocast of the backward pass. Attributes are as they were if they are plain
        values, tensors, arrays of up to a megabyte, random generators, or lists, dicts
        and sets of up to a thousand items, three deep. Any other object is as it is
        now, and so is a tensor of more than 65,536 entries that was overwritten since.

        The model stays as it is, and no recording sees the replay. But the model's code
        and hooks run: what they do elsewhere, to a list outside or to an object of
        another class, they do again. A replay works inside the block too.

        A gradient that entered the call otherwise than through its output, or a tensor
        that it left in an attribute, a buffer or a container that it was given, is not
        in it. It may have come through the output of a module inside, or through a view
        that the call overwrites and others use.

        Returns:
            A pass with the shares computed anew; its ``grad_output`` and the totals are
            the recorded ones.

        Raises:
            CannotReplayError: Too little was kept, the call was given an object that
                may change, as a cache, or it does not repeat; the message says why.

        Example:
            ```python
            import torch
            from torch import nn

            import gradlib

            torch.manual_seed(0)
            model = nn.Sequential(nn.Linear(3, 2), nn.Dropout(0.5))
            with gradlib.record(model) as recording:
                model(torch.ones(4, 3)).sum().backward()

            call = recording["0"]
            print(call.param_grads["bias"])
            #> tensor([4., 6.])
            print(call.replay().param_grads["bias"])
            #> tensor([4., 6.])
            ```
        """
        replayed = replay(self._call, self._backward)
        recorded = self._call.output
        if replayed.shares is None or (
            recorded is not None
            and _is_kept(self._call, "output")
            and not agree(recorded.build(), replayed.output.build())
        ):
            raise CannotReplayError(
                f"{label(self._call)} does not repeat: it returned something else this "
                "time. It depends on more than its arguments, weights, buffers and "
                "torch's random state; the recorded gradients stand."
            )
        return Pass(self._call, self._backward, replayed.shares)

    def __repr__(self) -> str:
        """Name the pass and its call."""
        again = "" if self._replayed is None else "replay of "
        return f"<{again}backward pass {self.backward} of {_title(self._call)}>"

    def _inputs(self, gathered: str) -> Any:
        return self._call.inputs.filled(self._gradients("grad_input", gathered))

    def _gradients(self, field: str, gathered: str) -> Mapping[Any, Any]:
        if gathered == "shares" and self._replayed is not None:
            return self._replayed
        _require_kept(self._call, field)
        return self._call.gradients(gathered, self._backward)

    def _table(self) -> Table:
        shown = leaves_of(self, PASS_FIELDS, self._call)
        footer = (SAME_TOTALS,) if leave_out_same_totals(shown) else ()
        return Table(repr(self)[1:-1], COLUMNS, rows_of(shown), footer)


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
        _require_kept(self._trace, "output")
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
        return f"<{_title(self._trace)}>"

    def _of_only_pass(self, field: str) -> Any:
        _require_kept(self._trace, PASS_FIELDS[field])
        only = self._only_pass(field)
        return None if only is None else getattr(only, field)

    def _only_pass(self, asked: str) -> Pass | None:
        passes = self.passes
        if len(passes) > 1:
            raise AmbiguousCallError(
                f"{_title(self._trace)} took part in {len(passes)} backward passes. "
                f"Ask one of them: call.passes[i].{asked}, i from 0 to "
                f"{len(passes) - 1}."
            )
        return passes[0] if passes else None

    def _arguments(self) -> Any:
        _require_kept(self._trace, "args")
        self._trace.block.copies.wait()
        return self._trace.inputs.build()

    def _table(self) -> Table:
        rows = rows_of(leaves_of(self, CALL_FIELDS, self._trace))
        left_out = 0
        for i, pass_ in enumerate(self.passes):
            shown = leaves_of(pass_, PASS_FIELDS, self._trace)
            left_out += leave_out_same_totals(shown)
            rows += rows_of(shown, of_pass(i, len(self.passes)))
        title = f"{_title(self._trace)}: {self.module_type}"
        footer = [SAME_TOTALS] if left_out else []
        if len(self.passes) > 1:
            numbers = passes_text([it.backward for it in self.passes])
            footer.append(f"passes: backward {numbers} of the block")
        if self.note:
            footer.append(f"note: {self.note}")
        return Table(title, COLUMNS, rows, tuple(footer))


# What a call and a pass show, each with the field in `keep` that includes it.
CALL_FIELDS = {"args": "args", "kwargs": "args", "output": "output"}
PASS_FIELDS = {
    "grad_input": "grad_input",
    "grad_kwargs": "grad_input",
    "grad_input_total": "grad_input",
    "grad_kwargs_total": "grad_input",
    "grad_output": "grad_output",
    "param_grads": "param_grads",
    "param_grads_total": "param_grads",
}
TRAVELS_WITH = CALL_FIELDS | PASS_FIELDS


def _is_kept(call: CallTrace, field: str) -> bool:
    return field in call.block.fields


def _require_kept(call: CallTrace, field: str) -> None:
    if not _is_kept(call, field):
        kept = tuple(name for name in FIELDS if _is_kept(call, name))
        _, *travels = (name for name, it in TRAVELS_WITH.items() if it == field)
        too = f", nor {', '.join(travels)}" if travels else ""
        raise NotKeptError(
            f'"{field}" was not kept{too}: record(..., keep={kept}) left it out. '
            f'Record again, with "{field}" in keep.'
        )


def _title(trace: CallTrace) -> str:
    return f"{shown(trace.name)}, call {trace.index} in forward {trace.forward}"


def with_keywords(pass_: Pass, field: str) -> Any:
    """Return a field of a pass; ``grad_input`` with that of the keyword arguments."""
    gathered = {"grad_input": "shares", "grad_input_total": "totals"}.get(field)
    own: Any = pass_
    return getattr(pass_, field) if gathered is None else own._inputs(gathered)
