"""The error for a path that autograd does not see, with its possible causes."""

from torch import Tensor

from gradlib.errors import DetachedPathError
from gradlib.jacobian.differences import Caller
from gradlib.jacobian.directions import Meant
from gradlib.jacobian.graph import Graph, output_path
from gradlib.jacobian.known_modules import modules_known_to
from gradlib.jacobian.other_slopes import differs_from_slopes
from gradlib.module_hook import without_ours
from gradlib.private.hooks import any_global_backward_hook, backward_hooks
from gradlib.selection import modules_of
from gradlib.wording import listed, with_article


def cut_path(
    caller: Caller, graph: Graph, root: int, rows: Tensor
) -> DetachedPathError:
    """Return the error for an output whose slope is not the Jacobian's.

    Args:
        caller: Calls the function.
        graph: The graph of its first call.
        root: Which output has another slope.
        rows: Whether each sample has, ``(batch,)``.
    """
    name = output_path(graph.outputs, graph.places[root])
    apart = (
        f"{name} changes with the input in a way that autograd does not see "
        f"({samples_in(rows)}): its slope by finite differences is not the Jacobian's. "
    )
    if why := differs_from_slopes(graph):
        return DetachedPathError(apart + why)
    seen = list(caller.at().lifted.left)
    hint = "such as .detach(), torch.no_grad(), NumPy or .item()"
    if caller.arguments.of_parameters:
        hint += ", or a checkpoint with use_reentrant=True that is given only data"
    if seen:
        hint = f"and fn uses {', '.join(seen[:3])}"
    return DetachedPathError(
        f"{apart}Something cuts a path, {hint}; a backward of your own may be wrong; "
        f"{_hook(caller.arguments.fn, graph)} may change gradients; or "
        f"{_half_read(caller.meant)}. If it is meant, as with a straight-through "
        "estimator, pass check=False."
    )


def samples_in(rows: Tensor) -> str:
    """Return the numbers of the first samples marked in `rows`, in words."""
    samples = [sample for sample, is_one in enumerate(rows) if is_one]
    return f"sample{'s' * (len(samples) > 1)} {listed(samples)}"


def _hook(fn: object, graph: Graph) -> str:
    """Return which hook may change gradients: a module's, or one that fn has set."""
    for model in modules_known_to(fn):
        for name, module in modules_of(model).items():
            if any(map(without_ours, backward_hooks(module))):
                kind = type(module).__name__
                called = f'"{name}", {with_article(kind)},' if name else f"the {kind}"
                return f"the backward hook of {called}"
    if any_global_backward_hook():
        return "the backward hook of all modules"
    return "a hook that fn has set" if graph.may_have_hooks else "a hook"


def _half_read(meant: Meant) -> str:
    """Return which operation may read only half of a matrix."""
    if meant.symmetric is None and meant.triangular is not None:
        return f"{meant.triangular} takes a matrix A for triangular, and wants A.tril()"
    taken = "an operation may take"
    if meant.symmetric is not None:
        taken = f"{meant.symmetric} takes"
    return f"{taken} a matrix A for symmetric, and wants (A + A.mT) / 2"
