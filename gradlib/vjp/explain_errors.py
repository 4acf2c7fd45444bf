"""Explanations as notes on the errors of autograd itself."""

from collections.abc import Generator
from contextlib import contextmanager, suppress
from dataclasses import replace

from torch import Tensor

from gradlib.vjp.arguments import Arguments
from gradlib.vjp.calls import innermost_call, raised_by_hook
from gradlib.vjp.cases import CASES
from gradlib.vjp.diagnose import diagnose
from gradlib.vjp.diagnosis import Diagnosis
from gradlib.vjp.raised import explain_raised
from gradlib.vjp.vector_lists import are_rows
from gradlib.vjp.wordings import code_of

# What only the run itself can show: the arguments may be wrong as well.
_ONLY_RAISED = ("GL111", "GL112")


@contextmanager
def explain_errors() -> Generator[None]:
    """Add an explanation to errors of autograd, as a note below their message.

    For code that calls torch itself: ``loss.backward()``, ``torch.autograd.grad``, or
    anything that does. The note is what `grad` would say, with the same code, and the
    names that the code gives to tensors. The error stays what it is, with its type,
    message and traceback. It gets one note, however many blocks it leaves, and other
    errors get none.

    It is also a decorator: write ``@gradlib.explain_errors()`` above a function.

    Raises:
        Exception: What the block raises.

    Example:
        ```python
        import torch

        import gradlib

        x = torch.tensor([1.0, 2.0, 3.0], requires_grad=True)
        losses = x**2
        try:
            with gradlib.explain_errors():
                losses.backward()
        except RuntimeError as error:
            message, note = str(error), error.__notes__[0]
        print(message)
        #> grad can be implicitly created only for scalar outputs
        print(note)
        #>
        #> [GL101] The output (`losses`) has shape [3], and no gradient was given.
        #>
        #> autograd sums the gradients of the output's entries, each times its weight in
        #> v. Only an output with a single entry needs no v: its weight is one.
        #>
        #> A loss is one number: take the mean() of its entries, or the sum(). For
        #> anything else, pass a weight for each entry: backward(v).
        #>
        #>     losses.mean().backward()
        #>
        #> More in gradlib's documentation: docs/errors/GL101.md
        ```
    """
    try:
        yield
    except Exception as error:
        if not _is_explained(error):
            with suppress(Exception):  # an error must get through, explained or not
                if (found := _explanation(error)) is not None:
                    error.add_note(f"\n{found}")
        raise


def _is_explained(error: Exception) -> bool:
    """Tell whether a block inside this one has explained the error."""
    return any(note.startswith("\n[GL") for note in getattr(error, "__notes__", []))


def _explanation(error: Exception) -> Diagnosis | None:
    """Return what an error of autograd means; ``None`` for any other error.

    Where torch made the call, as in torch.func.vjp, code would be in torch's names,
    which mean nothing where the caller would write it: then there is none.
    """
    arguments = innermost_call(error)
    found = _meant(error, arguments)
    if found is None or arguments is None or arguments.site is not None:
        return found
    return replace(found, fix="")


def _meant(error: Exception, arguments: Arguments | None) -> Diagnosis | None:
    """Return the same, with code in any case."""
    if arguments is not None and raised_by_hook(error):
        return None
    is_torchs = isinstance(error, RuntimeError)
    code = code_of(str(error)) if is_torchs else None
    if arguments is not None and code not in _ONLY_RAISED:
        # torch refuses some calls by accident, in the words of whatever fails first.
        found = diagnose(_as_torch_takes_it(arguments))
        if found is not None and _is_refused(found, code):
            return found
    return explain_raised(error, arguments) if is_torchs else None


def _as_torch_takes_it(arguments: Arguments) -> Arguments:
    """Return a call without the vectors that are too many, which torch drops.

    It does not get there with what is no tensor, as a list of numbers, nor with rows
    where it wants a batch of them.
    """
    vectors = arguments.grad_outputs
    values = vectors.values[: len(arguments.outputs.values)]
    are_no_batch = arguments.is_grads_batched and are_rows(arguments)
    if are_no_batch or not all(it is None or isinstance(it, Tensor) for it in values):
        return arguments
    return replace(arguments, grad_outputs=replace(vectors, values=values))


def _is_refused(found: Diagnosis, code: str | None) -> bool:
    """Tell whether torch refuses what was found, in the words of that case or not.

    There are no more vectors than outputs, so GL103 is too few.
    """
    refuses = found.is_refused or CASES[found.code].torch_refuses
    return refuses or found.code in (code, "GL103")
