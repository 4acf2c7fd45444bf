"""Cleaning up in several steps, all of which are taken whatever one of them raises."""

from collections.abc import Callable, Iterable


def finish(steps: Iterable[Callable[[], object]]) -> None:
    """Take all steps, and raise at the end what was raised first.

    One that an interrupt breaks off, as that of Ctrl-C, is taken again: each must be
    one that may be.
    """
    raised: BaseException | None = None
    for step in steps:
        is_done = False
        while not is_done:
            try:
                step()
                is_done = True
            except Exception as error:
                raised, is_done = raised or error, True
            except BaseException as interrupt:
                raised = raised or interrupt
    if raised is not None:
        raise raised
