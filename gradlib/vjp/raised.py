"""Explains errors that autograd raised: the cases that show only when it runs."""

import re

from gradlib.edges import nodes_behind
from gradlib.private.nodes import changed_since_saved
from gradlib.shared_memory import storage_of
from gradlib.vjp.arguments import Arguments
from gradlib.vjp.carried import carried
from gradlib.vjp.cases import CASES
from gradlib.vjp.diagnosis import Diagnosis
from gradlib.vjp.earlier_pass import earlier_pass
from gradlib.vjp.fixes import CALL, ORIGINAL, call, recomputed
from gradlib.vjp.layout_checks import sparse_refused
from gradlib.vjp.refused import leaf_changed, numpy_refused
from gradlib.vjp.spelling import in_own_names, own_names
from gradlib.vjp.tensor_names import called, named_tensors, variable_of
from gradlib.vjp.tracebacks import is_of_another
from gradlib.vjp.wordings import code_of
from gradlib.wording import listed

_CHANGED = re.compile(
    r"\[\S+ \[(?P<shape>[\d, ]*)\]\](,? which is .*?)? is at version (?P<version>\d+)"
)
_POSITION = re.compile(r"Tensor at index (\d+)")

FEW = 4
"""The most tensors that are named."""


def explain_raised(
    error: BaseException,
    arguments: Arguments | None,
) -> Diagnosis | None:
    """Return what an error of autograd means; ``None`` for any other error.

    Args:
        error: What was raised.
        arguments: The call that raised it, in which `diagnose` finds nothing wrong;
            ``None`` where it is not known.
    """
    code = code_of(str(error))
    if code in (None, "GL115") and arguments is not None:
        # Before the call, torch does not tell the layout of a gradient edge.
        found = sparse_refused(arguments, str(error))
        if found is not None:
            return in_own_names(found, arguments)
    if code is None:
        return None
    if (found := _of_no_call(error)) is not None:
        return found
    if arguments is not None and code in _OF_A_CALL:
        return in_own_names(_OF_A_CALL[code](error, arguments), arguments)
    case = CASES[code]
    return Diagnosis(
        code,
        f"{case.title}.",
        intent="A program that does it right:",
        fix=case.right.rstrip(),
    )


def explain_own(error: RuntimeError, arguments: Arguments) -> Diagnosis | None:
    """Return what an error of our own call means; ``None`` for one of code inside it.

    That is a hook, a custom Function, or a call that one of these makes.
    """
    return None if is_of_another(error, arguments) else explain_raised(error, arguments)


def _of_no_call(error: BaseException) -> Diagnosis | None:
    """Explain an error of torch's that was raised outside any call of autograd."""
    if "leaf Variable" in str(error):
        return leaf_changed(error)
    return numpy_refused(error) if "numpy()" in str(error) else None


def _freed(_: BaseException, arguments: Arguments) -> Diagnosis:
    outputs = arguments.outputs
    place = called(outputs, 0, arguments.frames) if outputs.values else outputs.name
    lines, others = _lines_before(arguments)
    return Diagnosis(
        "GL111",
        f"An earlier pass freed the graph of {place}, or a part of it.",
        intent="Two losses that share a part: add them, and make one pass; or detach() "
        "the part for the one that must not change it, as a GAN's discriminator. A "
        "tensor kept from an earlier step of a loop, as a hidden state: detach() it. "
        "Otherwise change the earlier pass, not this one: let it retain the graph.",
        fix=recomputed(arguments, *lines, retain_graph=None),
        others=others,
    )


def _lines_before(arguments: Arguments) -> tuple[list[str], dict[str, str]]:
    """Return the code that leaves a graph for a call, and what letters in it stand for.

    The earlier pass retains the graph; or what an earlier step left is detached.
    """
    if (earlier := earlier_pass(arguments)) is not None:
        is_same = earlier.output in _names_of_outputs(arguments)
        start = "y = f(x)" if is_same else f"{ORIGINAL}, y = f(x)"
        others = {ORIGINAL: earlier.output, CALL: earlier.code}
        return [start, f"{CALL}  # the earlier pass"], others
    if names := carried(arguments):
        others = {f"{ORIGINAL}{i}": name for i, name in enumerate(names)}
        lines = [
            f"{letter} = {names[it].format(letter)}  # from an earlier step"
            for letter, it in others.items()
        ]
        named = (letter for letter, it in others.items() if it.isidentifier())
        return [*lines, f"y = f({', '.join(['x', *named])})"], others
    passed = call(arguments, retain_graph=True)
    return ["y = f(x)", f"{passed}  # the earlier pass"], {}


def _names_of_outputs(arguments: Arguments) -> tuple[str, ...]:
    """Return the outputs as the call writes them, or else the variables they are in."""
    site, values = arguments.site, arguments.outputs.values
    held = () if site is None else (variable_of(it, site.frame) for it in values)
    return own_names(arguments, "y") or tuple(held)


def _changed(error: BaseException, arguments: Arguments) -> Diagnosis:
    found = _CHANGED.search(str(error))
    names, is_sure = _candidates(found, arguments) if found else ([], True)
    return Diagnosis(
        "GL112",
        _what_changed([f"`{name}`" for name in names], is_sure),
        intent="Write h = h + 1 instead of h += 1, or change a clone(). An optimizer's "
        "step() changes parameters: call it after the last backward pass of a forward, "
        "and detach() what the next step is given, as a hidden state. "
        "torch.autograd.set_detect_anomaly(True) shows the line of the operation "
        "whose gradient fails.",
        fix=recomputed(arguments, "y = f(x)  # without in-place operations"),
    )


def _what_changed(names: list[str], is_sure: bool) -> str:
    if not names:
        return "A tensor that the backward pass needs was changed in place."
    if not is_sure:
        more = [f"one of {len(names) - FEW} more"] if len(names) > FEW else []
        return (
            "A tensor that the backward pass needs was changed in place, perhaps "
            f"{' or '.join([*names[:FEW], *more])}, which has that shape and was "
            "changed as often."
        )
    which = names[0] if len(names) == 1 else f"One of {listed(names, FEW)}"
    return f"{which} was changed in place, and the backward pass needs it."


def _candidates(found: re.Match[str], arguments: Arguments) -> tuple[list[str], bool]:
    """Return the names of tensors that an error may be about, and whether it surely is.

    It surely is about one that shares memory with what the graph has saved. Where the
    graph does not show that, only shapes and versions can tell.
    """
    shape = [int(size) for size in re.findall(r"\d+", found["shape"])]
    version = int(found["version"])
    shapes = (shape, shape[::-1])  # Linear saves its weight transposed
    named = [
        (name, tensor)
        for name, tensor in named_tensors(arguments.frames)
        if not tensor.is_inference() and tensor._version == version
    ]
    nodes = nodes_behind(arguments.outputs.values)
    changed = [it for node in nodes for it in changed_since_saved(node)]
    meant = (it for it in changed if (list(it.shape), it._version) == (shape, version))
    storages = [*filter(None, map(storage_of, meant))]
    if storages:
        names = [name for name, tensor in named if storage_of(tensor) in storages]
    else:
        names = [name for name, tensor in named if list(tensor.shape) in shapes]
    own = dict(named)
    first = {id(own[name]): name for name in reversed(names)}  # the first name of each
    return [*dict.fromkeys(it for it in names if it in first.values())], bool(storages)


def _unreached(error: BaseException, arguments: Arguments) -> Diagnosis:
    inputs = arguments.inputs
    found = _POSITION.search(str(error))
    i = int(found[1]) if found else 0
    is_known = found is not None or len(inputs.values) == 1
    place = called(inputs, i, arguments.frames) if is_known else "One of the inputs"
    return Diagnosis(
        "GL109",
        f"{place} is in the graph, and no gradient reached it.",
        intent="A function on the way gave None as its gradient.",
        fix=call(arguments, allow_unused=True),
    )


_OF_A_CALL = {"GL109": _unreached, "GL111": _freed, "GL112": _changed}
