"""The one door to the folder `fast`: is there a shorter way?

Without that folder there is none, and every answer is the same.
"""

from typing import Any, cast

try:
    from gradlib.jacobian.fast.chains.find import find_chain, jacobian_of_chain
    from gradlib.jacobian.fast.chains.planned import planned
    from gradlib.jacobian.fast.in_graph import find_in_graph
except ModuleNotFoundError:

    def _nothing(*_: Any) -> None:
        return None

    find_chain = find_in_graph = jacobian_of_chain = planned = cast(Any, _nothing)

__all__ = ["find_chain", "find_in_graph", "jacobian_of_chain", "planned"]
