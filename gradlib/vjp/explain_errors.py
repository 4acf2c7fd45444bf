"""Explanations as notes on the errors of autograd itself."""

from collections.abc import Callable, Iterator
from contextlib import ContextDecorator, suppress
from dataclasses import replace
from inspect import CO_ASYNC_GENERATOR, CO_COROUTINE, CO_GENERATOR
from types import TracebackType
from typing import Any, cast

from torch import Tensor

from gradlib.errors import GradlibError, RecordingArgumentError
from gradlib.vjp.arguments import Arguments
from gradlib.vjp.cases import CASES
from gradlib.vjp.diagnose import diagnose
from gradlib.vjp.diagnosis import Diagnosis
from gradlib.vjp.raised import explain_raised
from gradlib.vjp.tracebacks import ONLY_RAISED, innermost_call, raised_by_hook
from gradlib.vjp.vector_lists import are_rows
from gradlib.vjp.wordings import code_of
from gradlib.wording import in_brief

_RUNS_LATER = CO_ASYNC_GENERATOR | CO_COROUTINE | CO_GENERATOR


class Explaining(ContextDecorator):
    """What `explain_errors` returns. It has no state, so any blocks may share it."""

    def __call__(self, func: Callable[..., Any]) -> Any:
        """Return the function with its errors explained."""
        if isinstance(cast(object, func), type) or not callable(func):
            raise RecordingArgumentError(
                f"explain_errors() is above {in_brief(func)}, of type "
                f"{type(func).__name__}. It goes above a function: in a class above "
                "each method, and below @classmethod and @property."
            )
        code = getattr(func, "__code__", None)
        if code is not None and code.co_flags & _RUNS_LATER:
            raise RecordingArgumentError(
                f"explain_errors() is above {func.__name__}, whose body runs after the "
                "call, as that of each async function and generator: write `with "
                "gradlib.explain_errors():` inside it."
            )
        return super().__call__(func)

    def __enter__(self) -> None:
        """Do nothing: only an error that leaves the block is explained."""

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Explain the error that leaves the block, and let it go on."""
        for it in _shown_with(error) if isinstance(error, Exception) else ():
            with suppress(Exception):  # an error must get through, explained or not
                if not _is_explained(it) and (found := _explanation(it)) is not None:
                    it.add_note(f"\n{found}")


def explain_errors() -> Explaining:
    """Add an explanation to errors of autograd, as a note below their message.

    Use it around ``loss.backward()``, ``torch.autograd.grad``, or anything that calls
    them. The note says what `grad` would say, with the same error code, and with the
    names that your code gives to tensors. The error keeps its type, message and
    traceback. It gets one note, however many blocks it leaves; other errors get none.
    Errors in an ``ExceptionGroup``, and those that another was raised from, are
    explained too.

    It is also a decorator: write ``@gradlib.explain_errors()`` above a function.

    Returns:
        A context manager and decorator, which can be used any number of times.

    Raises:
        Exception: What the block raises.
        RecordingArgumentError: It decorates an async function, a generator, a class or
            what is no function.

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
    return Explaining()


def _shown_with(error: BaseException | None) -> Iterator[BaseException]:
    """Yield an error, those of its group, and those that Python shows above it."""
    waiting, seen = [error], set[int]()
    while waiting:
        it = waiting.pop()
        # Our own errors already explain the one that they were raised from.
        if it is None or id(it) in seen or isinstance(it, GradlibError):
            continue
        seen.add(id(it))
        yield it
        if isinstance(it, BaseExceptionGroup):
            waiting += cast("BaseExceptionGroup[BaseException]", it).exceptions
        waiting.append(it.__cause__ if it.__suppress_context__ else it.__context__)


def _is_explained(error: BaseException) -> bool:
    """Tell whether a block inside this one has explained the error."""
    return any(note.startswith("\n[GL") for note in getattr(error, "__notes__", []))


def _explanation(error: BaseException) -> Diagnosis | None:
    """Return what an error of autograd means; ``None`` for any other error.

    Where torch itself made the call, as in torch.func.vjp, the code of the explanation
    is left out: it would be in torch's names, which mean nothing to the user.
    """
    arguments = innermost_call(error)
    found = _meaning(error, arguments)
    if found is None or arguments is None or arguments.site is not None:
        return found
    return replace(found, fix="")


def _meaning(error: BaseException, arguments: Arguments | None) -> Diagnosis | None:
    """Return what an error of autograd means, whoever made the call."""
    if arguments is not None and raised_by_hook(error):
        return None
    is_torchs = isinstance(error, RuntimeError)
    code = code_of(str(error)) if is_torchs else None
    # What only the run shows comes first if arguments are wrong as well.
    if arguments is not None and code not in ONLY_RAISED:
        # torch refuses some calls by accident, in the words of whatever fails first.
        found = diagnose(_as_torch_takes_it(arguments))
        if found is not None and _is_refused(found, code):
            return found
    return explain_raised(error, arguments) if is_torchs else None


def _as_torch_takes_it(arguments: Arguments) -> Arguments:
    """Return a call without surplus grad_outputs, which torch drops.

    torch fails before it drops them where one is no tensor, as a list of numbers, or
    where they are rows instead of one batch: these calls stay as they are.
    """
    vectors = arguments.grad_outputs
    values = vectors.values[: len(arguments.outputs.values)]
    are_no_batch = arguments.is_grads_batched and are_rows(arguments)
    if are_no_batch or not all(it is None or isinstance(it, Tensor) for it in values):
        return arguments
    return replace(arguments, grad_outputs=replace(vectors, values=values))


def _is_refused(found: Diagnosis, code: str | None) -> bool:
    """Tell whether torch refuses what was found, whatever words it uses.

    It refuses GL103 too: the surplus vectors, which it would drop, are gone by now.
    """
    refuses = found.is_refused or CASES[found.code].torch_refuses
    return refuses or found.code in (code, "GL103")
