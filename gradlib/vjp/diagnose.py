"""What is wrong with an autograd call, found before it runs."""

from torch import Tensor
from torch.autograd.graph import GradientEdge

from gradlib.vjp.arguments import Arguments
from gradlib.vjp.diagnosis import Diagnosis
from gradlib.vjp.graph_checks import check_connected
from gradlib.vjp.kind_checks import check_empty, check_kinds
from gradlib.vjp.requires_grad_checks import check_requires_grad
from gradlib.vjp.spelling import in_own_names
from gradlib.vjp.vector_checks import check_vectors
from gradlib.vjp.vector_lists import check_count, check_options, check_vector_kinds


def diagnose(arguments: Arguments) -> Diagnosis | None:
    """Return what is wrong with a call; ``None`` where autograd can run it.

    Nothing runs, and the graph stays as it is. A graph that was freed and a tensor that
    was changed in place show only when the call runs: `explain_raised` is for those.
    """
    found = _found(arguments)
    return None if found is None else in_own_names(found, arguments)


def _found(arguments: Arguments) -> Diagnosis | None:
    found = check_kinds(arguments)
    if found is not None or _torch_knows_better(arguments):
        return found
    # Each check takes for granted that those before it found nothing.
    return (
        check_empty(arguments)
        or check_vector_kinds(arguments)
        or check_count(arguments)
        or check_options(arguments)
        or check_requires_grad(arguments)
        or check_connected(arguments)
        or check_vectors(arguments)
    )


def _torch_knows_better(arguments: Arguments) -> bool:
    """Tell whether torch, or a class that overrides it, says better what is wrong.

    torch itself says so when two options contradict each other.
    """
    if arguments.materialize_grads and not arguments.allow_unused:
        return True
    values = (*arguments.outputs.values, *arguments.inputs.values)
    return not all(isinstance(value, Tensor | GradientEdge) for value in values)
