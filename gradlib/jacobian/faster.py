"""The one door to the folder `fast`: is there a shorter way?

Without that folder there is none, and every answer is the same.
"""

from typing import Any, cast

try:
    from gradlib.jacobian.fast.chains.evaluate import evaluate
    from gradlib.jacobian.fast.chains.find import find_chain
    from gradlib.jacobian.fast.chains.planned import planned as chain_planned
    from gradlib.jacobian.fast.structure.structured import find as find_structure
    from gradlib.jacobian.fast.structure.structured import planned as structure_planned
except ModuleNotFoundError:

    def _nothing(*_: Any) -> None:
        return None

    find_chain = find_structure = evaluate = cast(Any, _nothing)
    chain_planned = structure_planned = evaluate

__all__ = [
    "chain_planned",
    "evaluate",
    "find_chain",
    "find_structure",
    "structure_planned",
]
