"""The one door to the folder `fast`: is there a shorter way?

Without that folder there is none, and every answer is the same.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gradlib.jacobian.fast.door import find_shorter
else:
    try:
        from gradlib.jacobian.fast.door import find_shorter
    except ModuleNotFoundError as error:
        if not str(error.name).startswith("gradlib.jacobian.fast"):
            raise  # the folder is there, and something that it needs is not

        def find_shorter(*_: Any) -> None:
            """Find nothing."""


__all__ = ["find_shorter"]
