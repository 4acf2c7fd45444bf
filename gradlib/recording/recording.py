"""What was recorded, and the questions one can ask of it."""

from collections.abc import Iterator, Mapping, Sequence
from threading import Lock
from typing import TYPE_CHECKING, Any, cast

import numpy

from gradlib import storage
from gradlib.errors import NotStorableError, RecordingArgumentError
from gradlib.private.compiling import as_written
from gradlib.recording import saving
from gradlib.recording.call import Call
from gradlib.recording.compare import compare
from gradlib.recording.comparison import Comparison
from gradlib.recording.data_frame import data_frame
from gradlib.recording.difference import Tolerance
from gradlib.recording.no_call import (
    no_call_of,
    no_call_with,
    no_name,
    several_calls_of,
)
from gradlib.recording.nonfinite import Nonfinite, first_nonfinite
from gradlib.recording.pairing import require_names
from gradlib.recording.table import table_of, title_of
from gradlib.recording.trace import NOT_CHOSEN, Block, CallTrace
from gradlib.recording.verification import Verification
from gradlib.recording.verify import verify
from gradlib.render import Printable, Table

if TYPE_CHECKING:
    from os import PathLike

    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    # Its types come as a package of their own, which only this line would need.
    from pandas import DataFrame  # pyright: ignore (it has no stubs)

_SORTING = Lock()


class Recording(Printable):
    """The calls recorded in a block, in the order they began.

    ``recording["fc2"]`` is the call of `fc2`, ``recording["fc2", 1]`` one of several;
    also ``"fc2" in recording``, ``len(recording)`` and iteration. Inside the block it
    holds what was recorded so far.
    """

    def __init__(
        self, block: Block, names: Mapping[str, str], traces: Sequence[CallTrace]
    ) -> None:
        """Present what the recorder wrote down.

        Args:
            block: What all calls have in common.
            names: Every name the model has for a module, with the name it is recorded
                under. They differ for a module that stands in two places.
            traces: The calls. The recorder goes on adding to them.
        """
        self._block = block
        self._names = names
        self._recorded = traces
        # By attribute: how many calls were sorted by it so far, and these by its value.
        self._known: dict[str, tuple[int, dict[Any, list[CallTrace]]]] = {}
        self._forwards: tuple[Recording, ...] = ()

    @property
    def _traces(self) -> Sequence[CallTrace]:
        """What was recorded so far, after waiting for copies under way."""
        self._block.copies.wait()
        return self._recorded

    @property
    def forwards(self) -> "tuple[Recording, ...]":
        """The outermost forwards of the block, each a recording of its own."""
        parts, made = self._sorted("forward"), self._forwards
        if len(parts) > len(made):
            new = tuple(parts.values())[len(made) :]
            made += tuple(Recording(self._block, self._names, it) for it in new)
            self._forwards = made
        return made

    def calls(self, name: str) -> tuple[Call, ...]:
        """Return every call of one module.

        Args:
            name: The module's name as ``named_modules()`` gives it.

        Raises:
            NoSuchCallError: The model has no such module, or it was not called.
        """
        if not isinstance(cast(object, name), str):
            raise no_name(name)
        return tuple(map(Call, self._called(name)))

    def __getitem__(self, key: str | tuple[str, int]) -> Call:
        """Return the call of a module, or with ``name, index`` one of several.

        Raises:
            NoSuchCallError: There is no such call; the message says why.
            AmbiguousCallError: The module was called several times; the message says
                how to name one call.
        """
        name, index = _name_and_index(key)
        found = self._called(name)
        if index is None:
            if len(found) > 1:
                raise several_calls_of(name, found)
            return Call(found[0])
        if index < len(found) and found[index].index == index:
            return Call(found[index])  # without a look at all the others
        for trace in found:
            if trace.index == index:
                return Call(trace)
        raise no_call_with(name, index, found)

    def __contains__(self, key: object) -> bool:
        """Tell whether it has this call, one of this name, or one ``(name, index)``."""
        match key:
            case Call():
                return any(key == it for it in self)
            case str():
                return bool(self._find(key))
            case (str() as name, int() | numpy.integer() as index):
                return any(it.index == index for it in self._find(name))
            case _:
                return False

    def __iter__(self) -> Iterator[Call]:
        """Go through the calls in the order they began."""
        return map(Call, tuple(self._traces))

    def __reversed__(self) -> Iterator[Call]:
        """Go through the calls from the last one that began to the first."""
        return map(Call, tuple(self._traces)[::-1])

    def __len__(self) -> int:
        """Return the number of calls."""
        return len(self._traces)

    def __repr__(self) -> str:
        """Count what was recorded."""
        return f"<{title_of([*self], self._block.fields)}>"

    @as_written
    def plot(self, kind: str = "flow", ax: "Axes | None" = None) -> "Figure":
        """Draw the gradients, module by module, the first on top.

        Of a module that calls other modules only ``param_grads``, the gradients of its
        own parameters, are drawn, if there are any. A module that a forward calls
        several times has several rows; ``drop (1)`` is its second call in each forward.
        The kinds:

        - ``"flow"``: how large the gradients are. ``param_grads`` is the norm over all
          parameters of a module, ``grad_input`` that over all arguments, keyword
          arguments included. If a module has several passes, the line is their
          median, and the band reaches from the smallest to the largest. Both leave out
          what has no place on a logarithmic axis: a gradient of zeros, or one with NaN
          or inf, puts a mark beside its module. A total is drawn where it visibly
          differs from the share.
        - ``"steps"``: a column for each forward of the block; the colour is the norm of
          ``grad_output``, and the largest if a forward has several passes.
        - ``"histogram"``: the distribution of the magnitudes of all entries of
          ``grad_output``.

        If ``grad_output`` was not kept, the last two show ``grad_input`` or
        ``param_grads``.

        Args:
            kind: Which picture.
            ax: Where to draw; by default a new figure.

        Returns:
            The figure drawn on.

        Raises:
            UnknownKindError: There is no such `kind`.
            RecordingArgumentError: `ax` is no Axes.
            NotKeptError: What the picture shows was not kept: no gradients at all, or,
                with `reduce`, nothing that has a norm or, for a histogram, entries.
        """
        # Only here: importing matplotlib takes longer than all the rest.
        from gradlib.recording import pictures

        return pictures.draw(kind, tuple(self._traces), self._block.fields, ax)

    @as_written
    def first_nonfinite(self) -> Nonfinite | None:
        """Return where NaN or inf first appeared, forward or backward.

        NaN or inf in a call's arguments counts only if it is in the output too, so the
        -inf of an attention mask does not. It works with `tensor_stats` too, but then
        without looking at the weights. What was not kept is not looked at: with
        ``keep=["output"]`` no gradient is, nor what a `reduce` of your own leaves out.

        Returns:
            The innermost call in which it appeared; ``None`` if it is nowhere in what
            was kept.

        Raises:
            NotKeptError: The outputs were not kept.

        Example:
            ```python
            import torch
            from torch import nn

            import gradlib


            class Root(nn.Module):
                def forward(self, x):
                    return x.sqrt()


            model = nn.Sequential(nn.ReLU(), Root(), nn.Linear(2, 1))
            x = torch.tensor([[4.0, -1.0]], requires_grad=True)
            with gradlib.record(model) as recording:
                model(x).sum().backward()

            found = recording.first_nonfinite()
            print(found.name, found.direction, found.field)
            #> 1 backward grad_input[0]
            ```
        """
        return first_nonfinite(self._traces)

    @as_written
    def verify(
        self,
        *,
        numerical: bool = False,
        rtol: float | None = None,
        atol: float | None = None,
    ) -> Verification:
        """Replay each call, and compare with what was recorded.

        Each starts from the recorded arguments and ``grad_output``; see `Pass.replay`.
        The output and this call's shares are compared. A call disagrees if one of these
        holds; the reason says which, where that is known:

        - its forward or its backward does not repeat, as one that draws random numbers;
        - it computes its gradient in more ways than one;
        - a weight or buffer of it was written to before the backward, unseen by
          autograd;
        - gradients reached it otherwise than through what it returned or left behind,
          as through the output of a module inside that a hook has handed out.

        What a call left behind in an attribute, a buffer or a container that it was
        given, as a recurrent cell leaves its state for the next call, is replayed with
        the gradient that came through it. Where gradients came through what the call
        put elsewhere, as into a global list, it is not compared, nor is a pass that
        began inside of a call and gave its output no gradient, nor a call whose graph a
        call around it has hooked by ``grad_fn.register_hook``: `skipped` names these.
        Long work shows its progress on a terminal.

        **Finite differences.** `numerical` finds a backward that is wrong, even on
        purpose, as with a ``detach()``. It takes two forwards in float64 along each of
        a few random directions, for all inputs and own parameters that require grad at
        once, and for parts of them where there may be an error, to name the wrong one.
        It looks beside the recorded point too, which may be at a kink: one point
        without an error is enough. Other parameters, as those that attention takes from
        its ``out_proj``, are named in the result's ``unchecked``.

        A VJP in a narrower dtype is compared with that in float64. This finds a
        backward that is wrong in float32 alone, or for an expanded ``grad_output``, by
        more than a tenth and more than rounding. The output has to be the same in both
        dtypes, also with small numbers in place of zeros, and the call must draw no
        random numbers: in float64 it draws others.

        It finds torch's own faults too: ``nn.CTCLoss``, whose backward takes its input
        for normalised log-probabilities; ``nn.Embedding`` with `scale_grad_by_freq`, or
        with a `max_norm` that it applies; functions of symmetric matrices, as
        ``torch.linalg.eigh``, whose gradients are symmetric too; and ``spectral_norm``
        in training, which takes the vectors of its power iteration for constants. Only
        the row of `padding_idx`, which gets no gradient, is left out. What a tensor
        hook on the output of a call does, as in an implicit layer, is in
        ``grad_output`` and no part of the VJP, so such a layer disagrees.

        Agreement is no proof. In trials it found every gradient with random errors of a
        hundredth of its norm; of those with a thousandth, it found nearly every one in
        small modules and half of those with many entries. A ``detach()`` between the
        modules inside a call is seen only through an input that requires grad, so give
        the model such an `x`. The gradient of a gradient is not checked. In a test,
        also assert ``torch.autograd.gradcheck`` in float64 and, for second derivatives,
        ``torch.autograd.gradgradcheck``.

        Args:
            numerical: Whether to check each call's VJP against finite differences too,
                as said above.
            rtol: How large the difference may be, as a part of the value: root mean
                squares over all entries. By default, by dtype, the rtol and atol of
                ``torch.testing.assert_close`` together. Finite differences may differ
                by this much too, and by 1e-4 in any case.
            atol: How large the root mean square of the difference may be on top, but
                not from finite differences.

        Returns:
            What disagrees, innermost calls only, and what could not be replayed.

        Raises:
            RecordingArgumentError: `rtol` or `atol` is no number, or a negative one; or
                `numerical` is neither true nor false.
            CannotReplayError: No call can be replayed, as with `reduce`.

        Example:
            ```python
            import torch
            from torch import nn

            import gradlib


            class Double(torch.autograd.Function):
                @staticmethod
                def forward(ctx, x):
                    return 2 * x

                @staticmethod
                def backward(ctx, grad_output):
                    return grad_output  # should be 2 * grad_output


            class Doubled(nn.Module):
                def forward(self, x):
                    return Double.apply(x)


            torch.manual_seed(0)
            model = nn.Sequential(nn.Linear(3, 3), Doubled(), nn.Linear(3, 1))
            with gradlib.record(model) as recording:
                model(torch.ones(2, 3)).sum().backward()

            print(recording.verify())
            #> Verification: 4 of 4 calls agree
            print(recording.verify(numerical=True))
            #> Verification: 2 of 4 calls agree
            #> module  field          error  reason
            #> 1       grad_input[0]  0.5    finite differences disagree
            #> not checked: 1 call, with a disagreement inside
            ```
        """
        return verify(
            self._traces, numerical=numerical, tolerance=Tolerance(rtol, atol)
        )

    @as_written
    def compare(
        self,
        other: "Recording",
        *,
        names: Mapping[str, str] | None = None,
        rtol: float | None = None,
        atol: float | None = None,
    ) -> Comparison:
        """Find where two runs first differ.

        Values are compared in the order in which they were computed: a call's arguments
        when it begins, its output when it ends, and backwards in a pass. So the result
        is the innermost call whose inputs agree and whose output does not. Calls are
        matched by name, and calls of one name by their order. Gradients are compared by
        their shares, not their totals: a penalty on a weight, in one of two losses,
        belongs to no call.

        Args:
            other: The recording of another model, dtype, device or run.
            names: The names in `other` of modules that have other names here:
                ``{"fc1": "0"}``.
            rtol: How large the difference may be, as a part of the value: root mean
                squares over all entries. By default, by dtype, the rtol and atol of
                ``torch.testing.assert_close`` together, those of the coarsest dtype in
                either recording, autocast's included. Where the difference has grown
                little by little from call to call, as rounding does, it may be up to
                ten times that.
            atol: How large the root mean square of the difference may be on top.

        Returns:
            Where they first differ, every error, which it can also draw, and the calls
            that only one of them has.

        Raises:
            RecordingArgumentError: `other` is no recording, `names` does not pair its
                modules with those of this one, or `rtol` or `atol` is no number, or a
                negative one.

        Example:
            ```python
            import copy

            import torch
            from torch import nn

            import gradlib

            torch.manual_seed(0)
            model = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2))
            changed = copy.deepcopy(model)
            nn.init.zeros_(changed[2].bias)
            with gradlib.record(model) as recording, gradlib.record(changed) as other:
                for each in (model, changed):
                    each(torch.ones(4, 3)).sum().backward()

            print(recording.compare(other))
            #> Comparison of 4 calls: they part first at
            #> module  direction  field   error  reason
            #> 2       forward    output  0.82
            ```
        """
        if not isinstance(cast(object, other), Recording):
            raise RecordingArgumentError(
                "compare(other): other must be a Recording, but it is of type "
                f"{type(other).__name__}. Record the other run, too."
            )
        known = ([*dict.fromkeys(it.name for it in each)] for each in (self, other))
        pairs = require_names({} if names is None else names, *known)
        # Another thread may add to them meanwhile.
        traces, others = tuple(self._traces), tuple(other._traces)
        return compare(traces, others, pairs, Tolerance(rtol, atol))

    @as_written
    def to_frame(self) -> "DataFrame":
        """Return a pandas data frame with a row for each call and pass.

        The columns are the call and the pass, the shape of the output, and the norms of
        the output and of each kind of gradient over all entries, ``NaN`` if there is
        none; ``grad_input`` includes keyword arguments. If `reduce` gave plain numbers,
        the columns hold these. What was not kept has no column.

        Raises:
            MissingPackageError: pandas is not installed.
        """
        return data_frame(self, self._block.fields)

    @as_written
    def save(self, path: "str | PathLike[str]") -> None:
        """Write what was recorded into a file, for `load_recording`.

        An existing file is replaced only when the new one is complete.
        It is a safetensors file, which holds equal tensors once and has a checksum.

        Args:
            path: The file, as ``"run.safetensors"``.

        Raises:
            RecordingArgumentError: `path` is no path.
            OSError: A file cannot be written there.
            NotStorableError: A tensor is of a kind that a file cannot hold, as a nested
                or quantized one, a value is nested too deep, or at `path` is something
                that is no regular file.
        """
        saving.require_path(path)
        content = saving.plain(self._block, self._names, self._traces)
        try:
            storage.save(path, content, saving.CLASSES)
        except NotStorableError as error:
            if place := saving.refused_in(self._traces):
                raise NotStorableError(f"{place}: {error.args[0]}") from error
            raise

    def _find(self, name: str) -> list[CallTrace]:
        return self._sorted("name").get(self._names.get(name, name), [])

    def _called(self, name: str) -> list[CallTrace]:
        """Return the calls of a module, or raise `NoSuchCallError` if it has none."""
        if not (found := self._find(name)):
            called = self._sorted("name").keys()
            raise no_call_of(name, self._names, self._block.left_out, called)
        return found

    def _sorted(self, attribute: str) -> dict[Any, list[CallTrace]]:
        """Return the calls by one of their attributes.

        New calls are added to the same lists: to read each step of a block, while it
        goes on, does not cost a look at all steps before it.
        """
        traces = self._traces
        with _SORTING:
            count, known = self._known.get(attribute, (0, {}))
            for trace in (new := traces[count:]):  # another thread may add to them
                known.setdefault(getattr(trace, attribute), []).append(trace)
            self._known[attribute] = count + len(new), known
            return known

    def _table(self) -> Table:
        block = self._block
        unseen = [
            name
            for name, why in block.left_out.items()
            if why != NOT_CHOSEN and not self._find(name)
        ]
        return table_of([*self], block.fields, unseen, is_reduced=block.is_reduced)


def _name_and_index(key: object) -> tuple[str, int | None]:
    match key:
        case str():
            return key, None
        case (str() as name, int() | numpy.integer() as index):
            return name, int(index)
        case _:
            raise no_name(key)
