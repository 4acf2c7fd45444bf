"""The only import of the folder `fast`, which finds shorter ways to a Jacobian.

Without that folder none is found, and every result is the same.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gradlib.jacobian.fast.door import find_in_call, find_in_graph
else:
    try:
        from gradlib.jacobian.fast.door import find_in_call, find_in_graph
    except ModuleNotFoundError as error:
        if not str(error.name).startswith("gradlib.jacobian.fast"):
            raise  # the folder is there, but not something it imports

        def find_in_call(_: Any) -> None:
            """Find nothing."""

        def find_in_graph(*_: Any) -> None:
            """Find nothing."""


__all__ = ["find_in_call", "find_in_graph"]
