"""How much Python something takes: a count, which a busy machine does not change."""

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any


def python_steps(run: Callable[[], object]) -> int:
    """Return how many lines, calls and returns a function takes in this thread.

    The lines of all that the function calls count, and each turn of a loop that stands
    on one line. Opcodes would say the same, and take several times as long to count.
    """
    spent, before = 0, sys.gettrace()

    def count(_frame: FrameType, _event: str, _: object) -> Any:
        nonlocal spent
        spent += 1
        return count

    sys.settrace(count)
    try:
        run()
    finally:
        sys.settrace(before)
    return spent
