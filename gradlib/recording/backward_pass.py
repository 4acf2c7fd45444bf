"""What one backward pass gave one recorded call."""

from collections.abc import Mapping
from typing import Any

from gradlib.errors import CannotReplayError
from gradlib.private.compiling import as_written
from gradlib.recording.call_table import (
    COLUMNS,
    SAME_TOTALS,
    leave_out_same_totals,
    leaves_of,
    rows_of,
    title_of_call,
)
from gradlib.recording.flow import Key
from gradlib.recording.gaps import agree
from gradlib.recording.kept_fields import PASS_FIELDS, is_kept, require_kept
from gradlib.recording.replay import replay
from gradlib.recording.replayable import label
from gradlib.recording.trace import CallTrace
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

    @as_written
    def replay(self) -> "Pass":
        """Compute the call and its VJP again.

        It starts from the recorded arguments, ``grad_output``, and what came back
        through a state that the call left behind; with the weights, buffers,
        attributes, modes, random state of torch and autocast the call had, and the
        autocast of the backward pass. Attributes are as they were if they are plain
        values, tensors, arrays of up to a megabyte, random generators, or lists, dicts,
        sets and partials of up to a thousand items, three deep. Any other object is as
        it is now, and so is a tensor of more than 65,536 entries that was overwritten
        since.

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
            and is_kept(self._call, "output")
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
        return f"<{again}backward pass {self.backward} of {title_of_call(self._call)}>"

    def _inputs(self, gathered: str) -> Any:
        return self._call.inputs.filled(self._gradients("grad_input", gathered))

    def _gradients(self, field: str, gathered: str) -> Mapping[Any, Any]:
        if gathered == "shares" and self._replayed is not None:
            return self._replayed
        require_kept(self._call, field)
        return self._call.gradients(gathered, self._backward)

    def _table(self) -> Table:
        shown = leaves_of(self, PASS_FIELDS, self._call)
        footer = (SAME_TOTALS,) if leave_out_same_totals(shown) else ()
        return Table(repr(self)[1:-1], COLUMNS, rows_of(shown), footer)


def with_keywords(pass_: Pass, field: str) -> Any:
    """Return a field of a pass; ``grad_input`` with that of the keyword arguments."""
    gathered = {"grad_input": "shares", "grad_input_total": "totals"}.get(field)
    own: Any = pass_
    return getattr(pass_, field) if gathered is None else own._inputs(gathered)
