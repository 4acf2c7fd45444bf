"""What is wrong where autograd has raised: the cases that show only then."""

import re
from collections.abc import Sequence
from dataclasses import replace
from types import FrameType

from gradlib.vjp.arguments import Arguments
from gradlib.vjp.calls import raised_by_autograd
from gradlib.vjp.cases import CASES
from gradlib.vjp.diagnosis import (
    CALL,
    ORIGINAL,
    Diagnosis,
    call,
    diagnosis,
    recomputed,
)
from gradlib.vjp.earlier_pass import earlier_pass
from gradlib.vjp.layout_checks import sparse_refused
from gradlib.vjp.names import called, named_tensors
from gradlib.vjp.spelling import in_own_names, own_names
from gradlib.vjp.wordings import code_of

_CHANGED = re.compile(
    r"\[\S+ \[(?P<shape>[\d, ]*)\]\],? which is .*? is at version (?P<version>\d+)"
)
_POSITION = re.compile(r"Tensor at index (\d+)")


def explain_raised(
    error: BaseException,
    arguments: Arguments | None = None,
    *,
    frames: Sequence[FrameType] = (),
) -> Diagnosis | None:
    """Return what an error of autograd means; ``None`` for an error that is none.

    Args:
        error: What was raised.
        arguments: Of the call that raised it, in which `diagnose` finds nothing wrong;
            ``None`` where they are not known.
        frames: Where to look for the names of tensors, the innermost first.
    """
    code = code_of(str(error))
    if code is None:
        return _of_another_layout(error, arguments)
    if arguments is not None and code in _OF_A_CALL:
        return in_own_names(_OF_A_CALL[code](error, arguments, frames), arguments)
    case = CASES[code]
    return diagnosis(
        code,
        "",
        f"{case.title}.",
        intent="A program that does it right:",
        fix=case.right.rstrip(),
    )


def _of_another_layout(
    error: BaseException, arguments: Arguments | None
) -> Diagnosis | None:
    """Explain what an operation of torch's own raises at a sparse gradient."""
    if arguments is None or not raised_by_autograd(error):
        return None
    found = sparse_refused(arguments, str(error))
    return None if found is None else in_own_names(found, arguments)


def _freed(
    _: BaseException, arguments: Arguments, frames: Sequence[FrameType]
) -> Diagnosis:
    outputs = arguments.outputs
    place = called(outputs, 0, frames) if outputs.values else outputs.name
    earlier = earlier_pass(arguments.site)
    passed = call(arguments, retain_graph=True)
    lines = ["y = f(x)", f"{passed}  # the earlier pass"]
    others: dict[str, str] = {}
    if earlier is not None:
        is_same = any(it == earlier.output for it in own_names(arguments, "y"))
        lines = [
            "y = f(x)" if is_same else f"{ORIGINAL}, y = f(x)",
            f"{CALL}  # the earlier pass",
        ]
        others = {ORIGINAL: earlier.output, CALL: earlier.code}
    found = diagnosis(
        "GL111",
        outputs.places[0] if outputs.places else outputs.name,
        f"An earlier pass freed the graph of {place}, or a part of it.",
        intent="Two losses that share a part: add them, and make one pass. A tensor "
        "kept from an earlier step of a loop, as a hidden state: detach() it. "
        "Otherwise change the earlier pass, not this one: let it retain the graph.",
        fix=recomputed(arguments, *lines, retain_graph=None),
    )
    return replace(found, others=others)


def _changed(
    error: BaseException, arguments: Arguments, frames: Sequence[FrameType]
) -> Diagnosis:
    found = _CHANGED.search(str(error))
    names = _candidates(found, frames) if found else []
    if not names:
        what = "A tensor that the backward pass needs was changed in place."
    elif len(names) == 1:
        what = f"`{names[0]}` was changed in place, and the backward pass needs it."
    else:
        listed = ", ".join(f"`{name}`" for name in names[:4])
        what = f"One of {listed} was changed in place, and the backward pass needs it."
    return diagnosis(
        "GL112",
        names[0] if len(names) == 1 else "",
        what,
        intent="Write h = h + 1 instead of h += 1, or change a clone(). An optimizer's "
        "step() changes parameters: call it after the last backward pass of a forward. "
        "torch.autograd.set_detect_anomaly(True) shows the line of the operation "
        "whose gradient fails.",
        fix=recomputed(arguments, "y = f(x)  # without in-place operations"),
    )


def _candidates(found: re.Match[str], frames: Sequence[FrameType]) -> list[str]:
    """Return the names of tensors that an error may be about: by shape and version."""
    shape = [int(size) for size in re.findall(r"\d+", found["shape"])]
    version = int(found["version"])
    return list(
        dict.fromkeys(
            name
            for name, tensor in named_tensors(frames)
            if not tensor.is_inference()
            and tensor._version == version
            and list(tensor.shape) in (shape, shape[::-1])  # Linear transposes
        )
    )


def _unreached(
    error: BaseException, arguments: Arguments, frames: Sequence[FrameType]
) -> Diagnosis:
    inputs = arguments.inputs
    found = _POSITION.search(str(error))
    i = int(found[1]) if found else 0
    is_known = found is not None or len(inputs.values) == 1
    place = called(inputs, i, frames) if is_known else "One of the inputs"
    return diagnosis(
        "GL109",
        inputs.places[i] if is_known else inputs.name,
        f"{place} is in the graph, and no gradient reached it.",
        intent="A function on the way gave None as its gradient.",
        fix=call(arguments, allow_unused=True),
    )


_OF_A_CALL = {"GL109": _unreached, "GL111": _freed, "GL112": _changed}
