"""How much Python something takes: a count, which a busy machine does not change."""

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any


def opcodes(run: Callable[[], object]) -> int:
    """Return how many opcodes a function and all that it calls take in this thread."""
    spent, before = 0, sys.gettrace()

    def count(frame: FrameType, event: str, _: object) -> Any:
        nonlocal spent
        frame.f_trace_opcodes = True
        spent += event == "opcode"
        return count

    # Python 3.12 counts none where no frame asked for them before the first is traced.
    sys._getframe().f_trace_opcodes = True
    sys.settrace(count)
    try:
        run()
    finally:
        sys.settrace(before)
    return spent
