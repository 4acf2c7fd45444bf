"""Cleaning up in several steps, all of which are taken whatever one of them raises."""

from collections import deque
from collections.abc import Callable, Iterable


def finish(steps: Iterable[Callable[[], object]]) -> None:
    """Take all steps, then raise the first exception that one of them raised.

    A step that an interrupt breaks off, such as Ctrl-C, is taken again: each step must
    be safe to repeat.
    """
    raised: BaseException | None = None
    waiting = deque(steps)
    while waiting:
        try:
            while waiting:
                waiting[0]()
                waiting.popleft()
        except Exception as error:
            raised = raised or error
            waiting.popleft()
        except BaseException as interrupt:
            raised = raised or interrupt
    if raised is not None:
        raise raised
