"""Cleaning up in several steps, all of which are taken whatever one of them raises."""

from collections import deque
from collections.abc import Callable, Iterable


def finish(steps: Iterable[Callable[[], object]]) -> None:
    """Take all steps, and raise at the end what was raised first.

    One that an interrupt breaks off, as that of Ctrl-C, is taken again: each must be
    one that may be.
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
