"""Tells a kink, a tie or rounding from a path that autograd does not see."""

from collections.abc import Sequence

import torch
from torch import Tensor

from gradlib.jacobian.causes import cut_path, samples_in
from gradlib.jacobian.coupling import require_no_pair
from gradlib.jacobian.differences import Caller, tensors_of
from gradlib.jacobian.graph import Graph, output_path
from gradlib.jacobian.repeatable import REPEATS, require_as_first
from gradlib.jacobian.slopes_beside import Verdict, look_beside
from gradlib.jacobian.warned import warn


def look_again(caller: Caller, graph: Graph, root: int, unclear: Tensor) -> None:
    """Raise for a path that autograd does not see, and not for kinks, ties or rounding.

    Each look compares a VJP, at the point or right beside it, with the slope there;
    both are computed anew, in float64 where possible. One look that agrees is enough.

    Args:
        caller: Calls the function.
        graph: The graph of its first call.
        root: Which output.
        unclear: Which of its entries are in doubt, ``(batch, out)``. Others may be as
            large and settle where these, too steep for any step, do not.
    """
    rows = unclear.any(1).cpu()
    verdicts: list[Verdict] = []
    for away, step in caller.how.looks:
        verdict, base = look_beside(caller, root, unclear, away, step)
        if base is not None:
            del base  # and its graph
            # A cut path may happen to change nothing along one direction.
            verdict, base = look_beside(caller, root, unclear, away, step)
        if base is not None:
            if not verdicts:  # then chance may be the reason for the doubt
                _require_as_first(caller, graph)
            # A sum over samples agrees, but not each: they may be coupled.
            y = tensors_of(base)[root]
            if y.requires_grad:
                batched = caller.arguments.batched()
                own = [base.leaves[it] for it in batched if it in base.leaves]
                with base.again():
                    require_no_pair(caller, [y], own)
            return
        verdicts.append(verdict)
    is_cut = _is_cut(verdicts) or _is_cut_for_few(caller, root, unclear)
    _require_as_first(caller, graph)
    if is_cut:
        raise cut_path(caller, graph, root, rows)
    name = output_path(graph.outputs, graph.places[root])
    warn(
        f"check=True cannot tell whether {name} changes as the Jacobian says "
        f"({samples_in(rows)}): finite differences do not settle there. It is not "
        "finite, too steep, or rounding hides it."
    )


def _require_as_first(caller: Caller, graph: Graph) -> None:
    """Raise where the first call gave other outputs, by several tries."""
    for _ in range(REPEATS):
        require_as_first(caller, graph)


def _is_cut(verdicts: Sequence[Verdict]) -> bool:
    """Tell whether looks have found a path that autograd does not see.

    The last look has the longest step. Where only shorter steps find the output flat,
    the output may be rounded to a grid.
    """
    last = verdicts[-1] in (Verdict.APART, Verdict.FLAT)
    return last or verdicts.count(Verdict.APART) > 2


def _is_cut_for_few(caller: Caller, root: int, unclear: Tensor) -> bool:
    """Tell the same by looks at one sample, of whose inputs few entries move."""
    meant = caller.meant
    if meant.symmetric is not None or meant.triangular is not None:
        return False  # a matrix must move as a whole
    sample = unclear.any(1).nonzero()[0]
    one = torch.zeros_like(unclear).index_copy_(0, sample, unclear[sample])
    looks = caller.how.looks
    verdicts = [look_beside(caller, root, one, *it, thin=True)[0] for it in looks]
    # Where fn rounds to hundredths, longer steps do not settle here either.
    seen = [it for it in verdicts if it in (Verdict.APART, Verdict.FLAT)]
    return _is_cut(verdicts) or len(seen) > 2
